"""ZeRO's stages: which states a rank keeps a part of, and what it then holds. Pure.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from zerooffload.config import Stage
from zerooffload.errors import ConfigError
from zerooffload.optim.record import OptimizerStates

STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Sharding:
    """Of which states a rank holds its shard alone; of the others it holds all shards.

    Attributes
    ----------
    params, gradients, optimizer : bool
    rank : int
        Whose shards these are.
    num_sharers : int
        Ranks that can map one host memory with it, itself included; see [Note: one host copy] in
        runtime/shared_homes.py.
    """

    params: bool
    gradients: bool
    optimizer: bool
    rank: int = 0
    num_sharers: int = 1

    def held(self, world_size: int, *, is_sharded: bool) -> range:
        """The shards of a state that the rank holds."""
        return range(self.rank, self.rank + 1) if is_sharded else range(world_size)


STAGE_3 = Sharding(params=True, gradients=True, optimizer=True)
"""Everything is sharded, and these are the shards of rank 0."""


def sharding_of(stage: Stage, rank: int = 0) -> Sharding:
    """What a ZeRO stage shards: 0 nothing, 1 the optimizer state, 2 gradients too, 3 parameters too."""
    return Sharding(params=stage >= 3, gradients=stage >= 2, optimizer=stage >= 1, rank=rank)


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes that each trained parameter has of each state.

    Attributes
    ----------
    params, gradients, optimizer : float
        The last is K in ZeRO's formulas.
    """

    params: float
    gradients: float
    optimizer: float

    def of_rank(self, num_params: int, world_size: int, stage: Stage) -> float:
        """Bytes of states that each of `world_size` ranks holds, padding apart: ZeRO's formulas (section 5)."""
        sharding = sharding_of(stage)
        states = (
            (self.params, sharding.params),
            (self.gradients, sharding.gradients),
            (self.optimizer, sharding.optimizer),
        )
        return sum(
            num_params * nbytes * len(sharding.held(world_size, is_sharded=is_sharded)) / world_size
            for nbytes, is_sharded in states
        )


ZERO_FP16 = ParameterBytes(params=2, gradients=2, optimizer=12)
"""Mixed precision with Adam in ZeRO's paper: fp16, with an fp32 master and two fp32 moments."""


def parameter_bytes(dtype: torch.dtype, states: OptimizerStates, *, accumulates: bool = False) -> ParameterBytes:
    """Bytes that a trained parameter of a compute dtype has here: in bf16 the parameter is the half of its master.

    Raises
    ------
    ConfigError
        If parameters of that dtype cannot be trained.
    """
    record = sum(part.dtype.itemsize / part.block_numel for part in states.parts(dtype))
    return ParameterBytes(dtype.itemsize, 4 if accumulates else dtype.itemsize, record)


@dataclass(frozen=True)
class StageBytes:
    """What a rank holds in a stage, in bytes: by ZeRO's formulas for fp16, and here."""

    stage: Stage
    zero: float
    ours: float


def stage_table(
    num_params: int,
    world_size: int,
    dtype: torch.dtype = torch.bfloat16,
    states: OptimizerStates | None = None,
) -> list[StageBytes]:
    """ZeRO's memory table for a model of `num_params` trained parameters, and ours beside it, stage by stage.

    Parameters
    ----------
    dtype : torch.dtype
        Of the parameters here.
    states : OptimizerStates, optional
        Default: AdamW's, in fp32.

    Raises
    ------
    ConfigError
        If a number is not positive, or parameters of that dtype cannot be trained.
    """
    if num_params < 1 or world_size < 1:
        raise ConfigError(f"a table needs parameters and ranks, got {num_params} and {world_size}")
    ours = parameter_bytes(dtype, states or OptimizerStates())
    return [
        StageBytes(stage, ZERO_FP16.of_rank(num_params, world_size, stage), ours.of_rank(num_params, world_size, stage))
        for stage in STAGES
    ]
