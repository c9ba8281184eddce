"""Models and checkpoints on disk: safetensors for tensors, JSON for the rest, never pickle.

A checkpoint is a folder that appears whole or not at all. Its files are written to a folder of
another name, synced to the disk, listed with sizes and checksums in a manifest, which is written
last, and the folder is renamed. What a kill leaves behind is never taken for a checkpoint, and what
a disk has damaged is found and named.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from txl_model.config import TransformerXLConfig
from txl_model.distributed import Processes, sharded_like
from txl_model.model import TransformerXL

CONFIG, WEIGHTS, AVERAGE, MANIFEST = (
    "config.json",
    "model.safetensors",
    "average.safetensors",
    "manifest.json",
)
FORMAT = 1

# -------------------------------------------------------------------------------------------- models


def save_model(
    model: TransformerXL,
    path: str | os.PathLike[str],
    about: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model to a folder, as config.json and model.safetensors, in place of one that is there.

    Args:
        model: its weights are written in their dtype; if torch.compile has wrapped it, under its own names.
        path: the folder; made if it is not there.
        about: further entries of config.json, beside "model".
        metadata: goes into the header of model.safetensors.

    Raises:
        OSError: if the folder cannot be written to, or the disk is full. What was there before is
            there still.
    """
    try:
        with replacing(Path(path)) as scratch:
            write(scratch / CONFIG, {**(about or {}), "model": model.config.to_dict()})
            write(scratch / WEIGHTS, unwrapped(model).state_dict(), metadata)
    except OSError as error:
        raise OSError(f"cannot save the model in {path}: {reason(error)}") from error


def load_model(
    path: str | os.PathLike[str],
    backend: str | None = None,
    report: Callable[[str], object] = lambda message: None,
) -> TransformerXL:
    """A model from disk, in evaluation mode, float32, on the CPU.

    Args:
        path: the folder of a training run (its best model, or the newest checkpoint where nothing
            was evaluated), of a checkpoint (the averaged weights where there are any), or what
            `save_model` or `txl convert` wrote.
        backend: the attention kernel, as in `TransformerXL`.
        report: told which of a run's folders is read, and of each damaged checkpoint that is passed over.

    Raises:
        FileNotFoundError: there is no model there.
        ValueError: a file is damaged, or its tensors are not those of the config beside it.
    """
    folder = model_folder(Path(path), report)
    if folder != Path(path):
        report(f"reads {folder}")
    weights = folder / WEIGHTS
    if (folder / MANIFEST).exists():
        problem = damage(folder, (CONFIG,))
        if problem is None:  # by what there was, in case the average alone was not copied
            weights = folder / (AVERAGE if AVERAGE in read_json(folder / MANIFEST)["files"] else WEIGHTS)
            problem = damage(folder, (weights.name,))
        if problem:
            raise ValueError(f"the checkpoint {folder} is damaged: {problem}")
    config = read_json(folder / CONFIG)
    try:
        model_config = TransformerXLConfig.from_dict(config["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} does not describe a model: {error}") from error
    return model_of(model_config, read_tensors(weights), weights, backend).eval()


def model_of(
    config: TransformerXLConfig, tensors: Mapping[str, Tensor], source: object, backend: str | None = None
) -> TransformerXL:
    """A model whose weights are these tensors themselves, named as in its state dict: none are drawn first.

    Those of another dtype than a new model's are converted. Raises ValueError as `load_weights` does.
    """
    with torch.device("meta"):
        model = TransformerXL(config, backend)
    targets = _targets(model, tensors, source)
    weights = {name: tensors[name].detach().to(target.dtype) for name, target in targets.items()}
    model.load_state_dict(weights, assign=True)
    return model


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], source: object) -> None:
    """Put tensors, named as in the model's state dict, into the model, sharded or not.

    Raises ValueError, naming `source` and the first parameter that differs, if they are those of
    another model.
    """
    with torch.no_grad():
        for name, target in _targets(model, tensors, source).items():
            target.copy_(sharded_like(tensors[name], target))


