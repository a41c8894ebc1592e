"""The order in which inputs of blocks use their two buffers beside a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import simulated
from support.reference_training import Recipe, offload_prepared

import zerooffload as zo
from zerooffload.config import TierName
from zerooffload.runtime.activations import ActivationStore, KeptAway
from zerooffload.sharding.registry import residence_of
from zerooffload.telemetry import Wait, Waits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NBYTES = 3 * 4096


class Noted(Waits):
    """Waits that note what they do."""

    def __init__(self, recorder: Any) -> None:
        super().__init__(recorder)
        self.events: list[Any] = []

    def until(self, cause: Wait, waitable: Any) -> None:
        self.events.append((cause, waitable))
        super().until(cause, waitable)

    def order(self, cause: Wait, stream: Any, event: Any) -> None:
        self.events.append((cause, event))
        super().order(cause, stream, event)


@pytest.fixture
def started(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ActivationStore, Noted]]:
    monkeypatch.setattr("zerooffload.planner.block_inputs.PAGE_NBYTES", 4096)
    noted: list[Noted] = []

    def make_waits(recorder: Any) -> Noted:
        noted.append(Noted(recorder))
        return noted[-1]

    with simulated(make_waits=make_waits) as environment:
        model = offload_prepared(Recipe(), environment, activations="nvme", nvme_paths=[nvme])
        residence = residence_of(next(model.parameters()))
        assert residence is not None
        yield residence.run._resources.block_inputs, noted[-1]
        zo.close(model)


def content(number: int) -> torch.Tensor:
    return torch.full((NBYTES // 4,), float(number))


@pytest.mark.parametrize("tier", [TierName.HOST, TierName.NVME])
def test_what_goes_away_comes_back_in_the_reverse_order(started: tuple[ActivationStore, Noted], tier: TierName) -> None:
    store, _ = started
    keep = store.keeper(tier)
    for _ in range(2):
        kept = [keep(content(number)) for number in range(5)]
        for number in reversed(range(5)):
            assert torch.equal(kept[number].bring(), content(number))
            kept[number].release()


def test_a_wrong_guess_costs_nothing_but_time(started: tuple[ActivationStore, Noted]) -> None:
    store, _ = started
    keep = store.keeper(TierName.NVME)
    kept = [keep(content(number)) for number in range(5)]
    for number in (4, 1, 3, 0, 2):
        assert torch.equal(kept[number].bring(), content(number))
        kept[number].release()
    dropped = [keep(content(number)) for number in range(3)]
    assert torch.equal(dropped.pop().bring(), content(2))
    dropped.clear()
    again = keep(content(7))
    assert torch.equal(again.bring(), content(7))


def test_lengths_may_vary(started: tuple[ActivationStore, Noted]) -> None:
    store, _ = started
    keep = store.keeper(TierName.NVME)
    for length in (5, 2000, 3, 5000, 1024):
        kept = [keep(torch.arange(length) + number) for number in range(3)]
        for number in (2, 1, 0):
            assert torch.equal(kept[number].bring(), torch.arange(length) + number)
            kept[number].release()


def test_a_buffer_is_written_to_when_its_copies_are_done(
    started: tuple[ActivationStore, Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, waits = started
    sent: list[Any] = []
    send = store._down.send

    def noting(*args: Any) -> Any:
        sent.append(send(*args))
        return sent[-1]

    monkeypatch.setattr(store._down, "send", noting)
    keep = store.keeper(TierName.HOST)
    kept = [keep(content(0)), keep(content(1))]
    assert [item for cause, item in waits.events if cause is Wait.ACTIVATION_COPY] == []
    first = sent[:3]
    kept.append(keep(content(2)))
    assert [item for cause, item in waits.events if cause is Wait.ACTIVATION_COPY] == first
    assert all(item.done() for item in first)
    del kept


@pytest.mark.parametrize("tier", [TierName.HOST, TierName.NVME])
def test_a_buffer_is_copied_to_behind_what_compute_was_given_before(
    started: tuple[ActivationStore, Noted], monkeypatch: pytest.MonkeyPatch, tier: TierName
) -> None:
    store, waits = started
    keep = store.keeper(tier)
    kept: list[Any] = [keep(content(number)) for number in range(4)]
    points: list[Any] = []
    compute_done = store._transfers.compute_done

    def noting() -> Any:
        points.append(compute_done())
        return points[-1]

    monkeypatch.setattr(store._transfers, "compute_done", noting)
    for number in reversed(range(4)):
        kept[number].bring()
        assert isinstance(kept[number], KeptAway)
        kept[number].release()
    # Taken when each began to come back, and every page's copy is behind its own input's.
    assert len(points) == 4
    reused = [item for cause, item in waits.events if cause is Wait.ACTIVATION_REUSE]
    assert [reused.count(point) for point in points] == [3] * 4


def test_a_page_is_written_again_when_its_write_is_done(started: tuple[ActivationStore, Noted]) -> None:
    """Though nobody has read it: its graph was dropped."""
    store, waits = started
    keep = store.keeper(TierName.NVME)
    kept = keep(content(1))
    store._down.finish()
    assert isinstance(kept, KeptAway)
    written = [page.written for page in kept.pages]
    assert not any(ticket is None or ticket.done() for ticket in written)
    kept.release()
    again = keep(content(2))
    store._down.finish()
    assert all(ticket is not None and ticket.done() for ticket in written)
    assert len([cause for cause, _ in waits.events if cause is Wait.ACTIVATION_WRITE]) == len(written)
    assert torch.equal(again.bring(), content(2))
