"""A timeline of a run, while somebody listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import psutil

from zerooffload.errors import ConfigError, InternalError
from zerooffload.memory import Budget
from zerooffload.runtime.residency import Residency
from zerooffload.runtime.resources import Parts, Resources
from zerooffload.telemetry import Listener, Recorder, Timeline
from zerooffload.telemetry.recorder import CountingRecorder

PARAMETERS_IN_USE = "parameters in use"
PROCESS = "process"


@contextmanager
def watched(parts: Parts, resources: Resources, residency: Residency, listeners: Sequence[Listener]) -> Iterator[None]:
    """Hand what takes place in a block to listeners.

    The levels that they get are leased bytes of each tier by its name, those that parameters in use take of their
    window, and the process's resident memory.

    Raises
    ------
    ConfigError
        If somebody listens already.
    """
    recorder = parts.recorder
    if not isinstance(recorder, CountingRecorder):
        raise InternalError("a run whose recorder counts nothing cannot be watched")
    if isinstance(recorder.follower, Timeline):
        raise ConfigError("the model is traced already: end that before another trace of it begins")

    def stop() -> None:
        recorder.follower = Recorder()

    process = psutil.Process()
    gauges: dict[str, Callable[[], int]] = {
        **{name.value: partial(_leased_bytes, budget) for name, budget in resources.budgets.items()},
        PARAMETERS_IN_USE: lambda: residency.taken_nbytes,
        PROCESS: lambda: int(process.memory_info().rss),
    }
    timeline = recorder.follower = Timeline(parts.accelerator, listeners, gauges, stop)
    try:
        yield
    finally:
        stop()
        timeline.finish()


def _leased_bytes(budget: Budget) -> int:
    return budget.leased_bytes
