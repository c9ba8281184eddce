"""The published configurations (the scripts beside the authors' code), and small ones for trying out.

`model` goes to `TransformerXLConfig`, `train` to `TrainConfig`, `eval` says how the published
numbers were read.
"""

from __future__ import annotations

from typing import Any

_WT103 = {
    "vocab_size": 267735,
    "cutoffs": (20000, 40000, 200000),
    "tie_projs": (False, True, True, True),
}
_LM1B = {
    "vocab_size": 793471,
    "cutoffs": (60000, 100000, 640000),
    "div_val": 4,
    "tie_projs": (False, False, False, False),
    "tgt_len": 32,
    "mem_len": 32,
}
_CHARACTER_BASE = {
    "n_layer": 12,
    "d_model": 512,
    "n_head": 8,
    "d_head": 64,
    "d_inner": 2048,
    "dropout": 0.1,
    "tgt_len": 512,
    "mem_len": 512,
}
_CHARACTER_LARGE = {
    "n_layer": 24,
    "d_model": 1024,
    "n_head": 8,
    "d_head": 128,
    "d_inner": 3072,
    "dropout": 0.15,
    "dropatt": 0.15,
    "tgt_len": 768,
    "mem_len": 768,
}
_READ_BASE = {"tgt_len": 80, "mem_len": 2100, "clamp_len": 820, "same_length": True}
_READ_LARGE = {"tgt_len": 128, "mem_len": 3800, "clamp_len": 1000, "same_length": True}
_READ_LM1B = {"tgt_len": 32, "mem_len": 128, "same_length": True}

# The initial weights of a narrow model: the published 0.02, made for wide ones, costs it its first minute.
# A clamp at the length of training lets evaluation remember further without a distance never seen.
_TINY = {
    "vocab_size": 256,
    "n_layer": 3,
    "d_model": 128,
    "n_head": 8,
    "d_head": 16,
    "d_inner": 512,
    "dropout": 0.0,
    "tgt_len": 128,
    "mem_len": 384,
    "clamp_len": 128,
    "pre_lnorm": True,
    "init_std": 0.05,
}
_SMALL = {
    **_TINY,
    "n_layer": 6,
    "d_model": 256,
    "d_head": 32,
    "d_inner": 1024,
    "dropout": 0.1,
    "tgt_len": 256,
    "mem_len": 512,
    "clamp_len": 400,
    "init_std": 0.03,
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "wt103-base": {
        "model": {
            **_WT103,
            "n_layer": 16,
            "d_model": 410,
            "n_head": 10,
            "d_head": 41,
            "d_inner": 2100,
            "dropout": 0.1,
            "tgt_len": 150,
            "mem_len": 150,
        },
        "train": {"batch_size": 60, "max_step": 200_000},
        "eval": {"tgt_len": 64, "mem_len": 640, "clamp_len": 400, "same_length": True},
    },
    "wt103-large": {
        "model": {
            **_WT103,
            "div_val": 4,
            "n_layer": 18,
            "d_model": 1024,
            "n_head": 16,
            "d_head": 64,
            "d_inner": 4096,
            "dropout": 0.2,
            "dropatt": 0.2,
            "tgt_len": 384,
            "mem_len": 384,
        },
        "train": {"batch_size": 128, "max_step": 4_000_000, "warmup_step": 16_000},
        "eval": {"tgt_len": 128, "mem_len": 1600, "clamp_len": 1000, "same_length": True},
    },
    "enwik8-base": {
        "model": {"vocab_size": 204, **_CHARACTER_BASE},
        "train": {"batch_size": 22, "max_step": 400_000},
        "eval": _READ_BASE,
    },
    "enwik8-large": {
        "model": {"vocab_size": 204, **_CHARACTER_LARGE},
        "train": {"batch_size": 64, "max_step": 400_000, "warmup_step": 4000},
        "eval": _READ_LARGE,
    },
    "text8-base": {
        "model": {"vocab_size": 27, **_CHARACTER_BASE},
        "train": {"batch_size": 22, "max_step": 400_000},
        "eval": _READ_BASE,
    },
    "text8-large": {
        "model": {"vocab_size": 27, **_CHARACTER_LARGE},
        "train": {"batch_size": 64, "max_step": 400_000},
        "eval": _READ_LARGE,
    },
    "lm1b-base": {
        "model": {
            **_LM1B,
            "n_layer": 18,
            "d_model": 1024,
            "n_head": 8,
            "d_head": 128,
            "d_inner": 4096,
            "dropout": 0.0,
        },
        "train": {"batch_size": 224, "max_step": 500_000, "warmup_step": 20_000},
        "eval": _READ_LM1B,
    },
    "lm1b-large": {
        "model": {
            **_LM1B,
            "n_layer": 24,
            "d_model": 1280,
            "n_head": 16,
            "d_head": 80,
            "d_inner": 8192,
            "dropout": 0.05,
            "dropatt": 0.05,
        },
        "train": {"batch_size": 512, "max_step": 1_200_000, "warmup_step": 30_000},
        "eval": _READ_LM1B,
    },
    "tiny": {
        "model": _TINY,
        "train": {"batch_size": 8, "max_step": 2000, "lr": 5e-3, "warmup_step": 100, "clip": 1.0},
        "eval": {"tgt_len": 128, "mem_len": 512},
    },
    "small": {
        "model": _SMALL,
        "train": {"batch_size": 16, "max_step": 20_000, "lr": 1e-3, "warmup_step": 500},
        "eval": {"tgt_len": 128, "mem_len": 1000},
    },
}


def preset(name: str, part: str) -> dict[str, Any]:
    """The `part` ("model", "train", "eval") of a preset, a copy. Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return dict(PRESETS[name][part])
