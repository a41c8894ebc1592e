"""`zo.offload(model, weights=folder)`: what a folder holds is what the model in memory had."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stored_weights import assert_same_states, elements_read, save_folder, states_of
from torch import nn

import zerooffload as zo
from zerooffload import CheckpointError

Offload = Callable[..., Any]
WIDTH = 80


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is several chunks, and a chunk several pieces."""
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)
    monkeypatch.setattr("zerooffload.runtime.initial_values._PIECE_NUMEL", 1000)
    monkeypatch.setattr("zerooffload.runtime.initial_states._PIECE_NUMEL", 300)


class Net(nn.Module):
    """Layers, an unusual number of frozen weights, integers, and both kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Linear(7, 9).requires_grad_(requires_grad=False)
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.layers[0].weight
        self.register_buffer("seen", torch.full((3,), 7.0))
        self.register_buffer("scale", torch.empty(2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """What a constructor must repeat on the meta device."""
        with torch.no_grad():
            self.codes.fill_(1)
            self.seen.fill_(0.0)
            self.scale.copy_(torch.tensor([2.0, 3.0]))


def net(seed: int = 3) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Net()
        with torch.no_grad():
            made.codes.copy_(torch.arange(5))
            made.seen.copy_(torch.rand(3))
        return made


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def stored(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """As the common libraries store them: a tied weight once."""
    tensors = model.state_dict()
    del tensors["head.weight"]
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("tier", ["host", "device", "nvme"])
@pytest.mark.parametrize("compute_dtype", [None, "bf16", "fp16"])
def test_it_is_the_model_in_memory(
    tier: str, compute_dtype: str | None, num_files: int, offload: Offload, tmp_path: Path
) -> None:
    folder = save_folder(tmp_path / "model", stored(net()), num_files)
    expected = states_of(offload(net(), tier, compute_dtype=compute_dtype))
    state = torch.get_rng_state()
    model = offload(on_meta(), tier, compute_dtype=compute_dtype, weights=folder)
    # Nothing is drawn for values that are stored.
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_states(states_of(model), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_bf16_parameter_has_the_stored_number_as_its_master(
    dtype: torch.dtype, offload: Offload, tmp_path: Path
) -> None:
    """The step shows it: that of a model in memory whose weights are these numbers in fp32."""
    folder = save_folder(tmp_path / "model", stored(net(), dtype))
    model = net()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor is not model.scale:
                tensor.copy_(tensor.to(dtype))
    expected = states_of(offload(model, "nvme", compute_dtype="bf16"))
    assert_same_states(states_of(offload(on_meta(), "nvme", compute_dtype="bf16", weights=folder)), expected)


def test_a_model_in_memory_takes_the_values_of_the_folder(offload: Offload, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", stored(net()))
    expected = states_of(offload(net()))
    assert_same_states(states_of(offload(net(seed=4), weights=folder)), expected)


def test_each_element_is_read_once_where_nothing_is_split(offload: Offload, tmp_path: Path) -> None:
    tensors = stored(net())
    folder = save_folder(tmp_path / "model", tensors, 2)
    with elements_read() as ranges:
        offload(on_meta(), "nvme", weights=folder)
    assert ranges.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stops = [0, *(stop for _, stop in sorted(ranges[name]))]
        assert [first for first, _ in sorted(ranges[name])] == stops[:-1], name
        assert stops[-1] == tensor.numel(), name


def test_a_tied_weight_may_be_stored_twice_if_it_is_one(offload: Offload, tmp_path: Path) -> None:
    tensors = stored(net())
    twice = {**tensors, "head.weight": tensors["layers.0.weight"].clone()}
    expected = states_of(offload(net()))
    folder = save_folder(tmp_path / "model", twice)
    assert_same_states(states_of(offload(on_meta(), weights=folder)), expected)
    by_the_other = {name: tensor for name, tensor in twice.items() if name != "layers.0.weight"}
    assert_same_states(states_of(offload(on_meta(), weights=save_folder(tmp_path / "other", by_the_other))), expected)
    twice["head.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match=r"layers.0.weight and head.weight.*different values"):
        offload(on_meta(), weights=save_folder(folder, twice))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers.1.bias": None, "frozen.weight": None}, "2 weights of the model are missing: layers.1.bias, frozen"),
        ({"seen": None}, "1 weights of the model are missing: seen"),
        ({"extra": torch.ones(1), "scale": torch.ones(2)}, "2 tensors belong to no weight of the model: extra, scale"),
        ({"layers.1.bias": torch.ones(WIDTH + 1)}, r"layers.1.bias has shape \(81,\), the model's has \(80,\)"),
        ({"layers.1.bias": torch.ones(WIDTH, dtype=torch.int64)}, "layers.1.bias is of torch.int64"),
        ({"codes": torch.ones(5)}, "codes is of torch.float32"),
    ],
)
def test_a_folder_of_another_model_is_refused(
    change: dict[str, torch.Tensor | None], words: str, offload: Offload, tmp_path: Path, nvme: Path
) -> None:
    tensors = {name: tensor for name, tensor in {**stored(net()), **change}.items() if tensor is not None}
    folder = save_folder(tmp_path / "model", tensors)
    with elements_read() as ranges, pytest.raises(CheckpointError, match=words) as caught:
        offload(on_meta(), "nvme", weights=folder)
    assert str(folder) in str(caught.value)
    assert not ranges
    assert list(nvme.iterdir()) == []


def test_many_names_are_cut_short(offload: Offload, tmp_path: Path) -> None:
    tensors = {f"extra.{number:03}": torch.ones(1) for number in range(100)}
    with pytest.raises(CheckpointError, match=re.escape("extra.019, and 80 more")):
        offload(on_meta(), weights=save_folder(tmp_path / "model", {**stored(net()), **tensors}))


class Uninitialised(nn.Module):
    """Nothing says how its parameter is made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))


def test_what_is_stored_needs_nothing_to_initialise_it(offload: Offload, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", {"weight": torch.eye(4)})
    with torch.device("meta"):
        model = Uninitialised()
    offload(model, weights=folder)
    with zo.full_params(model):
        assert torch.equal(model.weight, torch.eye(4))
