"""The ranks of a training run, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zerooffload.accelerator import default_accelerator, use_device_of


@dataclass(frozen=True)
class Ranks:
    """Where a process stands among those that train together."""

    rank: int = 0
    world_size: int = 1

    def mean(self, value: float) -> float:
        """The mean of every rank's value; all call it."""
        if self.world_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=default_accelerator().device)
        dist.all_reduce(total)
        return float(total) / self.world_size


def this_rank() -> int:
    """The place of this process among all, as torchrun says."""
    return int(os.environ.get("RANK", "0"))


def is_first_rank() -> bool:
    """Whether this process is the one that speaks for all."""
    return this_rank() == 0


def use_own_device() -> None:
    """Compute on the device of this rank among those of its machine, as torchrun numbers them.

    Raises
    ------
    ConfigError
        If there are fewer CUDA devices than ranks here, but several.
    """
    use_device_of(int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def joined_ranks(timeout_seconds: float) -> Iterator[Ranks]:
    """The process group of the ranks that torchrun started, each with a device of its own, or a world of one.

    Parameters
    ----------
    timeout_seconds : float
        Of every operation in which ranks wait for each other.

    Raises
    ------
    ConfigError
        See `use_own_device`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    use_own_device()
    dist.init_process_group(timeout=timedelta(seconds=timeout_seconds))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
