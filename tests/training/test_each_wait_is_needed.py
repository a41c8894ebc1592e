"""Each wait is taken out, at each place where it is performed, and the numbers go wrong.

The places are found in the package's source, so a new wait without a case here fails. Where no case can be found, the
wait is listed as covered by another, with the reason.
"""

from __future__ import annotations

import ast
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import Homes, cpu_with_simulated_drive, least_memory, simulated
from support.leaky_waits import LeakyWaits
from support.reference_training import Outcome, Recipe, differences, train_offloaded, whole
from support.simulated_accelerator import RaceError
from support.small_models import VOCABULARY, batch
from torch import nn

import zerooffload
import zerooffload as zo
from zerooffload.errors import ZeroOffloadError
from zerooffload.sharding.registry import residence_of
from zerooffload.telemetry import Wait, Waits

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerooffload.telemetry.recorder import CountingRecorder

pytestmark = pytest.mark.usefixtures("small_chunks", "small_pages", "no_cache")

PACKAGE = Path(zerooffload.__file__).parent


def edit_then_use(model: nn.Module, step: int) -> list[float]:
    """Change every block by hand: the second is brought in by evicting the first, which is then read from its home."""
    with torch.no_grad():
        for block in model.get_submodule("model.layers"):
            with whole(block):
                block.mlp.down_proj.weight.mul_(1.0 + step / 8)
    return []


def reload(model: nn.Module, _step: int) -> list[float]:
    """What is loaded again is what was saved."""
    if residence_of(next(model.parameters())) is not None:
        with TemporaryDirectory() as folder:
            zo.save(folder, model, [])
            zo.load(folder, model, [])
    return []


def evaluate(model: nn.Module, step: int) -> list[float]:
    """A forward that nobody waits for, in a window that brings the blocks in again."""
    with torch.no_grad():
        model(batch(70 + step, 0))
    return []


def reload_after_an_edit(model: nn.Module, step: int) -> list[float]:
    """What is loaded is written where the edit still is, on its way to an evaluation."""
    if residence_of(next(model.parameters())) is not None:
        with TemporaryDirectory() as folder:
            zo.save(folder, model, [])
            edit_then_use(model, step + 1)
            evaluate(model, step)
            zo.load(folder, model, [])
    return []


def one_matrix() -> nn.Module:
    """A model of one flat buffer of one chunk."""
    torch.manual_seed(11)
    return nn.Embedding(VOCABULARY, 16)


def matrix_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(tokens).sin().mean()
    return loss


