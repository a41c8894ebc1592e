from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from zerooffload.accelerator import host_buffer_nbytes
from zerooffload.optim.record import OptimizerStates
from zerooffload.planner.placement import Durability, Placement, Placer, Reach, TierChoices, UnitLayout
from zerooffload.sharding.layout import ParamSpec, lay_out

CPU = Reach(device_shares_host=True, range_nbytes=host_buffer_nbytes)
GPU = Reach(device_shares_host=False, range_nbytes=lambda nbytes: -(-nbytes // 512) * 512)


@pytest.fixture
def cpu() -> Reach:
    return CPU


@pytest.fixture
def gpu() -> Reach:
    """A device with memory of its own, whose allocator rounds to 512 bytes."""
    return GPU


@pytest.fixture
def units() -> list[UnitLayout]:
    """An embedding, two blocks (one with a frozen part), a head tied to the embedding, and the root."""

    def flat(unit: str, numel: int, *, dtype: torch.dtype = torch.float32, trainable: bool = True) -> object:
        return lay_out(f"{unit}/x", [ParamSpec(f"{unit}.weight", (numel,))], dtype=dtype, trainable=trainable)

    def unit(name: str, *flats: object, needs: tuple[str, ...] = ()) -> UnitLayout:
        return UnitLayout(name, flats, needs or (name,))  # type: ignore[arg-type]

    return [
        unit("embed", flat("embed", 10_000)),
        unit("layers.0", flat("layers.0", 5_000)),
        unit("layers.1", flat("layers.1", 5_000), flat("layers.1", 3_000, trainable=False)),
        unit("head", needs=("embed",)),
        unit("(root)", flat("(root)", 100)),
    ]


@pytest.fixture
def placed(units: list[UnitLayout]) -> Callable[..., Placement]:
    """`placed(reach, params=..., optimizer=..., gradients=...)`."""

    def call(
        reach: Reach, durability: Durability | None = None, *, accumulates: bool = False, **tiers: object
    ) -> Placement:
        defaults = {"params": "auto", "optimizer": "auto", "gradients": "auto"}
        choices = TierChoices(**{**defaults, **tiers})  # type: ignore[arg-type]
        return Placer(units, reach, OptimizerStates(), durability or Durability(), accumulates=accumulates).place(
            choices
        )

    return call
