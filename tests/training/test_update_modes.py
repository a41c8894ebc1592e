"""Whenever updates run, losses, norms, parameters and optimizer states have the same bits.

ZEROOFFLOAD_TEST_EXHAUSTIVE=1 goes through products of half of the axes; else each pair of values meets.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import COMBINATIONS, PAIRWISE, Homes, cpu_with_simulated_drive, simulated
from support.folders import leftovers
from support.hidden_turns import Hidden, hidden_updates
from support.reference_training import language_loss
from support.simulated_accelerator import Copies, SimulatedAccelerator
from support.simulated_engine import Transfers
from support.small_models import small_llama
from support.thoroughness import EXHAUSTIVE
from support.training_recipes import generate
from support.update_loops import (
    ACCUMULATION,
    CLIPS,
    DTYPES,
    MOMENTS,
    Loop,
    Moments,
    References,
    Training,
    differences,
    rows_of_a_product,
    rows_of_all_pairs,
    run,
)
from torch import nn

import zerooffload as zo
from zerooffload.config import UpdateMode
from zerooffload.entry.runs import run_of
from zerooffload.runtime.update_job import UpdateJob

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zerooffload.runtime.build import Environment

MODES = ["under_next_forward", "during_backward", "auto"]
DEVICES: dict[str, tuple[Copies | None, Transfers]] = {
    "cpu": (None, Transfers.LAZY),
    "cpu, threaded": (None, Transfers.THREADED),
    "late": (Copies.LATE, Transfers.LAZY),
    "early": (Copies.EARLY, Transfers.EAGER),
    "threaded": (Copies.THREADED, Transfers.THREADED),
}
NVME: Homes = ("nvme", "nvme", "nvme")
HOST: Homes = ("host", "host", "host")
HOMES: list[Homes] = PAIRWISE if EXHAUSTIVE else [NVME, HOST, ("nvme", "nvme", "host"), ("host", "nvme", "nvme")]
NUM_TRAINED_FLATS = 5
"""Of the small model: the embedding, three blocks and the rest."""
Row = tuple[Any, ...]


def rows(*axes: Any, homes: int) -> list[Row]:
    """What is tried; `homes` is the number of that axis."""
    lists = [list(axis) for axis in axes]
    found = rows_of_a_product(*lists, num_whole=4) if EXHAUSTIVE else rows_of_all_pairs(*lists)
    # On a device, with all states there, nothing is hidden, and optimizer states cannot be read.
    simulated_devices = {name for name, (copies, _) in DEVICES.items() if copies is not None}
    return [row for row in found if row[homes] != ("device",) * 3 or not simulated_devices & set(map(str, row[:4]))]


def named(row: Row) -> str:
    texts = ["-".join(value) if isinstance(value, tuple) else getattr(value, "value", value) for value in row]
    return "; ".join(map(str, texts))


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2048 elements: a block of the small model is three."""
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 2048)


@pytest.fixture(scope="module")
def references() -> References:
    return References()


@contextmanager
def environment(device: str) -> Iterator[Environment]:
    """Commits are made on a thread of their own, so that no forward begins with waiting for all updates."""
    copies, transfers = DEVICES[device]
    if copies is None:
        yield replace(cpu_with_simulated_drive(transfers), commit_in_background=True)
        return
    with simulated(copies, transfers) as made:
        yield replace(made, commit_in_background=True)
        assert isinstance(made.accelerator, SimulatedAccelerator)
        assert made.accelerator.num_spoiled == 0


@dataclass(frozen=True)
class Where:
    """And when."""

    homes: Homes
    update: str
    device: str
    hidden: Hidden


def assert_same(loop: Loop, references: References, nvme: Path, where: Where) -> None:
    max_norm, expected = references.of(loop)
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), where.homes, strict=True))
    memory = {"host_memory": "16MiB", "device_memory": "16MiB", "nvme_paths": [nvme]}
    with environment(where.device) as env, hidden_updates(where.hidden):
        found = run(loop, env, max_norm=max_norm, update=where.update, **config, **memory)
    assert differences("found", expected, found) == []


@pytest.mark.parametrize(
    "row",
    rows(COMBINATIONS if EXHAUSTIVE else PAIRWISE, MODES, DEVICES, ACCUMULATION, Hidden, CLIPS, DTYPES, homes=0),
    ids=named,
)
def test_the_same_bits(row: Row, nvme: Path, references: References) -> None:
    homes, mode, device, accumulation, hidden, clip, dtype = row
    assert_same(Loop(accumulation, clip, dtype), references, nvme, Where(homes, mode, device, hidden))