def loss_after_a_look(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Looking at the gradients waits until those that are held are home."""
    if next(model.parameters()).grad is not None:
        with whole(model, grads=True):
            pass
    return matrix_loss(model, tokens)


def gradient_for_nothing(model: nn.Module, step: int) -> list[float]:
    """A backward that is thrown away: its gradient may still be on its way when the next one is written."""
    matrix_loss(model, batch(50 + step, 0)).backward()
    model.zero_grad()
    return []


LLAMA = Recipe(num_steps=3)
EDITED = Recipe(num_steps=3, between=edit_then_use)
RELOADED = Recipe(num_steps=2, between=reload)
EVALUATED = Recipe(num_steps=3, before_step=evaluate)
EDITED_AND_RELOADED = Recipe(num_steps=2, between=reload_after_an_edit)
EDITED_BF16 = Recipe(num_steps=3, between=edit_then_use, compute_dtype="bf16")
MATRIX = Recipe(num_steps=3, build=one_matrix, loss=matrix_loss)
# As many backwards that a late write of one that was thrown away meets a gradient that is read again.
RESTARTED = Recipe(
    num_steps=3, num_micro_steps=4, build=one_matrix, loss=loss_after_a_look, between=gradient_for_nothing
)
# Homes hold more bits than what arrives, so that it is joined in another place.
IN_FP32: dict[str, Any] = {"compute_dtype": "bf16", "accumulation_steps": 2}
LLAMA_IN_FP32 = replace(LLAMA, **IN_FP32)
MATRIX_IN_FP32 = replace(MATRIX, **IN_FP32)
RESTARTED_IN_FP32 = replace(RESTARTED, **IN_FP32)


@dataclass(frozen=True)
class Case:
    """Where a wait is needed: on a simulated device, or on a CPU, with these homes, in the least device memory."""

    homes: Homes
    on_device: bool = True
    recipe: Recipe = LLAMA
    update: str = "after_backward"
    activations: str = "keep"
    straight: bool = False

    @property
    def on_files(self) -> bool:
        """Whether the drive's content is to be found by others."""
        return self.recipe in (RELOADED, EDITED_AND_RELOADED)


NVME: Homes = ("nvme", "nvme", "nvme")
HOST: Homes = ("host", "host", "host")
DEVICE: Homes = ("device", "device", "device")
CASES: dict[tuple[str, Wait], list[Case]] = {
    ("fetch.finish", Wait.PARAMETER_READ): [
        Case(("nvme", "host", "host"), on_device=False),
        Case(("nvme", "host", "host"), straight=True),
    ],
    ("fetch.finish", Wait.RANGE_REFILL): [Case(("nvme", "device", "device"), straight=True)],
    ("fetch._copy_first", Wait.PARAMETER_READ): [Case(("nvme", "host", "host"))],
    ("fetch.finish", Wait.PARAMETER_COPY): [Case(("host", "host", "host")), Case(NVME)],
    ("home_reads.before_change", Wait.PARAMETER_REUSE): [
        Case(HOST, recipe=EVALUATED),
        Case(HOST, recipe=EVALUATED, update="under_next_forward"),
        Case(HOST, recipe=EDITED),
    ],
    ("home_reads.finish", Wait.PARAMETER_REUSE): [Case(("host", "host", "nvme"), recipe=EDITED_AND_RELOADED)],
    ("fetch._copy", Wait.RANGE_REFILL): [Case(("host", "device", "device"))],
    ("fetch._read", Wait.RANGE_REFILL): [Case(("nvme", "device", "device"))],
    # Slots that the update's writes leave, that gradients' writes leave, and that parameters' copies leave.
    ("staging.acquire", Wait.STAGING_REUSE): [
        Case(("host", "nvme", "host"), on_device=False),
        Case(("device", "device", "nvme")),
        Case(("nvme", "device", "device")),
        Case(("device", "device", "nvme"), recipe=LLAMA_IN_FP32),
        Case(("device", "device", "nvme"), on_device=False, recipe=LLAMA_IN_FP32),
    ],
    ("copy_down._begin", Wait.GRADIENT_COMPUTED): [Case(("device", "device", "host"))],
    ("copy_down._join_first", Wait.GRADIENT_COPY): [Case(("device", "device", "host"))],
    ("landing._read", Wait.GRADIENT_READ): [
        Case(("host", "host", "nvme"), on_device=False),
        Case(NVME),
        Case(("host", "host", "nvme"), on_device=False, recipe=LLAMA_IN_FP32),
        Case(NVME, recipe=LLAMA_IN_FP32),
    ],
    # With several chunks or units, the reuse of their slots or buffers waits for the same writes first.
    ("landing._read", Wait.GRADIENT_WRITE): [
        Case(NVME, recipe=MATRIX),
        Case(NVME, recipe=MATRIX_IN_FP32),
    ],
    ("landing._write", Wait.GRADIENT_WRITE): [
        Case(NVME, recipe=RESTARTED),
        Case(NVME, recipe=RESTARTED_IN_FP32),
    ],
    ("landing.drain", Wait.GRADIENT_WRITE): [Case(NVME)],
    ("gradients._give_back_oldest", Wait.GRADIENT_MEMORY): [
        Case(("host", "host", "nvme"), on_device=False),
    ],
    ("stream.finish_first", Wait.STATE_READ): [Case(("host", "nvme", "host"), on_device=False), Case(NVME)],
    ("slot_access.record", Wait.STATE_READ): [Case(NVME, recipe=EDITED), Case(NVME, on_device=False, recipe=EDITED)],
    ("logical_states.views", Wait.STATE_READ): [
        Case(NVME, recipe=RELOADED),
        Case(NVME, on_device=False, recipe=RELOADED),
        Case(("device", "device", "nvme"), recipe=RELOADED),
    ],
    ("update_queue._land", Wait.STATE_WRITE): [Case(NVME, recipe=RELOADED), Case(NVME, recipe=EDITED)],
    ("staging.drain", Wait.STATE_WRITE): [Case(("host", "nvme", "host"), on_device=False), Case(NVME)],
    ("slot_access.record", Wait.STATE_WRITE): [Case(NVME, on_device=False, recipe=EDITED)],
    ("activations._wait_until_written", Wait.ACTIVATION_WRITE): [
        Case(DEVICE, activations="nvme", on_device=False),
        Case(DEVICE, activations="nvme"),
    ],
    ("activations._arrive", Wait.ACTIVATION_READ): [Case(DEVICE, activations="nvme", on_device=False)],
    ("activations._copy_first", Wait.ACTIVATION_READ): [Case(DEVICE, activations="nvme")],
    ("activations._let_compute_follow", Wait.ACTIVATION_COPY): [
        Case(DEVICE, activations="host"),
        Case(DEVICE, activations="nvme"),
    ],
    ("memory_tier.read", Wait.STATE_COPY): [Case(("host", "device", "device"))],
    ("memory_tier.write", Wait.STATE_COPY): [Case(("device", "host", "host"))],
}
BY_CHANCE = "between two threads of ours: without the wait it is chance who comes first; shown in"
BY_RANKS = "only several ranks gather parameters: see tests/distributed/test_stages.py"
BY_MACHINES = "only ranks on several machines take parts home: see tests/distributed/test_copy_of_each_machine.py"
ONLY_READ = (
    "the simulated device's compute is never behind, and only reads what was copied there: see test_activations.py"
)
NEVER_BEHIND = "the simulated device's compute is never behind: see test_release_device.py"
COVERED: dict[tuple[str, Wait], tuple[str, Case | None]] = {
    ("device_tier.leave", Wait.STATE_COPY): (NEVER_BEHIND, None),
    ("device_tier.come_back", Wait.STATE_COPY): (NEVER_BEHIND, None),
    ("snapshots.before_change", Wait.SNAPSHOT): (f"{BY_CHANCE} test_checkpoints.py", None),
    ("stream._bring", Wait.GRADIENT_WRITE): (f"{BY_CHANCE} test_update_queue.py", None),
    ("update_queue._wait_busy", Wait.UPDATE): (f"{BY_CHANCE} test_update_queue.py", None),
    ("copy_down.finish", Wait.GRADIENT_LANDING): (f"{BY_CHANCE} test_copy_down.py", None),
    ("activations._take_buffer", Wait.ACTIVATION_COPY): (f"{BY_CHANCE} test_activations.py", None),
    ("activations._land", Wait.ACTIVATION_WRITE): ("only where a graph was dropped: see test_activations.py", None),
    ("activations._start", Wait.ACTIVATION_REUSE): (ONLY_READ, Case(DEVICE, activations="host")),
    ("activations._copy_first", Wait.ACTIVATION_REUSE): (ONLY_READ, Case(DEVICE, activations="nvme")),
    ("updating.run_now", Wait.STATE_COPY): (
        "the update ends with the ring's drain: what the host gives compute after it is behind every copy",
        Case(("device", "nvme", "nvme")),
    ),
    ("slot_access.record", Wait.STATE_COPY): (
        "the host has just waited for the copy itself (STATE_WRITE)",
        Case(("nvme", "device", "host"), recipe=EDITED_BF16),
    ),
    ("commits._settle", Wait.COMMIT): (
        "it guards against crashes alone, and whoever waits without a thread commits first",
        Case(NVME, on_device=False),
    ),
    ("saving._write_rest", Wait.STATE_WRITE): ("it only keeps the drive's queue short", None),
    ("shard_writer._wait_until_written", Wait.STATE_WRITE): (
        "without it files are not whole: see test_page_writer.py",
        None,
    ),
    ("kept_chunks._finish", Wait.STATE_READ): ("only a resumed run reads them: see tests/durability", None),
    ("kept_chunks.take_up", Wait.STATE_COPY): ("only a resumed run copies them: see tests/durability", None),
    ("slot_access._copy_to", Wait.STATE_WRITE): ("only a durable run has copies: see tests/durability", None),
    ("stream._copy", Wait.STATE_COPY): ("only a durable run has copies: see tests/durability", None),
    ("fetch.take_copies_home", Wait.PARAMETER_GATHERED): (BY_RANKS, None),
    ("fetch._write_staged", Wait.PARAMETER_GATHERED): (BY_RANKS, None),
    ("fetch._write_staged", Wait.PARAMETER_COPY): (BY_RANKS, None),
    ("fetch.wait_for_copies", Wait.PARAMETER_WRITE): (BY_RANKS, None),
    ("fetch._begin", Wait.PARAMETER_WRITE): (BY_MACHINES, None),
    ("arrivals._work", Wait.PARAMETER_WRITE): (BY_MACHINES, None),
}
"""Waits that another one covers: why, and a run in which they are taken out in vain, if there is one here."""


def places_in_the_source() -> set[tuple[str, Wait]]:
    """Every mention of a wait outside of `telemetry`, by "module.function"."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "telemetry":
            continue
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Wait":
                    found.add((f"{path.stem}.{function.name}", Wait[node.attr]))
    return found


def test_every_place_has_a_case() -> None:
    assert places_in_the_source() == CASES.keys() | COVERED.keys()
    assert not CASES.keys() & COVERED.keys()


def test_every_wait_has_a_case() -> None:
    elsewhere = {wait for (_, wait), (why, _) in COVERED.items() if why.startswith((BY_CHANCE, BY_RANKS, ONLY_READ))}
    assert {wait for _, wait in CASES} | elsewhere == set(Wait) - {Wait.COMMIT}


@pytest.mark.parametrize(
    ("place", "wait", "case"),
    [
        pytest.param(place, wait, case, id=f"{wait.name}-{place}-{number}")
        for (place, wait), cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_without_it_the_numbers_are_wrong(
    place: str, wait: Wait, case: Case, nvme: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    assert run(case, nvme, plain, Waits) == []
    wrong, times = run_without(place, wait, case, nvme, plain)
    assert times > 0
    assert wrong != []


@pytest.mark.parametrize(
    ("place", "wait", "case"), [(*key, case) for key, (_, case) in COVERED.items() if case is not None]
)
def test_covered(place: str, wait: Wait, case: Case, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    wrong, times = run_without(place, wait, case, nvme, plain)
    assert times > 0
    assert wrong == []


def run_without(
    place: str, wait: Wait, case: Case, nvme: Path, plain: Callable[[Recipe], Outcome]
) -> tuple[list[str], int]:
    """What goes wrong without a wait, and how often it was left out."""
    leaky: list[LeakyWaits] = []

    def make_waits(recorder: CountingRecorder) -> Waits:
        leaky.append(LeakyWaits(recorder, wait, place))
        return leaky[-1]

    wrong = run(case, nvme, plain, make_waits)
    return wrong, leaky[-1].leaked[place]


def run(
    case: Case,
    nvme: Path,
    plain: Callable[[Recipe], Outcome],
    make_waits: Callable[[CountingRecorder], Waits],
) -> list[str]:
    """What goes wrong, in words."""
    try:
        return _differences(case, nvme, plain, make_waits)
    except (ZeroOffloadError, RaceError, RuntimeError) as error:
        return [repr(error)]


def _differences(
    case: Case,
    nvme: Path,
    plain: Callable[[Recipe], Outcome],
    make_waits: Callable[[CountingRecorder], Waits],
) -> list[str]:
    """From plain PyTorch. What raced is told when the device is closed, if not before."""
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), case.homes, strict=True))
    config |= {"nvme_paths": [nvme], "host_memory": "16MiB", "device_memory": "16MiB", "update": case.update}
    config["activations"] = case.activations
    with ExitStack() as stack:
        if case.on_device:
            environment = stack.enter_context(
                simulated(make_waits=make_waits, on_files=case.on_files, straight=case.straight)
            )
        else:
            environment = cpu_with_simulated_drive(make_waits=make_waits, on_files=case.on_files)
        if case.activations == "keep" and (case.on_device or "nvme" in case.homes[0] + case.homes[2]):
            config["device_memory"] = least_memory(case.recipe, environment, "device_memory", **config)
        return differences(plain(case.recipe), train_offloaded(case.recipe, environment, **config))
