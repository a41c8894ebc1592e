"""Which units are full: a window of device memory, filled ahead of need and emptied by farthest next use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from zerooffload.accelerator import Accelerator
from zerooffload.errors import BudgetError, ConfigError, InternalError
from zerooffload.formats import format_bytes
from zerooffload.planner.cost.window import choose_victims, first_uses
from zerooffload.runtime.fetch import Fetch, Fetcher
from zerooffload.runtime.update_queue import UpdateQueue
from zerooffload.sharding.collectives import Collectives
from zerooffload.sharding.state import ShardState
from zerooffload.sharding.unit import Unit, UnitFlat


class Residency:
    """Moves units between home and full, within `window_nbytes` of device memory.

    Units whose homes the device can use are always full and take nothing from the window.

    Parameters
    ----------
    evicts : bool
        Whether units may have to go and come back between two updates, because the window does not hold all of them.
    """

    def __init__(
        self,
        window_nbytes: int,
        fetcher: Fetcher,
        collectives: Collectives,
        accelerator: Accelerator,
        updates: UpdateQueue,
        *,
        evicts: bool = True,
    ) -> None:
        self._updates = updates
        self._evicts = evicts
        self._window_nbytes = window_nbytes
        self._fetcher = fetcher
        self._collectives = collectives
        self._accelerator = accelerator
        self._taken_nbytes = 0
        self._in_use: Counter[Unit] = Counter()
        self._fetches: dict[Unit, Fetch] = {}
        self._full: dict[Unit, None] = {}
        self._last_release = accelerator.record(accelerator.compute)

    @property
    def taken_nbytes(self) -> int:
        """What the window holds now, what is on its way included."""
        return self._taken_nbytes

    def require(self, units: Iterable[Unit], upcoming: Sequence[Unit] = ()) -> None:
        """Make `units` full and keep them so until as many `release`s.

        Raises
        ------
        BudgetError
            If they do not fit the window beside what else is in use.
        TierIOError
            If a parameter cannot be read, or could not be updated.
        """
        units = list(units)
        wanted = [unit for unit in units if unit.moving_parts]
        for unit in wanted:
            self._in_use[unit] += 1
            for part in unit.moving_parts:
                part.flat.let_be_used()
        for unit in wanted:
            if unit.state.current is ShardState.AT_HOME:
                self._make_room(unit, upcoming)
                self._start(unit)
        for unit in wanted:
            if unit.state.current is ShardState.FETCHING:
                self._finish(unit)
        self.refresh(units)

    def refresh(self, units: Iterable[Unit]) -> None:
        """Let parameters that the device uses at home be those after the last update.

        Raises
        ------
        TierIOError
            If a unit could not be updated.
        """
        for unit in units:
            at_home = [part for part in unit.parts if part.range is None]
            self._updates.wait_for_parameters(at_home)
            for part in at_home:
                if not part.copies_are_current:
                    self._gather(part)
                    part.copies_are_current = True
                    part.show_at_home()

    def wait_for_copies(self, units: Iterable[Unit]) -> None:
        """Return when nothing reads the ranges of these units but compute."""
        for unit in units:
            self._fetcher.wait_for_copies(unit)

    def prefetch(self, upcoming: Sequence[Unit]) -> None:
        """Start fetches for what comes next, as far as the window reaches."""
        self._fetcher.advance()
        for position, unit in enumerate(upcoming):
            if not unit.moving_parts or unit.state.current is not ShardState.AT_HOME:
                continue
            missing = self._taken_nbytes + unit.range_nbytes - self._window_nbytes
            victims = self._victims(missing, upcoming, sooner_than=position)
            if missing > 0 and not victims:
                self._fetcher.read_ahead(
                    other
                    for other in upcoming[position:]
                    if other.moving_parts and other.state.current is ShardState.AT_HOME
                )
                return
            for victim in victims:
                self._evict(victim)
            self._start(unit)

    def release(self, units: Iterable[Unit]) -> None:
        """Undo one `require`. The units stay full until their memory is wanted."""
        for unit in units:
            if not unit.moving_parts:
                continue
            if self._in_use[unit] <= 0:
                raise InternalError(f"unit {unit.name} was released more often than required")
            self._in_use[unit] -= 1
            if not self._in_use[unit]:
                for part in unit.moving_parts:
                    part.flat.watch_for_use()

    def settle(self) -> None:
        """Finish every fetch: afterwards nothing of it holds a staging slot."""
        for unit in list(self._fetches):
            self._finish(unit)
        self._fetcher.drop_read_ahead()

    def send_home(self) -> None:
        """Empty the window: what it holds will not be what the homes hold."""
        self.settle()
        for unit in list(self._full):
            if self._in_use[unit]:
                raise ConfigError(
                    f"unit {unit.name} is in use: call optimizer.step() outside of the model's forward and of"
                    " zo.full_params"
                )
            self._evict(unit)

    def close(self) -> None:
        """Give the memory of all units back but of those in use; their parameters show nothing any more.

        No other rank need do the same: what is under way is not waited for with them.
        """
        for unit in [unit for unit in self._fetches if not self._in_use[unit]]:
            self._cancel(unit, self._fetches.pop(unit))
        for unit in self._idle():
            self._evict(unit)

    def _idle(self) -> list[Unit]:
        return [unit for unit in self._full if not self._in_use[unit]]

    def _victims(self, missing: int, upcoming: Sequence[Unit], *, sooner_than: float = -inf) -> list[Unit]:
        if missing <= 0:
            return []
        return choose_victims(self._idle(), first_uses(upcoming), missing, sooner_than=sooner_than)

    def _make_room(self, unit: Unit, upcoming: Sequence[Unit]) -> None:
        missing = self._taken_nbytes + unit.range_nbytes - self._window_nbytes
        if missing <= 0:
            return
        for other in [other for other in self._fetches if not self._in_use[other]]:
            # A wrong guess: it must arrive before its memory can be used for something else.
            self._finish(other)
        victims = self._victims(missing, upcoming)
        if not victims:
            used = ", ".join(other.name for other in self._in_use if self._in_use[other] and other is not unit)
            raise BudgetError(
                f"parameters in use: unit {unit.name} needs {format_bytes(unit.range_nbytes)}, the window holds"
                f" {format_bytes(self._window_nbytes)}, and these units are in use at the same time: {used or 'none'}."
                f" Raise device_memory (on a CPU: host_memory) by {missing} bytes, or cut the model into smaller units."
            )
        for victim in victims:
            self._evict(victim)

    def _start(self, unit: Unit) -> None:
        unit.state.to(ShardState.FETCHING)
        self._taken_nbytes += unit.range_nbytes
        self._fetches[unit] = self._fetcher.start(unit, self._last_release)

    def _finish(self, unit: Unit) -> None:
        fetch = self._fetches.pop(unit)
        try:
            self._fetcher.finish(fetch)
            for part in unit.moving_parts:
                part.flat.check_untouched()
        except BaseException:
            self._cancel(unit, fetch)
            raise
        unit.state.to(ShardState.STAGED)
        unit.state.to(ShardState.GATHERING)
        for part in unit.moving_parts:
            if not part.is_whole_at_home:
                self._gather(part)
                # Where nothing is to be taken, what was gathered is there: see [Note: one host copy].
                if self._evicts or not part.copied_chunks:
                    self._fetcher.take_copies_home(unit, part)
        unit.state.to(ShardState.FULL)
        self._full[unit] = None
        for part in unit.moving_parts:
            part.flat.show_full()

    def _cancel(self, unit: Unit, fetch: Fetch) -> None:
        self._fetcher.cancel(fetch)
        unit.state.to(ShardState.AT_HOME)
        self._give_back(unit)

    def _gather(self, part: UnitFlat) -> None:
        """Join what the ranks have updated."""
        self._collectives.all_gather(part.flat.layout.elements(part.memory), part.flat.layout.name)

    def _evict(self, unit: Unit) -> None:
        self._fetcher.wait_for_copies(unit)
        del self._full[unit]
        unit.state.to(ShardState.AT_HOME)
        for part in unit.moving_parts:
            part.flat.show_away()
        self._give_back(unit)

    def _give_back(self, unit: Unit) -> None:
        self._last_release = self._accelerator.record(self._accelerator.compute)
        self._taken_nbytes -= unit.range_nbytes
        for part in unit.moving_parts:
            if part.range is not None:
                part.range.empty()
