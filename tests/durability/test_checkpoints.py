"""A training that is saved, and goes on elsewhere, as if it had never ended."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.compatible_models import with_lora
from support.durable_training import (
    ALL_ON_NVME,
    Moment,
    Scenario,
    Training,
    environment_with,
    in_turns,
    of_rank,
    real_environment,
    training,
)
from support.hostile_files import signed_manifest
from support.leases import pretend_drive
from support.rank_turns import TurnCollectives, Turns
from support.reference_training import current_params, language_loss
from support.simulated_engine import Fault, SimulatedEngine, Transfers
from support.small_models import batch, small_llama
from torch import nn

import zerooffload as zo
from zerooffload.checkpoint.manifest import read_manifests
from zerooffload.checkpoint.shard_writer import ShardWriter
from zerooffload.config import TierName
from zerooffload.runtime import saving
from zerooffload.runtime.logical_states import ChunkReading
from zerooffload.runtime.run import Run
from zerooffload.runtime.snapshots import Snapshot
from zerooffload.sharding.registry import residence_of
from zerooffload.telemetry import Wait, Waitable, Waits

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture(autouse=True)
def _whole_pages_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerooffload.checkpoint.page_writer.LEAST_IN_PLACE_BYTES", 4096)


HOSTED: dict[str, Any] = {"params": "host", "optimizer": "host", "gradients": "host"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": HOSTED,
    "nvme": ALL_ON_NVME,
    "params on nvme": {**HOSTED, "params": "nvme"},
    "optimizer on nvme": {**HOSTED, "optimizer": "nvme"},
    "durable": {**HOSTED, "durable": True},
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 with 8-bit moments": {"compute_dtype": "bf16", "moments": "8bit"},
    "fp16 with bf16 moments": {"compute_dtype": "fp16", "moments": "bf16"},
}
WIDE = 72
"""A block's flat buffer is two chunks then."""


def scenario(placement: str = "host", form: str = "fp32", **fields: Any) -> Scenario:
    settings = {**PLACEMENTS[placement], **FORMATS[form]}
    if placement == "optimizer on nvme" and form == "fp32":
        # Moments in fewer bits are rounded with noise that depends on where an element lies.
        settings["units"] = ["blocks.*.0"]
    overflows = (2,) if form.startswith("fp16") else ()
    return Scenario(num_batches=4, width=WIDE, overflows=overflows, config={**settings, **fields})


def run_of(model: nn.Module) -> Run:
    residence = residence_of(next(model.parameters()))
    assert residence is not None
    run: Run = residence.run
    return run


def save(run: Training, directory: Path, **fields: Any) -> saving.SaveTicket:
    return zo.save(directory, run.model, run.optimizer, extra={"batches": run.loader.position}, **fields)


def load(run: Training, directory: Path) -> None:
    extra = zo.load(directory, run.model, run.optimizer)
    assert extra == {"batches": run.loader.position}
    run.num_steps = run_of(run.model)._num_steps


ROUNDABOUT = list(zip(PLACEMENTS, (*list(PLACEMENTS)[1:], *list(PLACEMENTS)[:1]), strict=True))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("before", "after"), ROUNDABOUT)
def test_it_goes_on_elsewhere_bit_for_bit(before: str, after: str, form: str, scratch: Path) -> None:
    """Other tiers and other units; dropout, a schedule, a tied head, a frozen vector, and a loss scale where needed."""
    with training(scenario(before, form), scratch / "a", real_environment()) as run:
        run.one_batch()
        run.one_batch()
        ticket = save(run, scratch / "checkpoints")
        assert ticket.done()
        saved = run.moment()
        losses = run.finish()
        last = run.moment()
    with training(scenario(after, form), scratch / "b", real_environment()) as run:
        run.one_batch()
        load(run, scratch / "checkpoints")
        assert run.moment().differences(saved) == []
        assert run.finish() == losses
        assert run.moment().differences(last) == []


NUM_RANKS = (1, 2, 3)
STAGES = {1: 3, 2: 1, 3: 2}
"""By the number of ranks that save; those that load have the next one."""


