"""Fetches that wait for updates, with parts that only keep count."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from zerooffload.accelerator.cpu import PassedEvent
from zerooffload.runtime.fetch import Fetcher
from zerooffload.telemetry import Recorder, Waits


class Updates:
    """Homes of none, then of all."""

    are_home = False

    def is_home(self, _: object) -> bool:
        return self.are_home

    def wait(self, _: object) -> None:
        self.are_home = True

    def giving_way(self) -> AbstractContextManager[None]:
        return nullcontext()


class Device:
    """One with memory of its own."""

    shares_host_memory = False
    copy_in = SimpleNamespace(wait=lambda _: None)
    compute = copy_in


class Home:
    """Of one record on a file."""

    name = "home"
    layout = SimpleNamespace(
        num_chunks=1, record_offset=lambda _: 0, file_nbytes=lambda _: 8, record_nbytes=lambda _: 8
    )

    def __init__(self) -> None:
        self.num_reads = 0

    def view(self, *_: object) -> None:
        return None

    def read(self, _chunk: int, _target: torch.Tensor) -> PassedEvent:
        self.num_reads += 1
        return PassedEvent()


class Ring:
    """With room for everything."""

    def has_room(self, _: int) -> bool:
        return True

    def acquire(self, _: object) -> Any:
        return SimpleNamespace(take=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))

    def release(self, *_: object) -> None:
        pass


def far_unit() -> Any:
    memory = SimpleNamespace(tensor=torch.zeros(8, dtype=torch.uint8), fill=lambda: None)
    part = SimpleNamespace(home=Home(), range=memory, shard_of=lambda tensor: tensor)
    return SimpleNamespace(moving_parts=[part], parts=[part])


def test_fetches_whose_updates_come_home_together_begin_once_each() -> None:
    updates = Updates()
    transfers = SimpleNamespace(copy_in=lambda *_: PassedEvent())
    fetcher = Fetcher(Device(), transfers, Ring(), Waits(Recorder()), updates)  # type: ignore[arg-type]
    units = [far_unit() for _ in range(3)]
    fetches = [fetcher.start(unit, PassedEvent()) for unit in units]
    assert [unit.parts[0].home.num_reads for unit in units] == [0, 0, 0]
    updates.are_home = True
    for fetch in fetches:
        fetcher.finish(fetch)
    assert [unit.parts[0].home.num_reads for unit in units] == [1, 1, 1]


def test_the_first_of_several_that_is_waited_for_begins_once() -> None:
    updates = Updates()
    transfers = SimpleNamespace(copy_in=lambda *_: PassedEvent())
    fetcher = Fetcher(Device(), transfers, Ring(), Waits(Recorder()), updates)  # type: ignore[arg-type]
    units = [far_unit() for _ in range(3)]
    first, *_ = [fetcher.start(unit, PassedEvent()) for unit in units]
    fetcher.finish(first)
    fetcher.advance()
    assert [unit.parts[0].home.num_reads for unit in units] == [1, 1, 1]
