"""An I/O engine over files in memory that does each operation as late, or as early, as its protocol lets it.

LAZY is the adversary: a read's target is poison until its ticket is waited for, and gets what the file holds then; a
write takes its source's bytes when its ticket is waited for, and never happens if nobody waits. So operations happen in
the order of the waits, whatever the order of submission.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatch
from typing import Any

import torch

from zerooffload.aio import OpenFile
from zerooffload.errors import InternalError, TierIOError

POISON = 0xFF
_ALIGNMENT_BYTES = 4096
_MOST_DELAY_SECONDS = 3e-4


class Transfers(Enum):
    """When an operation happens."""

    LAZY = "lazy"
    EAGER = "eager"
    THREADED = "threaded"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A failure on script.

    Attributes
    ----------
    at : int
        Which operation of its kind, on the files that are meant, fails; 0 for the first.
    operation : str
        "read", "write" or "flush".
    errno : int
    transferred_bytes : int
        Bytes that move before it fails: a transfer that ends short.
    files : str
        A pattern of the names of files.
    then : tuple[str, ...]
        Operations that all fail from then on, on whatever file.
    """

    at: int
    operation: str
    errno: int = errno.EIO
    transferred_bytes: int = 0
    files: str = "*"
    then: tuple[str, ...] = ()


_CHANGES = ("write", "flush")
_EVERYTHING = ("read", *_CHANGES)
FAULT_KINDS: dict[str, dict[str, Any]] = {
    "EIO": {"errno": errno.EIO},
    "a full disk": {"errno": errno.ENOSPC},
    "a short transfer": {"errno": errno.EIO, "transferred_bytes": 4096},
    "EINVAL": {"errno": errno.EINVAL},
    "a stale mount": {"errno": errno.ESTALE, "then": _EVERYTHING},
    "a vanished device": {"errno": errno.ENODEV, "then": _EVERYTHING},
    "EACCES": {"errno": errno.EACCES, "then": _CHANGES},
    "a mount that became read-only": {"errno": errno.EROFS, "then": _CHANGES},
}
"""What drives do, as arguments of `Fault`."""
_SORTS = [
    ("EIO", "a full disk", "EINVAL"),
    ("a short transfer",),
    ("a stale mount", "a vanished device"),
    ("EACCES", "a mount that became read-only"),
]


def one_of_each_sort(number: int) -> list[str]:
    """A kind of each sort, within which they differ in the system's number only: another one for each `number`."""
    return [sort[number % len(sort)] for sort in _SORTS]


