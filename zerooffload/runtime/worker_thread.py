"""A thread that lives while there is work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class WorkerThread:
    """Runs `work` behind the thread that trains, again and again while `has_work` says so.

    Parameters
    ----------
    name : str
    work : callable
        Returns when there is nothing to do.
    has_work : callable
        Asked with `changed` held.
    failed : callable
        Told what `work` raised; afterwards the thread ends.
    in_background : callable
        Makes a context in which the thread works.

    Attributes
    ----------
    changed : threading.Condition
        Guards what is to be done; notified when the thread ends. Reentrant.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        *,
        has_work: Callable[[], bool],
        failed: Callable[[BaseException], None],
        in_background: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._name = name
        self._work = work
        self._has_work = has_work
        self._failed = failed
        self._in_background = in_background
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the thread works."""
        return self._thread is not None

    def wake(self) -> None:
        """See to it that what there is to do is done."""
        with self.changed:
            if self._thread is not None or not self._has_work():
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                # The system has no thread left: it is done at once.
                self._thread = threading.current_thread()
        if self._thread is threading.current_thread():
            self._run()

    def wait_idle(self) -> None:
        """Return when the thread does nothing."""
        with self.changed:
            self.changed.wait_for(lambda: self._thread is None)

    def _run(self) -> None:
        try:
            with self._in_background():
                while True:
                    self._work()
                    with self.changed:
                        if not self._has_work():
                            self._end()
                            return
        except BaseException as error:
            with self.changed:
                try:
                    self._failed(error)
                finally:
                    self._end()
            if isinstance(error, KeyboardInterrupt):
                # Only the main thread gets it, where it is to do the work at once.
                raise

    def _end(self) -> None:
        self._thread = None
        self.changed.notify_all()


class Outcome:
    """How something ends; can be waited for."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._failure: BaseException | None = None

    def over(self, failure: BaseException | None = None) -> None:
        """It has ended: well, or with a failure."""
        self._failure = failure
        self._over.set()

    def wait(self) -> None:
        """Block until it has ended; raise what went wrong."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def done(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    @property
    def is_well(self) -> bool:
        """Whether it has, and well."""
        return self.done() and self._failure is None


class Idle:
    """That a thread does nothing; can be waited for."""

    def __init__(self, thread: WorkerThread) -> None:
        self._thread = thread

    def wait(self) -> None:
        """Block."""
        self._thread.wait_idle()

    def done(self) -> bool:
        """Whether it does nothing now."""
        return not self._thread.is_busy
