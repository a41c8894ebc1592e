from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.deepspeed_files import GROUPS, MOMENTS, Net, states_of, write_by_hand

from zerooffload import CheckpointError
from zerooffload.checkpoint.deepspeed_reader import VALUES, DeepSpeedReader

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_element_is_found(stage: int, world_size: int, tmp_path: Path) -> None:
    net = Net()
    write_by_hand(tmp_path, stage, world_size, net, 5)
    expected = states_of(net)
    with DeepSpeedReader(tmp_path) as reader:
        assert reader.states == {VALUES, *MOMENTS}
        names = {name for name, _ in net.named_parameters(remove_duplicate=False)}
        assert reader.shapes.keys() == names
        for name, states in expected.items():
            assert reader.is_trained(name)
            for state, tensor in states.items():
                for start in range(0, tensor.numel(), 7):
                    stop = min(start + 7, tensor.numel())
                    assert torch.equal(reader.read(name, state, start, stop), tensor.view(-1)[start:stop])
        assert torch.equal(reader.read("out.weight", VALUES, 0, 55), expected["embed.weight"]["values"].view(-1))
        assert torch.equal(reader.read("inside.bias", VALUES, 0, 5), net.inside.bias)
        assert not reader.is_trained("inside.bias")
        assert torch.equal(reader.read_buffer("counts"), net.get_buffer("counts"))
        for group, names_of_group in enumerate(GROUPS):
            assert {reader.num_steps(name) for name in names_of_group} == {5 + group}


def test_a_step_is_named_or_the_newest_is_taken(tmp_path: Path) -> None:
    write_by_hand(tmp_path, 3, 2, Net(), 5)
    for path in (tmp_path, tmp_path / "global_step7"):
        with DeepSpeedReader(path) as reader:
            assert reader.path == tmp_path / "global_step7"


@pytest.mark.parametrize("damage", ["rank", "model", "latest", "short", "empty", "parts"])
def test_what_is_not_whole_is_told(damage: str, tmp_path: Path) -> None:
    net = Net()
    if damage != "empty":
        write_by_hand(tmp_path, 2, 2, net, 5)
    folder = tmp_path / "global_step7"
    model = folder / "mp_rank_00_model_states.pt"
    match damage:
        case "rank":
            (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        case "model":
            model.unlink()
        case "latest":
            (tmp_path / "latest").write_text("../elsewhere")
        case "short":
            model.write_bytes(model.read_bytes()[:-100])
        case "parts":
            torch.save({"mp_world_size": 2, "param_shapes": []}, model)
    with pytest.raises(CheckpointError):
        DeepSpeedReader(tmp_path)
