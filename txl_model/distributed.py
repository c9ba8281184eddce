"""Training in several processes that torchrun started: one GPU each, or gloo on CPUs.

Every process reads its rows of the global batch. The loss is normalised by the tokens of all of
them, so that the same global batch gives the same loss curve whatever the number of processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from txl_model.memory import Memory
from txl_model.model import TransformerXL

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Processes:
    """This process among those that train together."""

    rank: int
    count: int
    device: torch.device

    @classmethod
    @contextlib.contextmanager
    def joined(cls, device: torch.device | str | None = None) -> Iterator[Processes]:
        """Join the processes that torchrun's environment tells of; without it, be the only one.

        A process group that exists already is used and stays. `device` "cuda": this process's GPU;
        None: that, or the CPU where there is none.
        """
        rank, count, local_rank = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda":
            device = torch.device("cuda", local_rank if device.index is None else device.index)
            torch.cuda.set_device(device)
        ours = count > 1 and not dist.is_initialized()
        if ours:
            # gloo beside nccl: what the processes agree on lies on the CPU and waits for no GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        try:
            if dist.is_initialized():
                rank, count = dist.get_rank(), dist.get_world_size()
            yield cls(rank, count, device)
        finally:
            if ours:
                dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes what is written once."""
        return self.rank == 0

    def rows(self, batch_size: int, batch_chunk: int = 1) -> range:
        """The rows of the global batch that this process reads, a multiple of batch_chunk."""
        if batch_size % (self.count * batch_chunk):
            parts = f"batch_chunk {batch_chunk}"
            if self.count > 1:
                parts += f" x {self.count} processes"
            raise ValueError(f"batch_size {batch_size} does not divide into {parts}")
        each = batch_size // self.count
        return range(self.rank * each, (self.rank + 1) * each)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, number: int) -> int:
        """The largest number that any process gives."""
        if self.count == 1:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block that fails in all processes if it fails in one, so that none waits for ever.

        They leave it together. It must not use collectives itself.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failed = self.largest(int(error is not None))
        if error is not None:
            raise error
        if failed:
            raise OSError(f"{what} failed in another process, whose message says why")


class Scorer(nn.Module):
    """The model as training sees it: the summed loss of a segment, in nats, and the next memory.

    DDP and FSDP2 hook into a module's plain tensors; `TransformerXLOutput` also has views and
    functions.
    """

    def __init__(self, model: TransformerXL) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, memory: Memory | None, labels: Tensor, ext_len: int
    ) -> tuple[Tensor, Memory]:
        """The arguments are `TransformerXL.forward`'s."""
        out = self.model(input_ids, memory, labels, ext_len)
        assert out.token_losses is not None
        return out.token_losses.sum(), out.memory


def parallelize(model: TransformerXL, parallel: str, processes: Processes) -> nn.Module:
    """A `Scorer` of the model that averages gradients over the processes.

    With "fsdp2" the model's parameters become sharded DTensors in place; make the optimizer
    afterwards.
    """
    scorer = Scorer(model)
    if processes.count == 1:
        return scorer
    if parallel == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh(processes.device.type, (processes.count,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(scorer, mesh=mesh)
        return scorer
    wrapped = DistributedDataParallel(scorer, gradient_as_bucket_view=True)
    _settle_buckets(wrapped, processes.device)
    return wrapped


def _settle_buckets(wrapped: DistributedDataParallel, device: torch.device) -> None:
    """DDP adds up gradients in buckets, which it forms anew once it has seen a backward. The place in a
    bucket decides in which order three or more processes add: a run that goes on would begin with
    another order than one that was not stopped has by then. So a backward of nothing comes first.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    wrapped.eval()  # without dropout, which would draw numbers
    with torch.compiler.set_stance("force_eager"):
        loss, _ = wrapped(token, None, token, 0)
    loss.backward()
    wrapped.zero_grad()
    wrapped.train()


@contextlib.contextmanager
def accumulating(scorer: nn.Module, more: bool) -> Iterator[None]:
    """Gradients of a chunk that `more` chunks follow are kept; after the last their sum is exchanged.

    FSDP2 exchanges each chunk's instead: kept, they would take the memory that sharding saves.
    """
    if more and isinstance(scorer, DistributedDataParallel):
        with scorer.no_sync():
            yield
    else:
        yield


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. If it is, every process must call this."""
    sharded = _as_sharded(tensor)
    return tensor.detach() if sharded is None else sharded.full_tensor().detach()


def sharded_like(value: Tensor, target: Tensor) -> Tensor:
    """This process's part of a whole tensor, if the target is sharded; on the target's device."""
    value, sharded = value.to(target.device), _as_sharded(target)
    if sharded is None:
        return value
    from torch.distributed.tensor import distribute_tensor

    # None: each has all of it, so that nothing needs to be sent.
    return distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)


def _as_sharded(tensor: Tensor) -> DTensor | None:
    if not dist.is_initialized():
        return None
    from torch.distributed.tensor import DTensor  # a second to import, which one process does without

    return tensor if isinstance(tensor, DTensor) else None
