"""What stands in for a part in tests has all that the part's protocol names: else it fails far from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.durable_training import real_environment
from support.killed import Moments, WatchedEngine
from support.recording_engine import Log, RecordingEngine
from support.simulated_accelerator import SimulatedAccelerator
from support.simulated_engine import SimulatedEngine
from support.straight_reads import StraightEngine

from zerooffload.accelerator import Accelerator
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.aio import Engine, choose_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ENGINES: dict[str, Callable[[Path], Engine]] = {
    "the product's": lambda _: choose_engine().engine,
    "aiofiles": lambda _: choose_engine("aiofiles").engine,
    "simulated": lambda _: SimulatedEngine(),
    "straight": lambda _: StraightEngine(SimulatedAccelerator()),
    "recording": lambda path: RecordingEngine(Log(path)),
    "watched": lambda _: WatchedEngine(SimulatedEngine(), Moments(None)),
    "unflushed": lambda _: real_environment().open_engine(),
}


def test_it_finds_what_is_missing() -> None:
    class Half:
        name = "half"

        def submit_read(self) -> None: ...

    assert missing(Half(), Engine) == {"reads_devices", "submit_write", "submit_flush", "register", "close"}


@pytest.mark.parametrize("name", ENGINES)
def test_engines(name: str, tmp_path: Path) -> None:
    engine = ENGINES[name](tmp_path)
    try:
        assert not missing(engine, Engine)
    finally:
        engine.close()


@pytest.mark.parametrize("accelerator", [CpuAccelerator(), SimulatedAccelerator()])
def test_accelerators(accelerator: Accelerator) -> None:
    assert not missing(accelerator, Accelerator)


def missing(part: object, protocol: Any) -> set[str]:
    """Names of the protocol that the part lacks."""
    return {name for name in _names(protocol) if not hasattr(part, name)}


def _names(protocol: Any) -> Iterator[str]:
    for name in [*protocol.__annotations__, *vars(protocol)]:
        if not name.startswith("_"):
            yield name