def test_clipping_happens_as_it_is_said(references: References) -> None:
    max_norm, (_, norms, _, _) = references.of(Loop(clip="sometimes"))
    assert max_norm is not None
    assert any(norm > max_norm for norm in norms)
    assert any(norm < max_norm for norm in norms)
    max_norm, (_, norms, _, _) = references.of(Loop(clip="always"))
    assert all(norm > max_norm for norm in norms)


EVERYTHING_AHEAD = list(itertools.product(MOMENTS, [NVME], ["during_backward"], ["one backward, told", "four, told"]))
"""Where every update is begun before the loop does what it does."""
HIDDEN = [
    (HOST, "under_next_forward"),
    (HOST, "during_backward"),
    (NVME, "under_next_forward"),
    (("nvme", "nvme", "host"), "during_backward"),
    (("host", "nvme", "nvme"), "during_backward"),
]
OTHERWISE = (
    list(itertools.product(MOMENTS, HOMES, MODES[:2], ["one backward", "one backward, told", "four, no_sync"]))
    if EXHAUSTIVE
    else [
        (moment, *HIDDEN[(number + shift) % len(HIDDEN)], "one backward, told")
        for number, moment in enumerate(MOMENTS)
        for shift in (0, 1)
    ]
)
ROUND = list(itertools.product(DEVICES, DTYPES, Hidden))


def all_of(cases: list[Row]) -> list[Row]:
    """Each case on every device, or, if that is too much, on another one each time; all dtypes and times go round."""
    if not EXHAUSTIVE:
        return [(*case, *ROUND[7 * number % len(ROUND)]) for number, case in enumerate(cases)]
    return [
        (*case, *ROUND[(9 * place + number) % len(ROUND)]) for number, case in enumerate(cases) for place in range(5)
    ]


@pytest.mark.parametrize("row", all_of(EVERYTHING_AHEAD) + all_of(OTHERWISE), ids=named)
def test_whatever_the_loop_does(row: Row, nvme: Path, references: References) -> None:
    moment, homes, mode, accumulation, device, dtype, hidden = row
    if homes == ("device",) * 3 and DEVICES[device][0] is not None:
        return
    loop = Loop(accumulation, "never", dtype, MOMENTS[moment], moment)
    assert_same(loop, references, nvme, Where(homes, mode, device, hidden))


