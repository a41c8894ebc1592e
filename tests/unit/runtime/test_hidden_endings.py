"""What may come while updates go on behind the training thread: the end of the run, garbage collection, a fork."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from support.folders import leftovers
from support.hidden_turns import THREAD_NAME, Hidden, hidden_updates, refuse_threads
from torch import nn

import zerooffload as zo
from zerooffload.journal import Journal
from zerooffload.optim.stream import StreamedUpdate
from zerooffload.telemetry import Wait, Waits

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]

LIMIT_SECONDS = 10
COMMIT_THREAD = "zerooffload-commit"


@pytest.fixture
def trained(make_net: MakeNet, tokens: torch.Tensor, offload: Offload) -> list[torch.Tensor]:
    """The parameters after one step in which nothing is hidden."""
    model = offload(make_net(), "host", update="after_backward")
    step(model, tokens)
    zo.close(model)
    return [param.detach().clone() for param in model.parameters()]


def step(model: nn.Module, tokens: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    model(tokens).backward()
    optimizer.step()
    return optimizer


def are_equal(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


class Pause:
    """Lets a method of a class, on a thread of that name, come to `reached` and no further before `go`."""

    def __init__(self, owner: type, method: str, thread_name: str) -> None:
        self.reached, self.go, self.passed = (threading.Event() for _ in range(3))
        self.then: Callable[[], object] = lambda: None
        self.patch = pytest.MonkeyPatch()
        really = getattr(owner, method)

        def paused(*args: object) -> object:
            if threading.current_thread().name == thread_name and not self.passed.is_set():
                self.reached.set()
                assert self.go.wait(LIMIT_SECONDS)
                self.then()
                self.passed.set()
            return really(*args)

        self.patch.setattr(owner, method, paused)


@pytest.fixture(params=[THREAD_NAME, COMMIT_THREAD])
def pause(request: pytest.FixtureRequest) -> Iterator[Pause]:
    """In the middle of hidden work."""
    where = (StreamedUpdate, "finish_first") if request.param == THREAD_NAME else (Journal, "flush_states")
    pause = Pause(*where, request.param)
    yield pause
    pause.go.set()
    pause.patch.undo()


def no_thread_is_left() -> bool:
    for thread in threading.enumerate():
        if thread.name.startswith("zerooffload-"):
            thread.join(LIMIT_SECONDS)
            if thread.is_alive():
                return False
    return True


def drop_in_a_cycle(*things: object) -> None:
    cycle: list[object] = list(things)
    cycle.append(cycle)


def test_a_run_that_is_collected_by_its_own_threads(
    pause: Pause, make_net: MakeNet, tokens: torch.Tensor, nvme: Path
) -> None:
    """The collector runs wherever memory is taken; who closes there would wait for itself."""
    homes = dict.fromkeys(("params", "optimizer", "gradients"), "nvme")
    model = zo.offload(make_net(), zo.OffloadConfig(**homes, nvme_paths=[nvme], threads=1, update="under_next_forward"))
    optimizer = step(model, tokens)
    assert pause.reached.wait(LIMIT_SECONDS)
    gc.disable()
    try:
        drop_in_a_cycle(model, optimizer)
        del model, optimizer
        pause.then = gc.collect
        pause.go.set()
        assert pause.passed.wait(LIMIT_SECONDS)
    finally:
        gc.enable()
    assert no_thread_is_left()
    assert leftovers(nvme) == []
    again = zo.offload(make_net(), zo.OffloadConfig(**homes, nvme_paths=[nvme], threads=1))
    assert zo.resume(again, zo.AdamW(again.parameters())) == 1
    zo.close(again)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_run_that_is_collected_right_after_a_step(
    tier: str, make_net: MakeNet, tokens: torch.Tensor, nvme: Path, trained: list[torch.Tensor]
) -> None:
    homes = dict.fromkeys(("params", "optimizer", "gradients"), tier)
    with hidden_updates(Hidden.LATE):
        model = zo.offload(
            make_net(), zo.OffloadConfig(**homes, nvme_paths=[nvme], threads=1, update="under_next_forward")
        )
        step(model, tokens)
        params = list(model.parameters())
        del model
        gc.collect()
    assert no_thread_is_left()
    if tier == "host":
        assert are_equal(params, trained)


@pytest.mark.parametrize("when", Hidden)
def test_closed_right_after_a_step_parameters_at_home_are_whole(
    when: Hidden, make_net: MakeNet, tokens: torch.Tensor, offload: Offload, trained: list[torch.Tensor]
) -> None:
    with hidden_updates(when):
        model = offload(make_net(), "host", update="under_next_forward")
        step(model, tokens)
        zo.close(model)
    assert are_equal(model.parameters(), trained)


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("error", [RuntimeError("kernel"), MemoryError("memory")])
def test_an_update_that_fails_in_any_way_is_told_once_and_leaves_nothing(
    tier: str, error: Exception, make_net: MakeNet, tokens: torch.Tensor, offload: Offload
) -> None:
    model = offload(make_net(), tier, update="under_next_forward")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamedUpdate, "_step", lambda *_: (_ for _ in ()).throw(error))
        step(model, tokens)
        with pytest.raises(type(error)):
            model(tokens)
        with pytest.raises(zo.ConfigError, match=f"half-way \\({type(error).__name__}"):
            model(tokens)
        zo.close(model)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_failure_that_nobody_has_met_is_told_by_close(
    tier: str, make_net: MakeNet, tokens: torch.Tensor, offload: Offload, nvme: Path
) -> None:
    model = offload(make_net(), tier, update="under_next_forward")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamedUpdate, "_step", lambda *_: (_ for _ in ()).throw(RuntimeError("kernel")))
        step(model, tokens)
        with pytest.raises(RuntimeError, match="kernel"):
            zo.close(model)
    zo.close(model)
    assert leftovers(nvme) == []


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_ctrl_c_while_closing_closes_the_next_time(
    tier: str, make_net: MakeNet, tokens: torch.Tensor, offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offload(make_net(), tier, update="under_next_forward")
    step(model, tokens)
    really_wait = Waits.until

    def interrupted(waits: Waits, cause: Wait, waitable: object) -> None:
        if cause is Wait.UPDATE:
            raise KeyboardInterrupt
        really_wait(waits, cause, waitable)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Waits, "until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            zo.close(model)
    zo.close(model)
    assert not any(bool(param.isnan().any()) for param in model.parameters() if tier == "host")


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_no_thread_of_ours_can_be_had(
    tier: str, make_net: MakeNet, tokens: torch.Tensor, offload: Offload, trained: list[torch.Tensor]
) -> None:
    model = offload(make_net(), tier, update="during_backward", accumulation_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        refuse_threads(patch, THREAD_NAME)
        step(model, tokens)
        with zo.full_params(model, writeback=False):
            assert all(
                torch.equal(param, expected) for param, expected in zip(model.parameters(), trained, strict=True)
            )


def test_not_even_a_thread_that_commits(make_net: MakeNet, tokens: torch.Tensor, offload: Offload) -> None:
    model = offload(make_net(), "nvme", update="under_next_forward")
    with pytest.MonkeyPatch.context() as patch:
        refuse_threads(patch, THREAD_NAME, COMMIT_THREAD)
        with pytest.raises(RuntimeError, match="new thread"):
            step(model, tokens)


def _use_in_a_child(model: nn.Module, tokens: torch.Tensor, results: multiprocessing.SimpleQueue) -> None:
    told = []
    for call in (lambda: model(tokens), lambda: zo.close(model)):
        try:
            call()
        except zo.ZeroOffloadError as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("")
    results.put(told)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_process_forked_in_the_middle(
    tier: str, make_net: MakeNet, tokens: torch.Tensor, offload: Offload, trained: list[torch.Tensor]
) -> None:
    """A child (a data loader's worker) that does not touch the model ends; one that uses it is refused."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with hidden_updates(Hidden.LATE):
        model = offload(make_net(), tier, update="under_next_forward")
        step(model, tokens)
        children = [
            context.Process(target=gc.collect),
            context.Process(target=_use_in_a_child, args=(model, tokens, results)),
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(LIMIT_SECONDS)
            assert child.exitcode == 0
        used, closed = results.get()
        assert "forked" in used
        assert closed == ""
        with zo.full_params(model, writeback=False):
            assert all(
                torch.equal(param, expected) for param, expected in zip(model.parameters(), trained, strict=True)
            )


def test_a_second_optimizers_clipping_leaves_the_gradients_that_are_being_used(
    make_net: MakeNet, tokens: torch.Tensor, offload: Offload
) -> None:
    """What no gradient holds is zeroed before the norm is taken, in the buffer that both share."""
    ends = []
    for update in ("after_backward", "under_next_forward"):
        with hidden_updates(Hidden.LATE):
            model = offload(make_net(), "host", update=update)
            weights = [param for param in model.parameters() if param.dim() > 1]
            biases = [param for param in model.parameters() if param.dim() <= 1]
            first, second = zo.AdamW(weights, lr=1e-2), zo.AdamW(biases, lr=1e-2)
            model(tokens).backward()
            first.step()
            first.zero_grad()
            zo.clip_grad_norm_(biases, 0.1)
            second.step()
            second.zero_grad()
            zo.close(model)
            ends.append([param.detach().clone() for param in model.parameters()])
    assert are_equal(*ends)
