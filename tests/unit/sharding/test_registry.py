from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from zerooffload.sharding import registry
from zerooffload.sharding.collectives import SingleRank
from zerooffload.sharding.flat import Flat
from zerooffload.sharding.layout import ParamSpec, lay_out
from zerooffload.sharding.unit import Unit, UnitFlat


class Owner:
    """Stands for a run."""


@pytest.fixture
def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]


def make_unit(params: list[nn.Parameter]) -> Unit:
    layout = lay_out("u", [ParamSpec("a", (2,)), ParamSpec("b", (3,))], dtype=torch.float32, trainable=False)
    home: Any = None
    return Unit("u", [UnitFlat(Flat(layout, params, torch.device("cpu")), home, None, None, None, rank=0)])


def test_a_registered_parameter_knows_its_run_unit_and_slot(params: list[nn.Parameter]) -> None:
    owner, unit = Owner(), make_unit(params)
    registry.register(owner, unit)
    found = registry.residence_of(params[1])
    assert found is not None
    assert (found.run, found.unit, found.part, found.slot_index) == (owner, unit, unit.parts[0], 1)
    registry.forget(unit)
    assert registry.residence_of(params[1]) is None


def test_the_registry_keeps_neither_run_nor_parameters_alive(params: list[nn.Parameter]) -> None:
    owner, unit = Owner(), make_unit(params)
    registry.register(owner, unit)
    del owner
    gc.collect()
    assert registry.residence_of(params[0]) is None
    before = len(registry._residences)
    del unit
    params.clear()
    gc.collect()
    assert len(registry._residences) == before - 2


def test_strangers_have_no_residence() -> None:
    assert registry.residence_of(nn.Parameter(torch.zeros(1))) is None
    assert registry.residence_of(torch.zeros(1)) is None


def test_an_equal_parameter_is_not_the_same(params: list[nn.Parameter]) -> None:
    owner, unit = Owner(), make_unit(params)
    registry.register(owner, unit)
    assert registry.residence_of(nn.Parameter(torch.zeros(2))) is None
    registry.forget(unit)


def test_in_a_world_of_one_a_shard_is_the_whole() -> None:
    alone, buffer = SingleRank(), torch.arange(4)
    alone.all_gather(buffer, "unit")
    assert alone.reduce_scatter(buffer, "unit") is buffer
    assert (alone.rank, alone.world_size) == (0, 1)
