"""Ranks that are threads of one process, so that thousands of small runs of several ranks cost no start.

[Note: turns]
One thread trains at a time: it gives its turn up where it waits for another rank, and nowhere else. So a run goes the
same way each time. Random states, which belong to a process, change with the turn. Threads that commit run as they
like; they wait for each other without a turn.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from support.random_states import RandomStates, random_states_kept
from support.rank_emulation import ring_sum

from zerooffload.errors import RankError
from zerooffload.sharding.collectives import StepAgreement
from zerooffload.telemetry import Recorder, Wait, Waitable, Waits

T = TypeVar("T")

_LIMIT_SECONDS = 60.0
_TRAINING, _COMMITS = "training", "commits"
Hear = Callable[[str, int, bool], None]
"""Told of a meeting of ranks, by its channel and number, when this rank comes to it and (True) when it goes on."""


def hear_nothing(channel: str, number: int, is_over: bool) -> None:  # noqa: FBT001
    """Nobody is interested."""


class Turns:
    """So many ranks, and where they meet."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._holder: int | None = 0
        self._trainers: dict[int, int] = {}
        self._random = [RandomStates.now()] * world_size
        self._given: dict[tuple[str, int], dict[int, Any]] = {}
        self._num_met: Counter[tuple[str, int]] = Counter()
        self._ended: dict[int, BaseException | None] = {}

    def run(self, function: Callable[[int], T]) -> list[T]:
        """What `function(rank)` returns on each rank.

        Raises
        ------
        BaseException
            What the first rank that failed raised.
        """
        results: dict[int, T] = {}
        threads = [
            threading.Thread(target=self._run, args=(function, rank, results), name=f"rank-{rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        with random_states_kept():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for error in self._ended.values():
            if error is not None:
                raise error
        return [results[rank] for rank in range(self.world_size)]

    def meet(self, channel: str, rank: int, value: Any, hear: Hear = hear_nothing) -> list[Any]:
        """Wait until every rank has come with a value; all of them, in rank order."""
        with self._changed:
            number = self._num_met[channel, rank]
            self._num_met[channel, rank] += 1
            hear(channel, number, False)
            given = self._given.setdefault((channel, number), {})
            given[rank] = value
            self._changed.notify_all()
            if len(given) == self.world_size:
                del self._given[channel, number]
            else:
                with self._turn_given_up(rank):
                    self._until(lambda: len(given) == self.world_size or bool(self._ended))
                if len(given) < self.world_size:
                    raise RankError(f"another rank has ended and does not come to meeting {number} of {channel}")
            hear(channel, number, True)
        return [given[rank] for rank in range(self.world_size)]

    def wait_for(self, rank: int, waitable: Waitable) -> None:
        """For what another rank may have to do first; by the thread that trains."""
        with self._changed:
            self._give_up_turn(rank)
        try:
            waitable.wait()
        finally:
            with self._changed:
                self._take_turn(rank)

    def _run(self, function: Callable[[int], T], rank: int, results: dict[int, T]) -> None:
        error: BaseException | None = None
        self._trainers[threading.get_ident()] = rank
        try:
            with self._changed:
                self._take_turn(rank)
            results[rank] = function(rank)
        except BaseException as failure:  # noqa: BLE001 - raised where all are waited for
            error = failure
        with self._changed:
            self._ended[rank] = error
            self._give_up_turn(rank)

    @contextmanager
    def _turn_given_up(self, rank: int) -> Iterator[None]:
        """If this is the thread that trains."""
        if threading.get_ident() not in self._trainers:
            yield
            return
        self._give_up_turn(rank)
        try:
            yield
        finally:
            self._take_turn(rank)

    def _give_up_turn(self, rank: int) -> None:
        self._random[rank] = RandomStates.now()
        self._holder = None
        self._changed.notify_all()

    def _take_turn(self, rank: int) -> None:
        self._until(lambda: self._holder in {None, rank})
        self._holder = rank
        self._random[rank].put_back()

    def _until(self, is_so: Callable[[], bool]) -> None:
        if not self._changed.wait_for(is_so, _LIMIT_SECONDS):
            raise RankError(f"a rank waited for {_LIMIT_SECONDS} s")


class TurnCollectives:
    """See `Collectives`; the numbers are those of gloo.

    Parameters
    ----------
    hear : callable
        Told of meetings. They all count until `hears_all` is False, then only those on the commits' channel.
    """

    part: tuple[int, ...] = ()
    is_alone = False

    def __init__(self, turns: Turns, rank: int, hear: Hear = hear_nothing) -> None:
        self.world_size = turns.world_size
        self.rank = self.global_rank = rank
        self.hears_all = True
        self._turns = turns
        self._hear = hear

    def all_gather(self, full: torch.Tensor, name: str) -> None:
        """See `Collectives`."""
        with torch.no_grad():
            shards = full.chunk(self.world_size)
            given = self._meet(f"all-gather of {name}", shards[self.rank].clone())
            for shard, value in zip(shards, given, strict=True):
                shard.copy_(value)

    def reduce_scatter(self, full: torch.Tensor, name: str) -> torch.Tensor:
        """See `Collectives`."""
        with torch.no_grad():
            given = self._meet(f"reduce-scatter of {name}", full.clone())
            shard = full.chunk(self.world_size)[self.rank]
            return shard.copy_(ring_sum(given, self.rank)).div_(self.world_size)

    def gather_objects(self, value: T) -> list[T]:
        """See `Collectives`."""
        return [pickle.loads(given) for given in self._meet("exchange of values", pickle.dumps(value))]  # noqa: S301

    def gather_of_shards(self, value: T) -> list[T]:
        """Every rank has one."""
        return self.gather_objects(value)

    def gather_of_parts(self, value: T) -> list[T]:
        """The model is the one part."""
        return [value]

    def agreement(self) -> StepAgreement:
        """See `Collectives`."""
        return _TurnAgreement(self._turns, self.rank, self._hear)

    def report_to(self, recorder: Recorder) -> None:
        """There is no link."""

    def _meet(self, what: str, value: Any) -> list[Any]:
        hear = self._hear if self.hears_all else hear_nothing
        given = self._turns.meet(_TRAINING, self.rank, (what, value), hear)
        if any(others != what for others, _ in given):
            raise RankError(f"the ranks do not do the same: {[others for others, _ in given]}")
        return [of_rank for _, of_rank in given]


class _TurnAgreement:
    def __init__(self, turns: Turns, rank: int, hear: Hear) -> None:
        self._turns = turns
        self._rank = rank
        self._hear = hear

    def least(self, mine: int) -> int:
        """See `StepAgreement`."""
        return min(self._turns.meet(_COMMITS, self._rank, mine, self._hear))


class TurnWaits(Waits):
    """The one wait of a thread that trains which may be for another rank is without a turn."""

    def __init__(self, recorder: Recorder, turns: Turns, rank: int) -> None:
        super().__init__(recorder)
        self._turns = turns
        self._rank = rank

    def until(self, cause: Wait, waitable: Waitable) -> None:
        """See `Waits`."""
        if cause is Wait.COMMIT:
            self._turns.wait_for(self._rank, waitable)
        else:
            super().until(cause, waitable)