def test_any_number_of_ranks_loads_what_any_other_saved(scratch: Path) -> None:
    saved: dict[int, list[Moment]] = {}
    for num_ranks in NUM_RANKS:
        ranks = scenario(stage=STAGES[num_ranks])

        def train(rank: int, turns: Turns, ranks: Scenario = ranks, num_ranks: int = num_ranks) -> Moment:
            env = of_rank(real_environment(), turns, TurnCollectives(turns, rank))
            with training(ranks, scratch / f"of {num_ranks}", env) as run:
                run.one_batch()
                run.one_batch()
                save(run, scratch / f"by {num_ranks}")
                return run.moment()

        saved[num_ranks] = in_turns(num_ranks, train)
    for one, other in itertools.product(NUM_RANKS, NUM_RANKS):
        ranks = scenario("nvme" if one == other else "host", stage=STAGES[other] % 3 + 1, overwrite=True)

        def check(rank: int, turns: Turns, ranks: Scenario = ranks, one: int = one) -> list[str]:
            env = of_rank(real_environment(), turns, TurnCollectives(turns, rank))
            with training(ranks, scratch / "loaded", env) as run:
                load(run, scratch / f"by {one}")
                found, expected = run.moment().values, saved[one][rank if rank < one else 0].values
                if rank >= one:
                    # Nobody had its random states.
                    found, expected = ({**values, "random": None} for values in (found, expected))
                return Moment(found).differences(Moment(expected))

        assert in_turns(other, check) == [[]] * other, f"{one} to {other} ranks"


def test_on_one_rank_the_files_are_plain_safetensors(scratch: Path) -> None:
    with training(scenario(), scratch / "a", real_environment()) as run:
        run.one_batch()
        path = save(run, scratch / "checkpoints").path
        files = {name: load_file(path / f"{name}-00000-of-00001.safetensors") for name in ("param", "exp_avg")}
        moment = run.moment().values
        assert files["param"].keys() == moment["params"].keys()
        assert all(torch.equal(files["param"][name], value) for name, value in moment["params"].items())
        for index, (name, _) in enumerate(run.model.named_parameters()):
            expected = moment["optimizer"]["state"].get(index)
            if expected is not None:
                assert torch.equal(files["exp_avg"][name], expected["exp_avg"])


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    """In fp32, of what is trained."""
    params, run = current_params(model), run_of(model)
    found = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            state = run.read_optimizer_state(param)
            if "remainder" in state:
                upper = params[name].view(torch.int16).to(torch.int32) << 16
                found[name] = (upper + state["remainder"]).view(torch.float32)
            else:
                found[name] = state.get("master", params[name])
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16"), ("bf16", "fp16"), ("fp32", "fp16"), ("fp16", "fp32")],
)
def test_another_compute_dtype_keeps_every_bit_of_the_masters(before: str, after: str, scratch: Path) -> None:
    with training(scenario(compute_dtype=before), scratch / "a", real_environment()) as run:
        run.one_batch()
        save(run, scratch / "checkpoints")
        expected, moments = masters(run.model), run.optimizer.state_dict()["state"]
    with training(scenario("nvme", compute_dtype=after), scratch / "b", real_environment()) as run:
        load(run, scratch / "checkpoints")
        found = masters(run.model)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        state = run.optimizer.state_dict()["state"]
        assert all(torch.equal(state[key]["exp_avg"], entry["exp_avg"]) for key, entry in moments.items())


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(("fp32", "bf16", "8bit"), 2)))
def test_another_format_of_moments_is_what_torchs_state_would_become(before: str, after: str, scratch: Path) -> None:
    """A conversion to more bits is exact, and to fewer is the rounding that loading an optimizer's state does."""
    with training(scenario(moments=before), scratch / "a", real_environment()) as run:
        run.one_batch()
        save(run, scratch / "checkpoints")
        state = run.optimizer.state_dict()
    with training(scenario(moments=after), scratch / "b", real_environment()) as run:
        run.optimizer.load_state_dict(state)
        expected = Moment(run.optimizer.state_dict())
        load(run, scratch / "checkpoints")
        assert Moment(run.optimizer.state_dict()).differences(expected) == []
        if after == "fp32":
            assert Moment(state).differences(expected) == []


