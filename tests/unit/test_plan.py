"""`zo.plan`: for a model and a loop of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import zerooffload as zo
from zerooffload.planner.profiles import MachineProfile, cluster_of, find_machine

if TYPE_CHECKING:
    from pathlib import Path

    from zerooffload.config import Stage
    from zerooffload.planner.plan import Plan

WIDTH, DEPTH = 64, 4


class Blocks(nn.Module):
    """A stack of linear layers with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = torch.relu(layer(batch))
        return batch * self.scale


def run_step(model: nn.Module, batch_size: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(batch_size, WIDTH)).square().mean()
    return loss


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_of_ones_own_is_planned_and_stays_as_it_is(device: str) -> None:
    with torch.device(device):
        model = Blocks()
    before = dict(model.state_dict())
    plan = zo.plan(model, run_step=run_step, batch_size=32, machine="rtx4090")
    forward = {unit.name: unit.forward.flops for unit in plan.model.units}
    assert forward["layers.0"] == {"fp32": 2 * 32 * WIDTH * WIDTH}
    assert list(plan.homes) == [f"layers.{number}" for number in range(DEPTH)]
    assert plan.estimate.bytes_moved["copy_out"] == DEPTH * WIDTH * WIDTH * 4
    assert plan.estimate.tokens == 32
    after = model.state_dict()
    assert all(
        after[name] is tensor or torch.equal(after[name], tensor) for name, tensor in before.items() if device == "cpu"
    )
    assert all(param.device.type == device for param in model.parameters())


@pytest.mark.parametrize(("stage", "of_one"), [(0, 1.0), (1, 0.25), (2, 0.25), (3, 0.25)])
def test_the_ranks_of_a_machine_have_one_host_copy_of_what_they_hold_alike(stage: Stage, of_one: float) -> None:
    homes = dict.fromkeys(("params", "optimizer", "gradients"), "host")
    config = zo.OffloadConfig(**homes, stage=stage, update="after_backward")
    machine, whole = find_machine("4x-rtx4090").model_copy(update={"network": 1e9}), DEPTH * WIDTH * WIDTH * 4

    def held(profile: MachineProfile) -> int:
        plan = zo.plan(Blocks(), config, run_step=run_step, batch_size=4, machine=profile)
        return sum(claim.nbytes for claim in plan.announced.claims if claim.holder == "parameters")

    assert held(machine) == of_one * whole
    # On two machines one each. A shard is a page or more: padded, what is whole is twice as long.
    assert held(cluster_of(machine, 2)) == (whole / 4 if stage == 3 else of_one * 2 * whole)


def test_the_dtype_to_compute_in_is_traced() -> None:
    config = zo.OffloadConfig(compute_dtype="bf16")
    plan = zo.plan(
        Blocks(),
        config,
        run_step=lambda model, _: model(torch.zeros(2, WIDTH).bfloat16()).sum(),
        batch_size=2,
        machine="rtx4090",
    )
    assert [set(unit.forward.flops) for unit in plan.model.units[:1]] == [{"bf16"}]


def test_only_slices_are_traced_where_blocks_run_in_slices() -> None:
    sizes = []

    def run(model: nn.Module, batch_size: int) -> torch.Tensor:
        sizes.append(batch_size)
        return run_step(model, batch_size)

    config = zo.OffloadConfig(micro_batch_size=4)
    plan = zo.plan(Blocks(), config, run_step=run, batch_size=32, machine="rtx4090")
    assert sizes == [4]
    assert plan.kind.num_slices == 8
    assert plan.estimate.tokens == 32
    with pytest.raises(zo.ConfigError, match="a batch of 30 is no multiple of micro_batch_size, 4"):
        zo.plan(Blocks(), config, run_step=run, batch_size=30, machine="rtx4090")


def test_what_the_model_computes_again_is_named_by_patterns() -> None:
    def planned(*recomputed: str) -> Plan:
        return zo.plan(Blocks(), run_step=run_step, batch_size=32, machine="rtx4090", recomputed=recomputed)

    again, kept = planned("layers.[01]", "layers.2").kind, planned().kind
    assert again.computed_again == {"layers.0", "layers.1", "layers.2"}
    assert not kept.computed_again
    with pytest.raises(zo.ConfigError, match=r"recomputed 'blocks\.\*': no unit has such a name; units are layers\.0"):
        planned("blocks.*")


def test_the_machine_is_a_profile_or_a_file_or_what_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, file = find_machine("rtx4090"), tmp_path / "zerooffload" / "machine.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        zo.ConfigError, match=r"no profile of this machine: run zerooffload calibrate.*4x-rtx4090, dgx2"
    ):
        zo.plan(Blocks(), run_step=run_step, batch_size=2)
    file.parent.mkdir()
    file.write_text(machine.model_dump_json())
    for asked in (None, file, machine):
        assert zo.plan(Blocks(), run_step=run_step, batch_size=2, machine=asked).machine == machine


def test_what_cannot_be_planned_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(zo.ConfigError, match=r"profile of dgx2 has no rate of matrix products in bf16"):
        zo.plan(
            Blocks().bfloat16(),
            run_step=lambda model, _: model(torch.zeros(2, WIDTH).bfloat16()).sum(),
            batch_size=2,
            machine="dgx2",
        )
    bare = find_machine("rtx4090").model_copy(update={"drives": ()})
    with pytest.raises(zo.ConfigError, match=r"home on nvme, but the profile of rtx4090 has no drive"):
        zo.plan(
            Blocks(),
            zo.OffloadConfig(optimizer="nvme", nvme_paths=["/mnt/nvme"]),
            run_step=run_step,
            batch_size=2,
            machine=bare,
        )
    with pytest.raises(zo.BudgetError, match="does not fit the host budget"):
        zo.plan(
            Blocks(),
            zo.OffloadConfig(params="host", host_memory="1KiB"),
            run_step=run_step,
            batch_size=2,
            machine="rtx4090",
        )
    model = zo.offload(Blocks(), zo.OffloadConfig(params="host", threads=1))
    with pytest.raises(zo.ConfigError, match=r"offloaded already: plan before zo\.offload"):
        zo.plan(model, run_step=run_step, batch_size=2, machine="rtx4090")
    zo.close(model)
    assert not list(tmp_path.iterdir())
