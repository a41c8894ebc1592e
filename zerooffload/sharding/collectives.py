"""Joining shards into whole buffers, and whole gradients into shards."""

from __future__ import annotations

from typing import Protocol

import torch


class Collectives(Protocol):
    """The collectives that a unit needs. Buffers are 1D and of one dtype."""

    world_size: int
    rank: int

    def all_gather(self, full: torch.Tensor) -> None:
        """Fill `full` `[world_size * shard_numel]`, where this rank's shard is already in its place."""

    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks of this rank's shard of `full`, as a view `[shard_numel]` of it."""


class SingleRank:
    """A world of one: a shard is the whole."""

    world_size = 1
    rank = 0

    def all_gather(self, full: torch.Tensor) -> None:
        """Nothing is missing."""

    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:
        """Nothing to add."""
        return full