@pytest.mark.parametrize(
    ("homes", "device"),
    [
        (NVME, "cpu"),
        (NVME, "late"),
        (HOST, "late"),
        (("nvme", "nvme", "host"), "cpu"),
        (("host", "nvme", "nvme"), "late"),
    ],
)
def test_updates_really_go_ahead(
    homes: Homes, device: str, nvme: Path, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them where the step says what was expected; where the norm is too large, none counts."""
    really_take, taken = UpdateJob.take, list[UpdateJob]()

    def take(job: UpdateJob) -> None:
        taken.append(job)
        really_take(job)

    monkeypatch.setattr(UpdateJob, "take", take)
    where = Where(homes, "during_backward", device, Hidden.THREADED)
    assert_same(Loop("one backward, told"), references, nvme, where)
    units = {job.update.part.flat.layout.name for job in taken}
    assert len(units) == NUM_TRAINED_FLATS
    taken.clear()
    assert_same(Loop("one backward, told", "always"), references, nvme, where)
    assert taken == []
    assert_same(Loop("one backward"), references, nvme, where)
    assert taken != []


EVERY_SWITCH = [
    UpdateMode.AFTER_BACKWARD,
    UpdateMode.UNDER_NEXT_FORWARD,
    UpdateMode.AFTER_BACKWARD,
    UpdateMode.DURING_BACKWARD,
    UpdateMode.UNDER_NEXT_FORWARD,
    UpdateMode.DURING_BACKWARD,
]
"""From each mode to each other, one step after the other: updates begin ahead at first."""


@pytest.mark.parametrize(
    "row", rows(HOMES, DEVICES, ["one backward, told", "four, told"], Hidden, CLIPS, DTYPES, homes=0), ids=named
)
def test_another_mode_between_two_steps(row: Row, nvme: Path, references: References) -> None:
    homes, device, accumulation, hidden, clip, dtype = row
    modes = []

    def switch(training: Training, step: int) -> None:
        chooser = run_of(training.model.parameters()).update_mode
        modes.append(chooser.mode)
        chooser.aim_at(EVERY_SWITCH[step])

    max_norm, expected = references.of(Loop(accumulation, clip, dtype))
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    memory = {"host_memory": "16MiB", "device_memory": "16MiB", "nvme_paths": [nvme]}
    with environment(device) as env, hidden_updates(hidden):
        loop = Loop(accumulation, clip, dtype, Moments(after_zero_grad=switch))
        found = run(loop, env, max_norm=max_norm, **config, **memory)
    assert differences("found", expected, found) == []
    if clip == "never":
        assert modes[1:] == EVERY_SWITCH[: len(modes) - 1]


@pytest.mark.parametrize(("homes", "mode"), list(itertools.product([NVME, HOST], MODES[:2])))
def test_a_learning_rate_in_a_tensor(homes: Homes, mode: str, nvme: Path, references: References) -> None:
    """It is read when step() is called: what was begun ahead with another one is done again."""
    for name in ("learning rate changed before the step", "learning rate changed after the step"):
        loop = Loop(moments=MOMENTS[name], name=f"{name}, a tensor", lr=lambda: torch.tensor(1e-2))
        assert_same(loop, references, nvme, Where(homes, mode, "late", Hidden.THREADED))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """What lies between them in the buffers is not updated, or otherwise."""
    return [param for param in model.parameters() if param.dim() > 1 and param.requires_grad]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    others = [param for param in model.parameters() if param.dim() <= 1 and param.requires_grad]
    return [{"params": matrices(model)}, {"params": others, "lr": 1e-3, "weight_decay": 0.0}]


@pytest.mark.parametrize(("homes", "mode"), list(itertools.product([NVME, HOST, ("host", "nvme", "host")], MODES[:2])))
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups(homes: Homes, mode: str, dtype: str | None, nvme: Path, references: References) -> None:
    for groups in (matrices, two_groups):
        loop = Loop("one backward, told", dtype=dtype, groups=groups, name=groups.__name__)
        assert_same(loop, references, nvme, Where(homes, mode, "late", Hidden.THREADED))


@pytest.mark.parametrize(("homes", "mode", "hidden"), list(itertools.product([NVME, HOST], MODES[:2], Hidden)))
def test_generation_between_steps(homes: Homes, mode: str, hidden: Hidden, nvme: Path, references: References) -> None:
    def write(training: Training, step: int) -> None:
        training.found += generate(training.model, step)

    moments = Moments(after_zero_grad=write)
    loop = Loop(moments=moments, name="generation", build=small_llama, loss=language_loss)
    assert_same(loop, references, nvme, Where(homes, mode, "cpu", hidden))


def train_with_two_optimizers(env: Environment, config: dict[str, Any]) -> list[Any]:
    """One of matrices, one of the rest, which steps in every other step."""
    training = Training(Loop(), None, env, config)
    try:
        params = list(training.model.parameters())
        training.optimizer = zo.AdamW([param for param in params if param.dim() > 1 and param.requires_grad], lr=1e-2)
        second = zo.AdamW([param for param in params if param.dim() <= 1 and param.requires_grad], lr=1e-2)
        for step in range(6):
            training.backward(step, 0)
            training.norms.append(float(zo.clip_grad_norm_(training.model, 0.5)))
            training.optimizer.step()
            if step % 2:
                training.optimizer.zero_grad()
                training.norms.append(float(zo.clip_grad_norm_(second.param_groups[0]["params"], 1e-2)))
                second.step()
            training.model.zero_grad()
        return [*training.ending(), second.state_dict()["state"]]
    finally:
        zo.close(training.model)


@pytest.mark.parametrize(("homes", "device"), list(itertools.product([NVME, HOST], ["cpu", "late"])))
def test_two_optimizers(homes: Homes, device: str, nvme: Path) -> None:
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    config |= {"host_memory": "16MiB", "device_memory": "16MiB", "nvme_paths": [nvme]}
    with environment("cpu") as env:
        expected = train_with_two_optimizers(env, {**config, "update": "after_backward"})
    for mode, hidden in itertools.product(MODES[:2], Hidden):
        with environment(device) as env, hidden_updates(hidden):
            found = train_with_two_optimizers(env, {**config, "update": mode})
        assert differences("found", expected, found) == []


class Enough(Exception):  # noqa: N818 - not an error
    """The loop ends here."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("homes", [NVME, HOST, ("nvme", "host", "nvme")], ids="-".join)
@pytest.mark.parametrize("mode", MODES[:2])
def test_ended_at_any_moment(mode: str, homes: Homes, device: str, nvme: Path) -> None:
    """Nothing is left, not even a thread; in the middle of whatever is hidden."""

    def enough(_: Training, step: int) -> None:
        if step == 1:
            raise Enough

    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    memory = {"host_memory": "16MiB", "device_memory": "16MiB", "nvme_paths": [nvme]}
    before = set(threading.enumerate())
    moments = (Moments(after_backward=enough), Moments(after_step=enough), Moments(after_zero_grad=enough))
    for moment, hidden in itertools.product(moments, Hidden):
        with environment(device) as env, hidden_updates(hidden), pytest.raises(Enough):
            run(Loop("one backward, told", moments=moment), env, update=mode, **config, **memory)
        assert leftovers(nvme) == []
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("zerooffload-"):
            thread.join(10)
            assert not thread.is_alive()
