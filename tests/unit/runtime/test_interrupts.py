"""Ctrl-C and failing drives in mid-step: an error that is told, nothing left behind, and the next run works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from support.folders import leftovers
from torch import nn

import zerooffload as zo
from zerooffload.telemetry import Wait, Waits

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]

CAUSES = [Wait.PARAMETER_READ, Wait.GRADIENT_WRITE, Wait.STATE_READ, Wait.STATE_WRITE, Wait.STAGING_REUSE]


def train(model: nn.Module, tokens: torch.Tensor, num_steps: int) -> list[float]:
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(num_steps):
        loss = model(tokens)
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def fail_once(monkeypatch: pytest.MonkeyPatch, cause: Wait, error: BaseException) -> None:
    """Let the first wait for `cause` raise, before the thing is there."""
    really_wait, failures = Waits.until, [error]

    def until(self: Waits, why: Wait, waitable: object) -> None:
        if why is cause and failures:
            raise failures.pop()
        really_wait(self, why, waitable)  # type: ignore[arg-type]

    monkeypatch.setattr(Waits, "until", until)


@pytest.fixture(params=[KeyboardInterrupt(), zo.TierIOError("read", "/disk", 5)], ids=["Ctrl-C", "I/O error"])
def error(request: pytest.FixtureRequest) -> BaseException:
    return request.param


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.value)
def test_after_an_interrupted_step_nothing_is_left_and_the_next_run_is_right(  # noqa: PLR0917 - fixtures
    make_net: MakeNet, tokens: torch.Tensor, offload: Offload, nvme: Path, cause: Wait, error: BaseException
) -> None:
    expected = train(offload(make_net(256)), tokens, 2)
    with pytest.MonkeyPatch.context() as patch:
        # With a longer ring no slot would be used again.
        patch.setattr("zerooffload.planner.admission.AnnouncedPlan.with_cache", lambda plan: plan)
        model = offload(make_net(256), "nvme", update="after_backward")
        fail_once(patch, cause, error)
        with pytest.raises(type(error)):
            train(model, tokens, 2)
        zo.close(model)
    assert leftovers(nvme) == []
    assert train(offload(make_net(256), "nvme"), tokens, 2) == expected


@pytest.mark.parametrize("cause", [Wait.STATE_READ, Wait.STATE_WRITE])
def test_an_update_that_ended_half_way_is_undone_where_there_are_two_slots(
    make_net: MakeNet, tokens: torch.Tensor, offload: Offload, cause: Wait, error: BaseException
) -> None:
    expected = train(offload(make_net(256)), tokens, 3)
    model = offload(make_net(256), "nvme", update="after_backward")
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = model(tokens)
        loss.backward()
        losses.append(float(loss.detach()))
        zo.clip_grad_norm_(model, 1.0)
        with pytest.MonkeyPatch.context() as patch:
            if step == 1:
                fail_once(patch, cause, error)
                with pytest.raises(type(error)):
                    optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == expected


@pytest.mark.parametrize("cause", [Wait.STATE_READ, Wait.STATE_WRITE])
def test_a_run_whose_update_ended_half_way_refuses_to_go_on(
    make_net: MakeNet, tokens: torch.Tensor, offload: Offload, cause: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offload(make_net(), "nvme", atomic_steps=False, update="after_backward")
    fail_once(monkeypatch, cause, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(model, tokens, 1)
    with pytest.raises(zo.ConfigError, match=r"half-way \(KeyboardInterrupt") as caught:
        model(tokens)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)


class Interrupted(nn.Module):
    """Passes its input on; raises instead while `error` is set, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.in_backward = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.error is not None and not self.in_backward:
            raise self.error
        outputs = inputs * 1
        if self.error is not None:
            outputs.register_hook(self._raise)
        return outputs

    def _raise(self, _: torch.Tensor) -> None:
        raise self.error or AssertionError


@pytest.mark.parametrize(
    ("error", "in_backward"),
    [
        (ValueError("bad batch"), False),
        (ValueError("bad batch"), True),
        (KeyboardInterrupt(), False),
        (KeyboardInterrupt(), True),
    ],
    ids=["error in forward", "error in backward", "Ctrl-C in forward", "Ctrl-C in backward"],
)
def test_training_goes_on_after_a_batch_that_raised(
    make_net: MakeNet,
    tokens: torch.Tensor,
    offload: Offload,
    error: BaseException,
    in_backward: bool,  # noqa: FBT001
) -> None:
    model, plain = make_net(), make_net()
    guard = Interrupted()
    model.layers.insert(1, guard)
    offload(model, "nvme")
    expected = train(offload(plain, "host"), tokens, 2)
    guard.error, guard.in_backward = error, in_backward
    with pytest.raises(type(error)):
        model(tokens).backward()
    guard.error = None
    zo.AdamW(model.parameters()).zero_grad()
    assert train(model, tokens, 2) == expected


def test_gradients_of_a_backward_that_raised_are_forgotten_by_the_models_zero_grad(
    make_net: MakeNet, tokens: torch.Tensor, offload: Offload
) -> None:
    model, plain = make_net(), make_net()
    guard = Interrupted()
    model.layers.insert(1, guard)
    offload(model, "nvme")
    guard.error, guard.in_backward = ValueError("bad batch"), True
    with pytest.raises(ValueError, match="bad batch"):
        model(tokens).backward()
    guard.error = None
    model.zero_grad()
    for net in (model, plain):
        net(tokens).backward()
    with zo.full_params(model, grads=True):
        assert torch.equal(model.head.weight.grad, plain.head.weight.grad)


@pytest.mark.parametrize("number", [0, 1, 5, 12, 23, 40])
def test_ctrl_c_at_any_wait_leaves_nothing(
    make_net: MakeNet, tokens: torch.Tensor, offload: Offload, nvme: Path, number: int
) -> None:
    really_wait, waits = Waits.until, count()

    def until(self: Waits, cause: Wait, waitable: object) -> None:
        # Python interrupts no other thread.
        if threading.current_thread() is threading.main_thread() and next(waits) == number:
            raise KeyboardInterrupt
        really_wait(self, cause, waitable)  # type: ignore[arg-type]

    model = offload(make_net(), "nvme")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Waits, "until", until)
        with pytest.raises(KeyboardInterrupt):
            train(model, tokens, 3)
    zo.close(model)
    assert leftovers(nvme) == []
    train(offload(make_net(), "nvme"), tokens, 1)
