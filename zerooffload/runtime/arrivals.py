"""What the ranks of a machine have taken home of what ranks on other machines update, into the one copy that they have.

[Note: each takes a part home]
After an update all ranks gather a flat, in one order. Of what no rank of the machine has updated, each of them sends a
part home from its own device, and may read the others' parts from there when they have arrived. When a rank brings the
flat in again is its own affair: it may evaluate alone, while others are busy elsewhere. So they do not meet: a thread
waits for the copies and counts, in memory that the ranks share, the gathers whose part is home. Whoever reads what was
gathered as the n-th waits until the others have counted to n. They begin to write anew when all are in the next step,
after each has waited for its own copies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from zerooffload.errors import RankError
from zerooffload.runtime.resources import Parts
from zerooffload.runtime.shared_homes import Member, Sharers
from zerooffload.runtime.worker_thread import WorkerThread
from zerooffload.sharding.collectives import lives
from zerooffload.sharding.unit import UnitFlat
from zerooffload.telemetry import Wait, Waitable, wait_for_all

_POLL_SECONDS = 5e-5
_CHECK_SECONDS = 0.5


class Arrived:
    """That the others have counted to a number; can be waited for."""

    def __init__(self, number: int, others: Sequence[tuple[torch.Tensor, Member]]) -> None:
        self._number = number
        self._others = others

    def done(self) -> bool:
        """Whether they have."""
        return all(int(counter[0]) >= self._number for counter, _ in self._others)

    def wait(self) -> None:
        """Block until they have.

        Raises
        ------
        RankError
            If one never will.
        """
        next_check = time.monotonic() + _CHECK_SECONDS
        while not self.done():
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > next_check:
                self._check()
                next_check = time.monotonic() + _CHECK_SECONDS

    def _check(self) -> None:
        """See that who has not counted so far goes on."""
        for counter, member in self._others:
            # Asked first: who ends, or dies, may have counted before.
            is_over = bool(counter[1]) or not lives(member.pid)
            if is_over and int(counter[0]) < self._number:
                raise RankError(
                    f"rank {member.global_rank} is gone, or has ended its run, before its part of parameters was home"
                )


class Arrivals:
    """Counts this rank's, and knows which of the others' counts a flat needs.

    Parameters
    ----------
    counters : Sequence[torch.Tensor]
        Of each rank that has the copy, in their order: int64, the count, and whether it has ended. None where no flat
        needs them.
    """

    def __init__(self, counters: Sequence[torch.Tensor], sharers: Sharers, parts: Parts) -> None:
        self._own = counters[sharers.position] if counters else torch.zeros(2, dtype=torch.int64)
        each = zip(counters, sharers.members, strict=False)  # there may be members, and no counters
        self._others = [of_rank for position, of_rank in enumerate(each) if position != sharers.position]
        self._waits = parts.waits
        self._num_begun = 0
        self._numbers: dict[UnitFlat, int] = {}
        self._under_way: deque[list[Waitable]] = deque()
        self._failure: BaseException | None = None
        self._thread = WorkerThread(
            "zerooffload-arrivals",
            self._work,
            has_work=lambda: bool(self._under_way),
            failed=self._fail,
            in_background=parts.recorder.in_background,
        )

    def begun(self, part: UnitFlat, copies: list[Waitable]) -> None:
        """After these copies, this rank's part of what was gathered of a flat is home; every rank calls this alike.

        Raises
        ------
        BaseException
            What went wrong with an earlier one.
        """
        if self._failure is not None:
            raise self._failure
        self._num_begun += 1
        self._numbers[part] = self._num_begun
        with self._thread.changed:
            self._under_way.append(copies)
        self._thread.wake()

    def of(self, part: UnitFlat) -> Waitable | None:
        """What must be over before the flat's home holds what was gathered last, if other ranks send parts of it."""
        number = self._numbers.get(part)
        return None if number is None else Arrived(number, self._others)

    def close(self) -> None:
        """Return when all that was begun is counted; the others know that no more will be."""
        self._thread.wake()
        self._thread.wait_idle()
        self._own[1] = 1

    def _work(self) -> None:
        while self._under_way:
            wait_for_all(self._waits, Wait.PARAMETER_WRITE, self._under_way[0])
            with self._thread.changed:
                self._under_way.popleft()
            self._own[0] += 1

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._under_way.clear()
        self._own[1] = 1