def _targets(model: nn.Module, tensors: Mapping[str, Tensor], source: object) -> dict[str, Tensor]:
    """The model's state dict. Raises ValueError where the tensors are not of its names and shapes."""
    targets: dict[str, Tensor] = model.state_dict()
    for name, target in targets.items():
        if name not in tensors:
            raise ValueError(f"{source} holds another model: it has no {name}")
        if tensors[name].shape != target.shape:
            raise ValueError(
                f"{source} holds a model of another shape: {name} is {list(tensors[name].shape)} there, "
                f"{list(target.shape)} here"
            )
    unknown = sorted(set(tensors) - set(targets))
    if unknown:
        raise ValueError(f"{source} holds another model: this one has no {unknown[0]}")
    return targets


def unwrapped(model: TransformerXL) -> TransformerXL:
    """The model that torch.compile has wrapped, if it has: the wrapper puts a prefix to every name."""
    original: TransformerXL = getattr(model, "_orig_mod", model)
    return original


def best_model(run: Path) -> tuple[int, float] | None:
    """The step of the model in a run's best/ and its validation loss. None: there is none that says so."""
    try:
        with safe_open(run / "best" / WEIGHTS, "pt") as file:
            metadata = file.metadata() or {}
        return int(metadata["step"]), float(metadata["valid_loss"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def run_config(folder: Path) -> dict[str, Any] | None:
    """What config.json says in the folder of a training run. None: that is no run, but a model, say.

    Raises ValueError if the file is damaged.
    """
    path = folder / CONFIG
    if not path.exists() or (folder / WEIGHTS).exists():  # models and checkpoints have a config.json too
        return None
    config = read_json(path)
    return config if {"model", "train"} <= set(config) else None


def refuse_other_files(folder: Path, ours: str) -> None:
    """Raises ValueError for a folder with anything in it: it is not `ours`, which would mix with it."""
    # A hidden one may be what a kill left of our own.
    others = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    if others:
        raise ValueError(
            f"{folder} is not empty and holds no {ours}: there is {others[0]} in it. Name another folder"
        )


def model_folder(path: Path, report: Callable[[str], object]) -> Path:
    """The folder that holds the config and weights that `load_model` is to read."""
    if (path / "best" / WEIGHTS).exists():
        return path / "best"
    if (path / "checkpoints").is_dir():
        newest = Checkpoints(path / "checkpoints").newest(report)
        if newest is None:
            raise FileNotFoundError(f"the training run in {path} has saved no checkpoint yet")
        return newest
    if (path / CONFIG).exists() and (path / WEIGHTS).exists():
        return path
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    raise FileNotFoundError(
        f"there is no model in {path}: expected the folder of a training run (with checkpoints/ or "
        f"best/), a checkpoint, or a folder with {CONFIG} and {WEIGHTS}"
    )


# --------------------------------------------------------------------------------------- checkpoints


class Checkpoints:
    """The checkpoints of a run: folders step-00001000, ... in `folder`; the newest `keep` stay."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 1) -> None:
        self.folder, self.keep = Path(folder), keep

    def path(self, step: int) -> Path:
        """Where the checkpoint made after `step` updates is, or will be."""
        return self.folder / f"step-{step:08d}"

    @staticmethod
    def step(checkpoint: Path) -> int:
        """After how many updates a checkpoint was made."""
        return int(checkpoint.name.removeprefix("step-"))

    def all(self) -> list[Path]:
        """Those there are, damaged ones too, oldest first."""
        if not self.folder.is_dir():
            return []
        folders = (p for p in self.folder.glob("step-*") if p.name.removeprefix("step-").isdecimal())
        return sorted(folders, key=self.step)

    def newest(self, report: Callable[[str], object] = lambda message: None) -> Path | None:
        """The newest one that is whole; None if there is none at all.

        `report` is told of each that is damaged and passed over. Raises ValueError if all are.
        """
        problems: list[str] = []
        for folder in reversed(self.all()):
            problem = damage(folder)
            if problem is None:
                for message in problems:
                    report(f"{message}; going back to {folder.name}")
                return folder
            problems.append(f"the checkpoint {folder} is damaged: {problem}")
        if problems:
            raise ValueError(f"{'; '.join(problems)}; no other is left")
        return None

    def tidy(self, step: int) -> None:
        """Before a run goes on from `step`: rename those that are newer, all damaged, and delete
        what a kill kept from being deleted.
        """
        for folder in self.all():
            if self.step(folder) > step:
                aside = folder.with_name(f"damaged-{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
        self._prune()

    def save(
        self,
        step: int,
        shared: Mapping[str, Mapping[str, Any]],
        own: Mapping[str, Mapping[str, Any]],
        processes: Processes,
    ) -> Path:
        """Write a checkpoint, then delete the oldest beyond `keep`. Every process calls this.

        Args:
            step: which names it.
            shared: file name to its tensors (*.safetensors) or JSON values (*.json); the first
                process's are taken.
            own: the same, for files that each process writes: named differently in each.
            processes: who takes part.

        Raises:
            OSError: the disk is full, or the folder cannot be written to. The other checkpoints are
                as they were.
        """
        final = self.path(step)
        scratch = self.folder / f".saving-{final.name}"
        try:
            with processes.together("saving the checkpoint"):
                if processes.first:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self._sweep()
                    scratch.mkdir()
            with processes.together("saving the checkpoint"):
                for name, content in {**(shared if processes.first else {}), **own}.items():
                    write(scratch / name, content)
            with processes.together("saving the checkpoint"):
                if processes.first:
                    write(scratch / MANIFEST, _manifest(scratch))
                    _sync(scratch)
                    scratch.rename(final)
                    _sync(self.folder)
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            before = self.all()
            kept = f"; {before[-1].name} is there still" if before else ""
            raise OSError(f"cannot save the checkpoint {final}: {reason(error)}{kept}") from error
        if processes.first:
            self._prune()
        return final

    def _prune(self) -> None:
        """Delete the oldest beyond `keep`."""
        for old in self.all()[: -self.keep]:
            # Renamed first: half a checkpoint must not look like one.
            old.rename(old.with_name(f".deleting-{old.name}"))
        self._sweep()

    def _sweep(self) -> None:
        """Delete what is to be deleted, and what a kill left of an earlier save."""
        for pattern in (".saving-*", ".deleting-*"):
            for folder in self.folder.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)


def damage(checkpoint: Path, names: tuple[str, ...] | None = None) -> str | None:
    """What is wrong with a checkpoint, or with those of its files that are named; None: nothing."""
    try:
        manifest = read_json(checkpoint / MANIFEST)
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']!r}, and this version reads {FORMAT}"
        files = manifest["files"]
        for name in files if names is None else names:
            path, size = checkpoint / name, files[name]["bytes"]
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
            if _sha256(path) != files[name]["sha256"]:
                return f"{name} has changed since it was written (another checksum)"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} cannot be read: {reason(error)}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is no manifest"
    return None


def _manifest(folder: Path) -> dict[str, Any]:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir())}
    return {"format": FORMAT, "files": files}


# --------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A scratch folder; files written there take their places in `folder` at the end, each whole.

    Raises OSError, with `folder` as it was.
    """
    scratch = folder / ".saving"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        for path in sorted(scratch.iterdir()):
            path.replace(folder / path.name)
        _sync(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write(path: Path, content: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors (*.safetensors) or JSON values (*.json), down to the disk. Raises OSError."""
    if path.suffix == ".safetensors":
        tensors = {name: x.detach().contiguous() for name, x in content.items()}
        try:
            safetensors.torch.save_file(tensors, path, dict(metadata) if metadata else None)
        except SafetensorError as error:  # what it makes of every error of the operating system
            raise OSError(f"{path.name}: {error}") from error
        # The library lets nobody but the owner read it; others may read it as they may the folder.
        path.chmod(path.parent.stat().st_mode & 0o666)
    else:
        path.write_text(json.dumps(content, indent=1) + "\n")
    _sync(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises FileNotFoundError, or ValueError if it is none.
    """
    try:
        # Copied: the file's own pages are aligned as its header happens to be long, and sums over
        # tensors that are aligned otherwise can round otherwise.
        return {name: x.clone() for name, x in safetensors.torch.load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated, or no safetensors file: {error}") from error


def read_json(path: Path) -> Any:
    """The object in a JSON file.

    Raises FileNotFoundError, or ValueError if the file holds no JSON object.
    """
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise  # some file systems cannot tell of folders
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """What the system says, without the number and the path in front."""
    return error.strerror or str(error)
