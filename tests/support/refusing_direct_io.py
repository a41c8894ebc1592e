"""A file system that cannot do direct I/O."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def refuse_o_direct(monkeypatch: pytest.MonkeyPatch, code: int = errno.EINVAL) -> None:
    """Let opening with O_DIRECT fail, as some file systems do."""
    really_open = os.open

    def fake_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code), path)
        return really_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", fake_open)
