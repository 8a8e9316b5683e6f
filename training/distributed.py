"""Several processes that train one model, as `torchrun` starts them: who each is, and what they say to one another.

Every process reads the same batches and draws the same random numbers. It works its share of each batch, and the
gradients are summed; so all hold the same weights after every step. The first process alone writes and reports.
"""

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from training.config import ConfigError

T = TypeVar("T")

PATIENCE = datetime.timedelta(hours=12)
"""How long a process waits for the others: reading a log, calibrating and exporting are the first one's alone."""


@dataclass(frozen=True)
class World:
    """One process among those that train together: its number `rank` of `size`, and the device it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def share(self, things: Sequence[T]) -> Sequence[T]:
        """This process's part of what all work on: every `size`-th thing."""
        return things[self.rank :: self.size]

    def gathered(self, mine: list[T]) -> list[T]:
        """The lists of all processes as one, the same in each."""
        if self.size == 1:
            return mine
        lists: list[list[T]] = [[] for _ in range(self.size)]
        distributed.all_gather_object(lists, mine)
        return [thing for part in lists for thing in part]

    def from_first(self, work: Callable[[], T]) -> T:
        """What the first process's work returns, in every process; the others wait for it."""
        if self.size == 1:
            return work()
        box = [work() if self.is_first else None]
        distributed.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def sum(self, value: float) -> float:
        """The sum of all processes' values."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return total.item()

    def replicated(self, module: nn.Module) -> nn.Module:
        """The module with the first process's weights, whose gradients become the mean over all processes."""
        return module if self.size == 1 else DistributedDataParallel(module)

    def gradients_kept(self, replicated: nn.Module) -> AbstractContextManager[None]:
        """Within it, gradients of a `replicated` module add up in this process and do not go to the others yet."""
        if isinstance(replicated, DistributedDataParallel):
            return replicated.no_sync()
        return nullcontext()


ALONE = World(rank=0, size=1, device=torch.device("cpu"))
"""The one process there is when nobody asked for more, on the CPU."""


@contextmanager
def joined(device: Literal["auto", "cpu", "cuda"]) -> Iterator[World]:
    """This process's place among those that `torchrun` started, or alone; by gloo on CPUs, NCCL on GPUs.

    Args:
        device: `auto` is `cuda` where there is one. The processes of one machine take a GPU each.

    Raises:
        ConfigError: `cuda` is asked for and there is none, or fewer than processes.
    """
    rank, size, local = (int(os.environ.get(name, default)) for name, default in _TORCHRUN.items())
    place = _device(device, local)
    if size == 1:
        yield World(rank, size, place)
        return
    # Lists and numbers go through gloo on the CPU in any case.
    backend = "gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, timeout=PATIENCE)
    try:
        yield World(rank, size, place)
    finally:
        distributed.destroy_process_group()


_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def _device(asked: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if asked == "cpu" or (asked == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus <= local_rank:
        raise ConfigError(
            f"process {local_rank + 1} of this machine has no GPU, torch sees {num_gpus}; start at most"
            f" {num_gpus} processes, or set training.device=cpu"
        )
    place = torch.device("cuda", local_rank)
    torch.cuda.set_device(place)
    return place