class SimulatedTicket:
    """An operation; it happens when `action` is called, once."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._turn = threading.RLock()
        self._failure: BaseException | None = None
        self._is_done = False

    def wait(self) -> None:
        """Let it happen. A failed operation says so as often as it is asked."""
        with self._turn:
            if not self._is_done:
                try:
                    self._action()
                except TierIOError as failure:
                    self._failure = failure
                finally:
                    self._is_done = True
        if self._failure is not None:
            raise self._failure

    def done(self) -> bool:
        """Whether it has happened."""
        return self._is_done


class SimulatedEngine:
    """See the note above, and `Engine` for the protocol. Bytes that were never written are poison.

    Parameters
    ----------
    faults : iterable of Fault
    on_files : bool
        Transfer from and to the files themselves, under the rules of direct I/O, instead of memory.
    seed : int
        Of the delays, with `Transfers.THREADED`.
    """

    name = "simulated"
    reads_devices = False

    def __init__(
        self,
        transfers: Transfers = Transfers.LAZY,
        *,
        faults: Iterable[Fault] = (),
        on_files: bool = False,
        seed: int = 0,
    ) -> None:
        self.num_operations = {"read": 0, "write": 0, "flush": 0}
        self._transfers = transfers
        # With how many operations of its kind have been.
        self._faults = dict.fromkeys(faults, 0)
        self._lasting: Fault | None = None
        self._on_files = on_files
        self._contents: dict[str, torch.Tensor] = {}
        self._growing = threading.Lock()
        self._random = random.Random(seed)  # noqa: S311 - reproducible delays
        self._pool = ThreadPoolExecutor(3) if transfers is Transfers.THREADED else None
        self._is_closed = False

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> SimulatedTicket:
        """The target is poison from now on."""
        return self._submit("read", file, offset_bytes, target)

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> SimulatedTicket:
        """Takes the source's bytes later."""
        return self._submit("write", file, offset_bytes, source)

    def submit_flush(self, file: OpenFile) -> SimulatedTicket:
        """Happens as late as the others; there is no power cut here that it could guard against."""
        self._check_open()
        fault = self._next_fault("flush", file)

        def happen() -> None:
            self._check_not_lost()
            if self._on_files:
                os.fdatasync(file.fd)
            if fault is not None:
                raise TierIOError("flush", file.path, fault.errno)

        return self._ticket(happen)

    def register(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - the protocol's
        """There is no kernel here."""
        return False

    def fail_next(self, operation: str, *, after: int = 0, transferred_bytes: int = 0) -> None:
        """Let an operation of that kind fail, once so many of them are done from now on."""
        self._faults[Fault(at=after, operation=operation, transferred_bytes=transferred_bytes)] = 0

    def close(self) -> None:
        """What nobody has waited for is lost, unless a thread does it."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _submit(self, operation: str, file: OpenFile, offset_bytes: int, buffer: torch.Tensor) -> SimulatedTicket:
        self._check_open()
        if any(value % _ALIGNMENT_BYTES for value in (offset_bytes, buffer.numel(), buffer.data_ptr())):
            raise InternalError(f"{operation} at {offset_bytes}, {buffer.numel()} bytes, is not fit for direct I/O")
        fault = self._next_fault(operation, file)
        if operation == "read":
            buffer.fill_(POISON)
        if not self._on_files:
            # Made here and not by several threads at a time.
            with self._growing:
                self._content(file)

        def happen() -> None:
            self._check_not_lost()
            self._transfer(operation, file, offset_bytes, buffer, fault)

        return self._ticket(happen)

    def _ticket(self, happen: Callable[[], None]) -> SimulatedTicket:
        if self._pool is None:
            ticket = SimulatedTicket(happen)
            if self._transfers is Transfers.EAGER:
                _let_happen(ticket)
            return ticket
        delay_seconds = self._random.random() * _MOST_DELAY_SECONDS
        return _ThreadedTicket(self._pool.submit(_after, delay_seconds, happen))

    def _transfer(
        self, operation: str, file: OpenFile, offset_bytes: int, buffer: torch.Tensor, fault: Fault | None
    ) -> None:
        moved = buffer if fault is None else buffer[: fault.transferred_bytes]
        if moved.numel():
            if self._on_files:
                move = os.preadv if operation == "read" else os.pwritev
                move(file.fd, [moved.numpy().data], offset_bytes)
            else:
                with self._growing:
                    at_home = self._content(file)[offset_bytes : offset_bytes + moved.numel()]
                    if operation == "read":
                        moved.copy_(at_home)
                    else:
                        at_home.copy_(moved)
        if fault is not None:
            raise TierIOError(
                operation,
                file.path,
                fault.errno,
                offset_bytes=offset_bytes,
                length_bytes=buffer.numel(),
                transferred_bytes=fault.transferred_bytes,
            )

    def _next_fault(self, operation: str, file: OpenFile) -> Fault | None:
        self.num_operations[operation] += 1
        found = None
        for fault, number in self._faults.items():
            if fault.operation == operation and fnmatch(file.path.name, fault.files):
                self._faults[fault] += 1
                found = fault if number == fault.at else found
        if found is not None and found.then:
            self._lasting = found
        if found is None and self._lasting is not None and operation in self._lasting.then:
            return replace(self._lasting, transferred_bytes=0)
        return found

    def _check_open(self) -> None:
        if self._is_closed:
            raise InternalError("an operation was submitted to a closed engine")

    def _check_not_lost(self) -> None:
        if self._is_closed and self._pool is None:
            raise InternalError("an operation was waited for after its engine was closed")

    def _content(self, file: OpenFile) -> torch.Tensor:
        key, nbytes = os.fspath(file.path), os.fstat(file.fd).st_size
        known = self._contents.get(key)
        if known is None or known.numel() < nbytes:
            content = torch.full((nbytes,), POISON, dtype=torch.uint8)
            if known is not None:
                content[: known.numel()] = known
            self._contents[key] = content
        return self._contents[key]


class _ThreadedTicket(SimulatedTicket):
    """An operation on a thread."""

    def __init__(self, future: Future[None]) -> None:
        super().__init__(future.result)
        self._future = future

    def done(self) -> bool:
        """Ask the thread."""
        return self._future.done()


def _after(delay_seconds: float, action: Callable[[], None]) -> None:
    time.sleep(delay_seconds)
    action()


def _let_happen(ticket: SimulatedTicket) -> None:
    try:
        ticket.wait()
    except TierIOError:
        # It is told to whoever waits.
        return
