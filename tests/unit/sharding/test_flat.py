from __future__ import annotations

import pytest
import torch
from torch import nn

from zerooffload import ConfigError
from zerooffload.sharding.flat import Flat
from zerooffload.sharding.layout import ParamSpec, lay_out

SHAPES = {"weight": (4, 4), "bias": (4,), "scale": (1,)}


@pytest.fixture
def params() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.full(shape, 2.0)) for name, shape in SHAPES.items()}


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.zeros(4096, dtype=torch.uint8)


@pytest.fixture
def flat(params: dict[str, nn.Parameter], memory: torch.Tensor) -> Flat:
    """A flat whose memory holds threes, shown full."""
    layout = lay_out(
        "unit", [ParamSpec(name, shape) for name, shape in SHAPES.items()], dtype=torch.float32, trainable=True
    )
    memory[: layout.nbytes].view(torch.float32).fill_(3.0)
    made = Flat(layout, list(params.values()), torch.device("cpu"))
    made.bind(memory)
    made.show_full()
    return made


def test_full_parameters_are_the_memory_itself(
    flat: Flat, params: dict[str, nn.Parameter], memory: torch.Tensor
) -> None:
    assert all(bool((param == 3).all()) for param in params.values())
    with torch.no_grad():
        params["bias"].fill_(9.0)
    slot = flat.layout.slots[1]
    assert memory[slot.start * 4 : slot.stop * 4].view(torch.float32).tolist() == [9.0] * 4


def test_parameters_away_keep_shape_identity_and_names_but_no_value(
    flat: Flat, params: dict[str, nn.Parameter]
) -> None:
    flat.show_away()
    for param, (name, shape) in zip(flat.params, SHAPES.items(), strict=True):
        assert param is params[name]
        assert param.shape == shape
        assert bool(param.isnan().all())
    flat.show_full()
    assert bool((params["weight"] == 3).all())


def test_a_saved_weight_is_usable_when_its_flat_is_back(flat: Flat, params: dict[str, nn.Parameter]) -> None:
    inputs = torch.ones(1, 4, requires_grad=True)
    loss = (inputs @ params["weight"]).sum()
    flat.show_away()
    flat.show_away()
    flat.show_full()
    loss.backward()
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [[12.0] * 4]


def test_a_stale_read_raises(flat: Flat, params: dict[str, nn.Parameter]) -> None:
    loss = (torch.ones(1, 4, requires_grad=True) @ params["weight"]).sum()
    flat.show_away()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("away", [True, False])
def test_a_graph_from_before_an_update_is_stale_for_good(
    flat: Flat,
    params: dict[str, nn.Parameter],
    away: bool,  # noqa: FBT001
) -> None:
    loss = (torch.ones(1, 4, requires_grad=True) @ params["weight"]).sum()
    if away:
        flat.show_away()
    flat.values_changed()
    flat.show_full()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_coming_and_going_does_not_move_the_version(flat: Flat, params: dict[str, nn.Parameter]) -> None:
    before = [param._version for param in params.values()]
    for _ in range(3):
        flat.show_away()
        assert [param._version for param in params.values()] == [version + 1 for version in before]
        flat.show_full()
    assert [param._version for param in params.values()] == before


def test_an_edit_while_full_stays_counted(flat: Flat, params: dict[str, nn.Parameter]) -> None:
    before = params["weight"]._version
    with torch.no_grad():
        params["weight"].mul_(2)
    flat.show_away()
    flat.show_full()
    assert params["weight"]._version == before + 1


def test_a_write_to_a_single_element_that_is_away_is_refused_by_name(
    flat: Flat, params: dict[str, nn.Parameter]
) -> None:
    flat.show_away()
    params["scale"].data.fill_(5.0)
    with pytest.raises(ConfigError, match="parameter scale was written to"):
        flat.show_full()


def test_an_operation_in_place_on_a_single_element_that_is_away_is_refused(
    flat: Flat, params: dict[str, nn.Parameter]
) -> None:
    flat.show_away()
    with torch.no_grad():
        params["scale"].clamp_(0.0, 1.0)
    with pytest.raises(ConfigError, match="parameter scale was written to"):
        flat.show_full()


def test_a_refused_write_goes_on_being_refused(flat: Flat, params: dict[str, nn.Parameter]) -> None:
    flat.show_away()
    params["scale"].data.fill_(5.0)
    with pytest.raises(ConfigError):
        flat.show_full()
    assert bool(params["weight"].isnan().all())
