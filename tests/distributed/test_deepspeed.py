"""Checkpoints of DeepSpeed's ZeRO become states of ours."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.deepspeed_files import Net, states_of, train_with_deepspeed, write_by_hand
from support.ranks import free_port

import zerooffload as zo
from zerooffload import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def loaded(folder: Path, *, with_optimizer: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters by name, and the optimizer's states, of a model that had others."""
    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    zo.offload(net, zo.OffloadConfig(host_memory="32MiB", threads=1))
    optimizer = zo.AdamW(net.parameters())
    zo.load_deepspeed(folder, net, optimizer if with_optimizer else ())
    params = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    trained = [name for name, param in net.named_parameters() if param.requires_grad]
    numbers = {number: name for number, (name, _) in enumerate(net.named_parameters())}
    states = {numbers[number]: state for number, state in optimizer.state_dict()["state"].items()}
    assert set(states) <= set(trained)
    zo.close(net)
    return params, states


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_are_taken_over(stage: int, tmp_path: Path) -> None:
    write_by_hand(tmp_path, stage, 3, Net(), 5)
    params, states = loaded(tmp_path)
    expected = states_of(Net())
    for name, of_param in expected.items():
        assert torch.equal(params[name], of_param["values"])
        assert torch.equal(states[name]["exp_avg"], of_param["exp_avg"])
        assert torch.equal(states[name]["exp_avg_sq"], of_param["exp_avg_sq"])
    assert {name: int(state["step"]) for name, state in states.items()} == {
        "embed.weight": 5,
        "scale": 5,
        "inside.weight": 6,
    }
    assert torch.equal(params["inside.bias"], Net().inside.bias)
    assert loaded(tmp_path, with_optimizer=False)[1] == {}


def test_another_model_is_refused(tmp_path: Path) -> None:
    write_by_hand(tmp_path, 3, 2, Net(), 5)
    net = torch.nn.Linear(3, 3)
    zo.offload(net, zo.OffloadConfig(host_memory="32MiB", threads=1))
    with pytest.raises(CheckpointError, match="another model: the model lacks"):
        zo.load_deepspeed(tmp_path, net)
    zo.close(net)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_deepspeed_wrote_equals_its_own_consolidation(stage: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_with_deepspeed, (2, free_port(), str(tmp_path), stage), 2)
    params, states = loaded(tmp_path)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    if stage == 1:
        # Its consolidation leaves out what is frozen.
        whole["inside.bias"] = Net().inside.bias.detach().bfloat16()
    assert params.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name].float()) for name, tensor in params.items())
    assert {int(state["step"]) for state in states.values()} == {3}
    assert all(bool(state["exp_avg_sq"].any()) for state in states.values())
