"""Tests in which nobody cuts the power need no flush, and flushes take much of their time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def without_fsync() -> Iterator[None]:
    """Files that the engine has no part in are not flushed. Around threads that do the same, for the same time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
