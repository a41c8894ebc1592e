"""Measurements take turns, so that whatever else the machine does meanwhile disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Progress = Callable[[str, float], None]
"""Is told what is measured next, and which part of all is done, 0 to 1."""


@dataclass(frozen=True)
class Figure:
    """Something to be measured.

    Attributes
    ----------
    name : str
        Of the profile's field: "host.memory_bandwidth", "drives.0.read".
    turn : Callable[[float], float]
        Measures it for about that many seconds.
    seconds : float
        Of each turn.
    """

    name: str
    turn: Callable[[float], float]
    seconds: float


def take_turns(figures: Sequence[Figure], rounds: int, progress: Progress) -> dict[str, list[float]]:
    """Round robin; each round begins with another figure. What each turn measured, by the figure's name."""
    samples: dict[str, list[float]] = {figure.name: [] for figure in figures}
    all_seconds = rounds * sum(figure.seconds for figure in figures)
    done_seconds = 0.0
    for number in range(rounds):
        first = number % len(figures)
        for figure in (*figures[first:], *figures[:first]):
            progress(figure.name, done_seconds / all_seconds)
            samples[figure.name].append(figure.turn(figure.seconds))
            done_seconds += figure.seconds
    return samples


def repeated(work: Callable[[], object], seconds: float, finish: Callable[[], None] = lambda: None) -> float:
    """How often a second `work` can be done, tried for about that many seconds.

    Parameters
    ----------
    finish : Callable
        Waits for what `work` has begun. It is called seldom, so that a device always has something to do.
    """
    start, num_done, batch = time.perf_counter(), 0, 1
    while True:
        for _ in range(batch):
            work()
        finish()
        num_done += batch
        took = time.perf_counter() - start
        if took >= seconds:
            return num_done / took
        # Twice as many each time, and no more than the time is left for.
        batch = max(1, min(num_done, round((seconds - took) / took * num_done)))