def test_adapters_and_their_frozen_base(scratch: Path) -> None:
    def offloaded(seed: int, **homes: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = with_lora(small_llama(seed=seed))
        zo.offload(model, zo.OffloadConfig(nvme_paths=[scratch], threads=1, overwrite=True, **homes))  # type: ignore[arg-type]
        return model, zo.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
        losses = []
        for step in range(first, first + 2):
            loss = language_loss(model, batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = offloaded(1, optimizer="nvme")
    steps(model, optimizer, 0)
    zo.save(scratch / "checkpoints", model, optimizer)
    expected = steps(model, optimizer, 2)
    zo.close(model)
    model, optimizer = offloaded(2, params="nvme")
    assert zo.load(scratch / "checkpoints", model, optimizer) is None
    assert steps(model, optimizer, 2) == expected
    zo.close(model)


class SlowSave:
    """A save that reads its first chunk, and no other, until somebody has asked it to hurry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = threading.Event()
        self.leaks = False
        self.num_asked = 0
        write = saving._Job._write

        def slowly(job: saving._Job, reading: ChunkReading) -> None:
            assert self.asked.wait(30)
            write(job, reading)

        monkeypatch.setattr(saving._Job, "_write", slowly)

    def make_waits(self, recorder: Any) -> Waits:
        """Waits that notice."""
        slow = self

        class Noticing(Waits):
            def until(self, cause: Wait, waitable: Waitable) -> None:
                if cause is Wait.SNAPSHOT:
                    slow.num_asked += 1
                    if slow.leaks:
                        return
                    slow.asked.set()
                super().until(cause, waitable)

        return Noticing(recorder)


def _load_optimizer(run: Training) -> None:
    state = run.optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg"] += 1
    run.optimizer.load_state_dict(state)


def _edit(run: Training) -> None:
    run.edit()


def _train(run: Training) -> None:
    run.finish()


CHANGES: dict[str, tuple[str, str, Callable[[Training], None]]] = {
    "steps": ("nvme", "after_backward", _train),
    "steps on host": ("host", "after_backward", _train),
    "hidden steps": ("nvme", "under_next_forward", _train),
    "steps ahead": ("nvme", "during_backward", _train),
    "steps of a durable run": ("durable", "after_backward", _train),
    "edits": ("nvme", "after_backward", _edit),
    "edits at home": ("host", "after_backward", _edit),
    "states of an optimizer": ("host", "after_backward", _load_optimizer),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_while_it_is_saved_is_saved_as_it_was(
    change: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, update, act = CHANGES[change]
    slow = SlowSave(monkeypatch)
    env = replace(real_environment(), make_waits=slow.make_waits)
    with training(scenario(placement, update=update), scratch / "a", env) as run:
        run.one_batch()
        run.one_batch()
        if update == "after_backward":
            expected = run.moment()
        ticket = save(run, scratch / "checkpoints", blocking=False)
        act(run)
        slow.asked.set()
        ticket.wait()
        assert slow.num_asked > 0
    with training(scenario(placement), scratch / "c", real_environment()) as run:
        # Looking at a run whose update is hidden would end that.
        run.one_batch()
        run.one_batch()
        if update == "after_backward":
            assert run.moment().differences(expected) == []
        expected = run.moment()
    with training(scenario(), scratch / "b", real_environment()) as run:
        load(run, scratch / "checkpoints")
        assert run.moment().differences(expected) == []


@pytest.mark.parametrize("change", ["steps", "steps on host", "edits at home", "states of an optimizer"])
def test_without_the_wait_it_would_not_be(change: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement, update, act = CHANGES[change]
    slow = SlowSave(monkeypatch)
    slow.leaks = True
    env = replace(real_environment(), make_waits=slow.make_waits)
    with training(scenario(placement, update=update), scratch / "a", env) as run:
        run.one_batch()
        run.one_batch()
        expected = run.moment()
        ticket = save(run, scratch / "checkpoints", blocking=False)
        act(run)
        slow.asked.set()
        ticket.wait()
    with training(scenario(), scratch / "b", real_environment()) as run:
        load(run, scratch / "checkpoints")
        assert run.moment().differences(expected) != []


@pytest.mark.parametrize("waits_for_writes", [True, False])
def test_what_is_written_from_where_it_lies_stays_until_it_is_written(
    waits_for_writes: bool,  # noqa: FBT001
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All chunks are handed to the drive, which writes when somebody waits for it, before the next step begins."""
    handed_over, stepped = threading.Event(), threading.Event()
    finish, num_in_place = ShardWriter.finish, 0

    def finish_late(writer: ShardWriter) -> None:
        nonlocal num_in_place
        num_in_place = len(writer._leaving)
        handed_over.set()
        assert stepped.wait(30)
        finish(writer)

    monkeypatch.setattr(ShardWriter, "finish", finish_late)
    monkeypatch.setattr(saving, "MOST_UNDER_WAY", 1000)
    if not waits_for_writes:
        monkeypatch.setattr(Snapshot, "was_read", lambda snapshot, chunk, _: snapshot._readings[chunk].over())
    env = environment_with(lambda: SimulatedEngine(Transfers.LAZY, on_files=True))
    with training(scenario(), scratch / "a", env) as run:
        run.one_batch()
        expected = run.moment()
        ticket = save(run, scratch / "checkpoints", blocking=False)
        assert handed_over.wait(30)
        run.one_batch()
        stepped.set()
        ticket.wait()
    assert num_in_place > 0
    monkeypatch.undo()
    with training(scenario(), scratch / "b", real_environment()) as run:
        if waits_for_writes:
            load(run, scratch / "checkpoints")
            assert run.moment().differences(expected) == []
        else:
            with pytest.raises(zo.CheckpointError, match="are not what was written"):
                load(run, scratch / "checkpoints")


def test_a_second_save_a_load_and_the_end_wait_for_the_first(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowSave(monkeypatch)
    slow.asked.set()
    with training(scenario("nvme"), scratch / "a", real_environment()) as run:
        run.one_batch()
        tickets = [save(run, scratch / "checkpoints", blocking=False, keep_last=2)]
        tickets.append(save(run, scratch / "checkpoints", blocking=False, keep_last=2))
        assert tickets[0].done()
        load(run, scratch / "checkpoints")
        assert tickets[1].done()
        tickets.append(save(run, scratch / "checkpoints", blocking=False, keep_last=2))
        zo.close(run.model)
        assert tickets[2].done()
    assert [path.name for path in sorted((scratch / "checkpoints").iterdir())] == [
        tickets[1].path.name,
        tickets[2].path.name,
    ]


def test_files_are_written_over_and_nobody_notices(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_drive(scratch, monkeypatch)
    directory = scratch / "checkpoints"

    def inode(path: Path) -> int:
        return (path / "param-00000-of-00001.safetensors").stat().st_ino

    with training(scenario(), scratch / "a", real_environment()) as run:
        run.one_batch()
        saved = [save(run, directory, keep_last=1).path]
        inodes = [inode(saved[0])]
        # Of a save with other states.
        (saved[0] / "master-00000-of-00001.safetensors").write_bytes(b"other")
        reader = (saved[0] / "exp_avg-00000-of-00001.safetensors").open("rb")
        before = reader.read()
        for _ in range(3):
            run.one_batch()
            saved.append(save(run, directory, keep_last=1).path)
            inodes.append(inode(saved[-1]))
        assert inodes[2:] == inodes[:2]
        reader.seek(0)
        assert reader.read() == before
        reader.close()
        assert [path.name for path in sorted(directory.iterdir())] == [f".{saved[-2].name}.part", saved[-1].name]
        names = ["exp_avg", "exp_avg_sq", "param"]
        assert [path.name for path in sorted(saved[-1].iterdir())] == [
            *(f"{name}-00000-of-00001.safetensors" for name in names),
            "rank-00000.json",
        ]
        expected = run.moment()
    assert list(directory.iterdir()) == [saved[-1]]
    with training(scenario(), scratch / "b", real_environment()) as run:
        load(run, directory)
        assert run.moment().differences(expected) == []


@pytest.fixture
def faulty(scratch: Path) -> Iterator[Callable[[Fault], Training]]:
    """A training that has one checkpoint, and whose next save meets a fault."""
    runs = []

    def begin(fault: Fault) -> Training:
        engines = iter([(), (fault,)])

        def engine() -> SimulatedEngine:
            return SimulatedEngine(Transfers.LAZY, faults=next(engines), on_files=True)

        context = training(scenario(), scratch / "a", environment_with(engine))
        run = context.__enter__()
        runs.append(context)
        run.one_batch()
        save(run, scratch / "checkpoints")
        return run

    yield begin
    for context in runs:
        context.__exit__(None, None, None)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(at=0, operation="write", files="param-*"),
        Fault(at=2, operation="write", files="exp_avg-*"),
        Fault(at=0, operation="flush", files="exp_avg_sq-*"),
    ],
    ids=lambda fault: f"{fault.operation} {fault.at}",
)
@pytest.mark.parametrize("blocking", [True, False])
def test_a_save_that_fails_leaves_what_was_there(
    fault: Fault,
    blocking: bool,  # noqa: FBT001
    faulty: Callable[[Fault], Training],
    scratch: Path,
) -> None:
    run = faulty(fault)
    before = run.moment()
    run.one_batch()
    with pytest.raises(zo.TierIOError, match=fault.files.removesuffix("-*")):
        save(run, scratch / "checkpoints", blocking=blocking).wait()
    assert [path.name for path in (scratch / "checkpoints").iterdir()] == ["save-00000001-step-00000001"]
    run.one_batch()
    load(run, scratch / "checkpoints")
    assert run.moment().differences(before) == []


def test_a_header_that_begins_with_a_page_of_memory_is_waited_for(
    faulty: Callable[[Fault], Training], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not copied then, so no slot of the ring waits for it."""
    monkeypatch.setattr("zerooffload.checkpoint.shard_writer._bytes", _on_pages)
    run = faulty(Fault(at=0, operation="write", files="exp_avg-*"))
    expected = run.moment()
    run.one_batch()
    with pytest.raises(zo.TierIOError, match="exp_avg"):
        save(run, scratch / "checkpoints")
    load(run, scratch / "checkpoints")
    assert run.moment().differences(expected) == []


def _on_pages(content: bytes) -> torch.Tensor:
    memory = torch.zeros(len(content) + 4096, dtype=torch.uint8)
    lead = -memory.data_ptr() % 4096
    memory[lead : lead + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return memory[lead : lead + len(content)]


def test_what_a_save_and_a_load_lease(scratch: Path) -> None:
    """Two chunks of all states where they are not in place, and four blocks of the longest range, or one range."""
    with training(scenario("nvme"), scratch / "a", real_environment()) as run:
        run.one_batch()
        host = run_of(run.model)._resources.budgets[TierName.HOST]
        leased = host.leased_bytes
        save(run, scratch / "checkpoints")
        record, longest = 4096 * (4 + 8), 4096 * 4
        assert host.peak_bytes - leased == 2 * record + 4 * (longest + 4096)
        assert host.leased_bytes == leased
        host._peak_bytes = leased
        load(run, scratch / "checkpoints")
        assert host.peak_bytes - leased == 2 * record + 3 * longest
        assert host.leased_bytes == leased


def test_no_room_for_a_save_is_a_budget_error(scratch: Path) -> None:
    with training(scenario("nvme"), scratch / "a", real_environment()) as run:
        run.one_batch()
        host = run_of(run.model)._resources.budgets[TierName.HOST]
        lease = host.lease(host.free_bytes, "somebody")
        with pytest.raises(zo.BudgetError, match="checkpoints"):
            save(run, scratch / "checkpoints")
        assert list((scratch / "checkpoints").iterdir()) == []
        lease.release()
        save(run, scratch / "checkpoints")


OTHERS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], None], str]] = {
    "fewer": ({"num_blocks": 1}, lambda _: None, r"the model lacks blocks\.1\.0\.weight, blocks\.1\.0\.bias$"),
    "more": ({"num_blocks": 3}, lambda _: None, r"it lacks blocks\.2\.0\.weight, blocks\.2\.0\.bias$"),
    "shapes": ({"width": 8}, lambda _: None, r"embed\.weight has the shape \[32, 8\], saved was \[32, 72\], "),
    "trained": ({}, lambda model: model.shift.requires_grad_(), "shift is trained now and was frozen"),
    "frozen": ({}, lambda model: model.embed.requires_grad_(False), "embed.weight is frozen now and was trained"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(
    other: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, change, message = OTHERS[other]
    with training(scenario(), scratch / "a", real_environment()) as run:
        save(run, scratch / "checkpoints")
    make = Scenario.model

    def changed(this: Scenario) -> nn.Module:
        model = make(this)
        change(model)
        return model

    monkeypatch.setattr(Scenario, "model", changed)
    with training(replace(scenario(), **fields), scratch / "b", real_environment()) as run:
        run.one_batch()
        before = run.moment()
        with pytest.raises(zo.CheckpointError, match=message):
            load(run, scratch / "checkpoints")
        assert run.moment().differences(before) == []
        run.one_batch()


def test_what_else_must_be_as_it_was(scratch: Path) -> None:
    with training(scenario(), scratch / "a", real_environment()) as run:
        save(run, scratch / "checkpoints")
    with training(scenario(), scratch / "b", real_environment()) as run:
        with pytest.raises(zo.ConfigError, match=r"had 1 optimizer\(s\), now there are 0"):
            zo.load(scratch / "checkpoints", run.model, [])
        zo.track(run.model, another=run.scheduler)
        with pytest.raises(zo.ConfigError, match="another was not tracked"):
            load(run, scratch / "checkpoints")
        run.one_batch()


def test_an_optimizer_with_other_moments_is_refused(scratch: Path) -> None:
    with training(scenario(), scratch / "a", real_environment()) as run:
        save(run, scratch / "checkpoints")
        model = zo.offload(scenario().model(), zo.OffloadConfig(algorithm="lion", threads=1))
        with pytest.raises(zo.ConfigError, match=r"saved with adamw, .* than lion: .*algorithm=.adamw."):
            zo.load(scratch / "checkpoints", model, zo.Lion(model.parameters()))
        zo.close(model)


LEAVES = """
import torch, zerooffload as zo
from torch import nn
model = zo.offload(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), zo.OffloadConfig(threads=1))
optimizer = zo.AdamW(model.parameters())
model(torch.ones(1, 512)).sum().backward()
optimizer.step()
zo.save({directory!r}, model, optimizer, "left", blocking=False)
"""


def test_an_exit_finishes_the_save(scratch: Path) -> None:
    directory = str(scratch / "checkpoints")
    subprocess.run([sys.executable, "-P", "-c", LEAVES.format(directory=directory)], check=True)
    (path,) = Path(directory).iterdir()
    assert path.name == "save-00000001-step-00000001"
    assert read_manifests(path)[0].extra == "left"


def test_wrong_calls(scratch: Path) -> None:
    with training(scenario(), scratch / "a", real_environment()) as run:
        with pytest.raises(zo.ConfigError, match="keep_last must be at least 1"):
            save(run, scratch / "checkpoints", keep_last=0)
        with pytest.raises(zo.ConfigError, match=r"extra\['model'\] is a DroppingNet"):
            zo.save(scratch / "checkpoints", run.model, run.optimizer, {"model": run.model})
        with pytest.raises(zo.ConfigError, match="none of this model's parameters"):
            zo.save(scratch / "checkpoints", run.model, torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
        with zo.full_params(run.model), pytest.raises(zo.ConfigError, match="outside"):
            save(run, scratch / "checkpoints")
        with zo.full_params(run.model), pytest.raises(zo.ConfigError, match="outside"):
            load(run, scratch / "checkpoints")
        assert not (scratch / "checkpoints").exists()
        with pytest.raises(zo.CheckpointError, match="cannot read"):
            load(run, scratch / "checkpoints")
        with pytest.raises(zo.ConfigError, match="is not offloaded"):
            zo.save(scratch / "checkpoints", nn.Linear(2, 2), run.optimizer)
        with pytest.raises(zo.ConfigError, match="large tensors belong in files"):
            zo.save(scratch / "checkpoints", run.model, run.optimizer, torch.zeros(16 << 20))
        assert list((scratch / "checkpoints").iterdir()) == []


def test_a_load_that_ends_half_way_is_told_from_then_on(scratch: Path) -> None:
    with training(scenario(), scratch / "a", real_environment()) as run:
        run.one_batch()
        path = save(run, scratch / "checkpoints").path / "exp_avg-00000-of-00001.safetensors"
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    with training(scenario(), scratch / "b", real_environment()) as run:
        with pytest.raises(zo.CheckpointError, match=f"{path}: .* are not what was written there"):
            load(run, scratch / "checkpoints")
        with pytest.raises(zo.ConfigError, match="a load ended half-way"):
            run.one_batch()


def _link(path: Path) -> None:
    aside = path.rename(path.parent.parent / "aside")
    path.symlink_to(aside)


def _queue(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def _shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _huge(path: Path) -> None:
    """Without taking space."""
    os.truncate(path, 1 << 40)


def _other_names(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"embed.weight", b"embed.height", 1))


def _huge_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 7)


def _of_another(path: Path) -> None:
    """Resealed, as a manifest of another save."""
    line = path.read_bytes().partition(b"\n")[0].replace(b'"rank":0', b'"rank":1', 1)
    path.write_bytes(signed_manifest(line))


EITHER = (Path.unlink, _link, _queue, _folder, _longer, _shorter, _huge)
DAMAGES = [
    *(("rank-00000.json", damage) for damage in (*EITHER, _of_another)),
    *(("exp_avg_sq-00000-of-00001.safetensors", damage) for damage in (*EITHER, _other_names, _huge_header)),
]


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a training that has begun."""
    root = tmp_path_factory.mktemp("saved")
    with training(Scenario(config=HOSTED), root, real_environment()) as run:
        return save(run, root / "checkpoints").path


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=lambda value: getattr(value, "__name__", str(value)[:4]))
def test_a_hostile_folder_is_refused_by_the_name_of_its_file(
    name: str, damage: Callable[[Path], None], whole_checkpoint: Path, scratch: Path
) -> None:
    path = Path(shutil.copytree(whole_checkpoint, scratch / "checkpoint"))
    damage(path / name)
    before = sorted(str(found) for found in scratch.rglob("*"))
    with training(Scenario(config=HOSTED), scratch, real_environment()) as run:
        run.one_batch()
        moment = run.moment()
        with pytest.raises(zo.CheckpointError) as refused:
            load(run, path)
        assert str(path / name) in str(refused.value) or (damage is Path.unlink and str(path) in str(refused.value))
        assert run.moment().differences(moment) == []
        run.one_batch()
    assert sorted(str(found) for found in scratch.rglob("*") if "drive" not in str(found)) == before


def test_ctrl_c_ends_a_save_and_no_more(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with training(scenario("nvme"), scratch / "a", real_environment()) as run:
        run.one_batch()
        with monkeypatch.context() as patch:
            patch.setattr(saving._Job, "_write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                save(run, scratch / "checkpoints")
        assert list((scratch / "checkpoints").iterdir()) == []
        run.one_batch()
        save(run, scratch / "checkpoints")
        run.one_batch()
    assert len(list((scratch / "checkpoints").iterdir())) == 1


def test_without_threads_a_save_is_done_at_once(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with training(scenario(), scratch / "a", real_environment()) as run:
        run.one_batch()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert save(run, scratch / "checkpoints", blocking=False).done()
        load(run, scratch / "checkpoints")
