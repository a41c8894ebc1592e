"""Byte budgets and the leases taken from them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

from zerooffload.errors import BudgetError, InternalError
from zerooffload.formats import format_bytes


class Budget:
    """A bound on the bytes that are leased at the same time. Thread-safe.

    Parameters
    ----------
    name : str
        For messages: the tier.
    limit_bytes : int
        The most that may be leased.
    parent : Budget, optional
        A budget that every lease of this one counts in too (a device that aliases host memory).
    """

    def __init__(self, name: str, limit_bytes: int, parent: Budget | None = None) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self._parent = parent
        # Reentrant: the garbage collector may release a lease in the middle of any of these methods.
        self._lock = threading.RLock()
        self._holders: Counter[str] = Counter()
        self._yielding: list[Callable[[int], None]] = []
        self._leased_bytes = 0
        self._peak_bytes = 0

    @property
    def leased_bytes(self) -> int:
        """Bytes leased now, those of child budgets included."""
        return self._leased_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever leased."""
        return self._peak_bytes

    @property
    def free_bytes(self) -> int:
        """What could still be leased."""
        own = self.limit_bytes - self._leased_bytes
        return own if self._parent is None else min(own, self._parent.free_bytes)

    def holders(self) -> dict[str, int]:
        """Bytes by holder, largest first."""
        with self._lock:
            return dict(self._holders.most_common())

    def ask_when_short(self, give_up: Callable[[int], None]) -> None:
        """Call `give_up(nbytes)` when a lease lacks so many bytes: its caller may shrink a lease of its own."""
        self._yielding.append(give_up)

    def lease(self, nbytes: int, holder: str) -> Lease:
        """Take `nbytes` for `holder`.

        Raises
        ------
        BudgetError
            If they do not fit; nothing is taken then.
        """
        self._take_with_parent(nbytes, holder)
        return Lease(self, nbytes, holder)

    def _take_with_parent(self, nbytes: int, holder: str) -> None:
        if self._parent is not None:
            self._parent._take(nbytes, holder)
        try:
            self._take(nbytes, holder)
        except BudgetError:
            if self._parent is not None:
                self._parent._give_back(nbytes, holder)
            raise

    def _take(self, nbytes: int, holder: str) -> None:
        # Without the lock: who gives up may hold one of its own while a finalizer there gives a lease back.
        for give_up in self._yielding:
            if self._leased_bytes + nbytes > self.limit_bytes:
                give_up(self._leased_bytes + nbytes - self.limit_bytes)
        with self._lock:
            if self._leased_bytes + nbytes > self.limit_bytes:
                largest = ", ".join(f"{name} {format_bytes(n)}" for name, n in self._holders.most_common(3))
                raise BudgetError(
                    f"{self.name} budget: {holder} needs {nbytes} bytes ({format_bytes(nbytes)}), but only"
                    f" {self.limit_bytes - self._leased_bytes} of {self.limit_bytes} bytes are free."
                    f" Largest holders: {largest or 'none'}."
                    f" Raise the {self.name} budget by {self._leased_bytes + nbytes - self.limit_bytes} bytes."
                )
            self._leased_bytes += nbytes
            self._holders[holder] += nbytes
            self._peak_bytes = max(self._peak_bytes, self._leased_bytes)

    def _give_back(self, nbytes: int, holder: str) -> None:
        with self._lock:
            self._leased_bytes -= nbytes
            self._holders[holder] -= nbytes
            if not self._holders[holder]:
                del self._holders[holder]
            if self._leased_bytes < 0:
                raise InternalError(f"{self.name} budget: more bytes given back than leased, by {holder}")

    def _release(self, nbytes: int, holder: str) -> None:
        self._give_back(nbytes, holder)
        if self._parent is not None:
            self._parent._give_back(nbytes, holder)


class Lease:
    """Bytes held from a budget until `release`, the end of a `with` block, or garbage collection."""

    def __init__(self, budget: Budget, nbytes: int, holder: str) -> None:
        self._budget = budget
        self._is_held = True
        self.nbytes = nbytes
        self.holder = holder

    def release(self) -> None:
        """Give the bytes back; again is harmless."""
        was_held, self._is_held = self._is_held, False
        if was_held:
            self._budget._release(self.nbytes, self.holder)

    def renew(self) -> None:
        """Take the bytes again that `release` gave back.

        Raises
        ------
        BudgetError
            If they do not fit any more; nothing is taken then.
        """
        if not self._is_held:
            self._budget._take_with_parent(self.nbytes, self.holder)
            self._is_held = True

    def shrink(self, nbytes: int) -> None:
        """Give a part of the bytes back."""
        if self._is_held:
            self.nbytes -= nbytes
            self._budget._release(nbytes, self.holder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()
