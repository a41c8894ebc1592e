"""Chunks that come down from a device whose copies are done when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from zerooffload import TierIOError
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.memory import Budget
from zerooffload.runtime.copy_down import CopyDown
from zerooffload.telemetry import Recorder, Waitable, Waits
from zerooffload.tiers import StagingRing, StagingSlot

PAGE = 4096
NUM_SLOTS = 2


class Gate:
    """An event that is passed when somebody opens it."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.opened = threading.Event()
        self.failure = failure

    def wait(self) -> None:
        assert self.opened.wait(10)
        if self.failure is not None:
            raise self.failure

    def done(self) -> bool:
        return self.opened.is_set()


@dataclass
class Transfers:
    """Copies at once, and says that it did when its gate is open."""

    gates: list[Gate] = field(default_factory=list)
    behind: list[object] = field(default_factory=list)
    failure: Exception | None = None
    copy_failure: Exception | None = None

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, produced: object, name: str, *, computed: object
    ) -> Gate:
        del produced, name
        if self.failure is not None:
            raise self.failure
        self.behind.append(computed)
        target.copy_(source)
        self.gates.append(Gate(self.copy_failure))
        return self.gates[-1]


@dataclass
class Scene:
    down: CopyDown
    transfers: Transfers
    ring: StagingRing
    joined: list[int] = field(default_factory=list)
    gate_of: dict[int, Gate] = field(default_factory=dict)

    def join(self, content: torch.Tensor, slot: StagingSlot | None) -> list[Waitable]:
        del slot
        self.joined.append(int(content[0]))
        return []

    def send(self, number: int, target: torch.Tensor | None = None) -> Waitable:
        source = torch.full((PAGE,), number, dtype=torch.uint8)
        return self.down.send(source, f"point {number}", f"chunk {number}", self.join, target=target)  # type: ignore[arg-type]

    def open_all(self) -> None:
        """Whatever copies are begun, let them be done, until nothing is under way."""
        finished = threading.Event()

        def open_gates() -> None:
            while not finished.is_set():
                for gate in list(self.transfers.gates):
                    gate.opened.set()

        opener = threading.Thread(target=open_gates)
        opener.start()
        try:
            self.down.finish()
        finally:
            finished.set()
            opener.join()


@pytest.fixture
def scene() -> Iterator[Scene]:
    ring = StagingRing("gradients", NUM_SLOTS, PAGE, Budget("host", 10 * PAGE), CpuAccelerator())
    transfers = Transfers()
    down = CopyDown(ring, transfers, Waits(Recorder()), nullcontext)  # type: ignore[arg-type]
    yield Scene(down, transfers, ring)
    ring.close()


def test_the_sender_does_not_wait_and_chunks_are_joined_in_order(scene: Scene) -> None:
    tickets = [scene.send(number) for number in range(5)]
    # No copy is done, so nothing is joined, and the memory of no chunk is free.
    assert not any(ticket.done() for ticket in tickets)
    assert scene.joined == []
    scene.open_all()
    assert scene.joined == [0, 1, 2, 3, 4]
    assert all(ticket.done() for ticket in tickets)
    assert scene.transfers.behind == [f"point {number}" for number in range(5)]
    assert scene.ring.num_free == NUM_SLOTS


def test_what_goes_straight_to_its_target_needs_no_slot(scene: Scene) -> None:
    for _ in range(NUM_SLOTS):
        scene.ring.acquire(Waits(Recorder()))
    targets = [torch.zeros(PAGE - 8, dtype=torch.uint8) for _ in range(3)]
    for number, target in enumerate(targets):
        scene.send(number, target)
    scene.open_all()
    assert scene.joined == [0, 1, 2]
    assert all(bool((target == number).all()) for number, target in enumerate(targets))
    assert scene.ring.num_free == 0


def test_finishing_waits_until_all_is_joined(scene: Scene) -> None:
    scene.send(7)
    finished = threading.Event()

    def finish() -> None:
        scene.down.finish()
        finished.set()

    thread = threading.Thread(target=finish)
    thread.start()
    assert not finished.is_set()
    assert scene.joined == []
    while not scene.transfers.gates:
        assert thread.is_alive()
    scene.transfers.gates[0].opened.set()
    thread.join()
    assert scene.joined == [7]


def test_an_action_comes_after_what_was_sent_before_it(scene: Scene) -> None:
    seen: list[list[int]] = []
    scene.send(1)
    scene.send(2)
    scene.down.call(lambda: seen.append(list(scene.joined)))
    scene.send(3)
    scene.open_all()
    assert seen == [[1, 2]]
    assert scene.joined == [1, 2, 3]


def test_what_goes_wrong_is_told_once_and_to_those_whose_memory_is_free_then(scene: Scene) -> None:
    def fail(*_: object) -> list[Waitable]:
        raise TierIOError("write", "/drive", 5)

    scene.down.send(torch.zeros(PAGE, dtype=torch.uint8), "point", "bad", fail)  # type: ignore[arg-type]
    lost = [scene.send(number) for number in range(3)]
    with pytest.raises(TierIOError, match="/drive"):
        scene.open_all()
    for ticket in lost[1:]:
        with pytest.raises(TierIOError, match="/drive"):
            ticket.wait()
    assert scene.ring.num_free == NUM_SLOTS
    scene.send(9)
    scene.open_all()
    assert scene.joined[-1] == 9


@pytest.mark.parametrize("what", ["failure", "copy_failure"])
def test_nobody_is_left_waiting_for_the_memory_of_a_copy_that_failed(scene: Scene, what: str) -> None:
    setattr(scene.transfers, what, RuntimeError("the device"))
    tickets = [scene.send(number) for number in range(3)]
    with pytest.raises(RuntimeError, match="the device"):
        scene.open_all()
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="the device"):
            ticket.wait()
    assert scene.ring.num_free == NUM_SLOTS
    scene.transfers.failure = scene.transfers.copy_failure = None
    scene.send(9)
    scene.open_all()
    assert scene.joined == [9]


def test_what_is_abandoned_is_not_joined(scene: Scene) -> None:
    tickets = [scene.send(number) for number in range(4)]

    def open_gates() -> None:
        # No copy is done before, so two at the most have a slot.
        while scene.down._sent:
            pass
        while scene.down.is_busy:
            for gate in list(scene.transfers.gates):
                gate.opened.set()

    opener = threading.Thread(target=open_gates)
    opener.start()
    scene.down.abandon()
    opener.join()
    assert set(scene.joined) <= {0, 1}
    assert all(ticket.done() for ticket in tickets)
    assert scene.ring.num_free == NUM_SLOTS
