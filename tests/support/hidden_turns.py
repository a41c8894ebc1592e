"""When hidden updates run, so that what was not waited for shows: as late as they may, at once, or as it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest

from zerooffload.runtime.update_queue import UpdateQueue

THREAD_NAME = "zerooffload-update"


class Hidden(Enum):
    """When the hidden thread works."""

    LATE = "late"
    """When the thread that trains waits for it."""
    AT_ONCE = "at once"
    """On the thread that trains: there is no other to be had."""
    THREADED = "threaded"


@contextmanager
def hidden_updates(when: Hidden) -> Iterator[None]:
    """Runs inside have their hidden updates then."""
    with pytest.MonkeyPatch.context() as patch:
        if when is Hidden.AT_ONCE:
            refuse_threads(patch, THREAD_NAME)
        elif when is Hidden.LATE:
            _work_when_waited_for(patch)
        yield


def refuse_threads(patch: pytest.MonkeyPatch, *names: str) -> None:
    """No thread of these names can be started."""
    really_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name in names:
            raise RuntimeError("can't start new thread")
        really_start(thread)

    patch.setattr(threading.Thread, "start", start)


def _work_when_waited_for(patch: pytest.MonkeyPatch) -> None:
    wanted = threading.Event()
    really_work = UpdateQueue._work

    def work(queue: UpdateQueue) -> None:
        if threading.current_thread().name == THREAD_NAME:
            wanted.wait()
        really_work(queue)

    def waiting(wait: Callable[..., Any]) -> Callable[..., Any]:
        def waited(queue: UpdateQueue, *args: Any) -> Any:
            wanted.set()
            try:
                return wait(queue, *args)
            finally:
                wanted.clear()

        return waited

    patch.setattr(UpdateQueue, "_work", work)
    patch.setattr(UpdateQueue, "_wait_busy", waiting(UpdateQueue._wait_busy))
