"""What the engines of the native module share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from zerooffload.aio.api import OpenFile
from zerooffload.aio.tickets import Operation, Ticket, refuse_in_child
from zerooffload.errors import InternalError
from zerooffload.native import module as _native

if TYPE_CHECKING:
    from zerooffload import _native as native_module


class NativeTicket(Ticket):
    """An operation of a native engine; owns its buffer."""

    def __init__(
        self, engine: native_module.Engine, number: int, operation: Operation, buffer: torch.Tensor | None
    ) -> None:
        super().__init__(operation)
        self._engine = engine
        self._number = number
        self._buffer = buffer

    def _ends_within(self, seconds: float) -> bool:
        try:
            self.ended_seconds = self._engine.wait(self._number, seconds)
        except _native.IoFailure as failure:
            raise self._operation.failure(failure.errno, failure.transferred) from None
        return self.ended_seconds is not None

    def _has_ended(self) -> bool:
        try:
            return self._engine.done(self._number)
        except KeyError:
            # Another thread's wait has just ended.
            return True


class NativeEngine:
    """Submits to an engine of the native module. See `Engine`."""

    name: str
    reads_devices = False

    def __init__(self, engine: native_module.Engine) -> None:
        self._engine = engine
        self._owner = os.getpid()
        self._is_closed = False

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> NativeTicket:
        """See `Engine`."""
        self._check_open()
        number = self._engine.submit_read(file.fd, offset_bytes, target.data_ptr(), target.numel())
        operation = Operation("read", file.path, offset_bytes, target.numel())
        return NativeTicket(self._engine, number, operation, target)

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> NativeTicket:
        """See `Engine`."""
        self._check_open()
        number = self._engine.submit_write(file.fd, offset_bytes, source.data_ptr(), source.numel())
        operation = Operation("write", file.path, offset_bytes, source.numel())
        return NativeTicket(self._engine, number, operation, source)

    def submit_flush(self, file: OpenFile) -> NativeTicket:
        """See `Engine`."""
        self._check_open()
        return NativeTicket(self._engine, self._engine.submit_flush(file.fd), Operation("flush", file.path), None)

    def register(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - the protocol's
        """See `Engine`; this one has no use for it."""
        self._check_open()
        return False

    def close(self) -> None:
        """See `Engine`."""
        self._is_closed = True
        self._engine.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InternalError(f"the {self.name} engine is closed")
        refuse_in_child(self._owner)
