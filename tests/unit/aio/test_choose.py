from __future__ import annotations

import errno
import json
import logging
import os
import platform
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from zerooffload import ConfigError, native
from zerooffload.aio import choose_engine, uring
from zerooffload.aio import measure as measuring
from zerooffload.aio.choose import ChosenEngine, _why_not
from zerooffload.aio.setups import SETUPS, Setup

needs_native = pytest.mark.skipif(not native.available, reason="no native module")
needs_uring = pytest.mark.skipif(bool(_why_not("uring")), reason=_why_not("uring") or "it works")
RING, RING_OF_LONG_PIECES, THREADS, THREADS_AND_PIECES = SETUPS


def choose(name: str = "auto", folder: Path | None = None, *, measure_again: bool = False) -> ChosenEngine:
    """The choice, with its engine closed."""
    chosen = choose_engine(name, folder, measure_again=measure_again)
    chosen.engine.close()
    return chosen


@pytest.fixture
def _without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(native, "why_unavailable", "left out by the test")


@pytest.fixture
def _without_uring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(uring, "try_uring", refuse)
    monkeypatch.setattr(uring, "_DISABLED", tmp_path / "no such setting")


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[Setup]]]:
    """Scripts what is measured; returns a list that gets what was to be measured, each time."""

    def script(*values: float) -> list[list[Setup]]:
        asked: list[list[Setup]] = []

        def measure(_folder: Path, setups: Iterable[Setup]) -> dict[Setup, float]:
            asked.append(list(setups))
            return {setup: rate for setup, rate in zip(SETUPS, values, strict=True) if setup in asked[-1]}

        monkeypatch.setattr(measuring, "measure", measure)
        return asked

    return script


@needs_uring
def test_without_a_folder_the_ring_is_taken_where_it_works() -> None:
    chosen = choose()
    assert (chosen.engine.name, chosen.reason) == ("uring", "io_uring works here")


@needs_native
@pytest.mark.usefixtures("_without_uring")
def test_where_it_does_not_the_threads_are_and_say_why() -> None:
    chosen = choose()
    assert chosen.engine.name == "threads"
    assert "seccomp" in chosen.reason


@pytest.mark.parametrize(
    "name",
    [pytest.param("uring", marks=needs_uring), pytest.param("threads", marks=needs_native), "aiofiles"],
)
def test_an_engine_can_be_forced(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zerooffload"):
        chosen = choose(name, tmp_path)
    assert (chosen.engine.name, chosen.reason) == (name, "forced by name")
    assert caplog.records == []


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zerooffload"):
        choose("aiofiles")
    assert [record.getMessage() for record in caplog.records] == ["I/O engine: aiofiles (forced by name)"]


@pytest.mark.usefixtures("_without_native")
def test_without_the_native_module_the_fallback_knows_its_reason(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        chosen = choose("auto", folder)
        assert chosen.engine.name == "aiofiles"
        assert "left out by the test" in chosen.reason


@pytest.mark.usefixtures("_without_native")
@pytest.mark.parametrize("name", ["uring", "threads"])
def test_a_forced_engine_never_falls_back(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' was forced.*left out by the test.*'aiofiles'"):
        choose_engine(name)


@needs_native
@pytest.mark.usefixtures("_without_uring")
def test_a_forced_ring_never_falls_back() -> None:
    with pytest.raises(ConfigError, match=r"'uring' was forced.*seccomp.*Use 'auto' or 'threads' or 'aiofiles'"):
        choose_engine("uring")


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'libaio'.*auto, uring, threads, aiofiles or kvikio"):
        choose_engine("libaio")


@pytest.mark.parametrize(
    ("code", "setting", "words"),
    [
        (errno.EPERM, "2", "setting is 2"),
        (errno.EPERM, "0", "seccomp"),
        (errno.EACCES, "", "seccomp"),
        (errno.ENOSYS, "", "Linux before 5.7"),
        (errno.ENOMEM, "", "ulimit -l"),
        (errno.EMFILE, "", "Too many open files"),
    ],
)
def test_why_there_is_no_ring(
    code: int, setting: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring, "_DISABLED", tmp_path / "setting")
    if setting:
        (tmp_path / "setting").write_text(f"{setting}\n")
    assert words in uring.why_unavailable(OSError(code, os.strerror(code)))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOMEM, "locked memory"),
        (errno.ENOSPC, "more ranges"),
        (errno.EINVAL, "Linux 5.19"),
        (errno.EFAULT, "Bad address"),
    ],
)
def test_why_memory_is_not_registered(code: int, words: str) -> None:
    assert words in uring._why_unregistered(code)


@needs_uring
def test_of_the_fastest_the_preferred_is_taken(rates: Callable[..., list[list[Setup]]], tmp_path: Path) -> None:
    for values, expected in (
        ((1e9, 1e9, 1e9, 1e9), RING),
        ((0.96e9, 0.9e9, 1e9, 0.9e9), RING),
        ((0.9e9, 0.96e9, 1e9, 0.9e9), RING_OF_LONG_PIECES),
        ((0.9e9, 0.9e9, 1e9, 0.9e9), THREADS),
        ((0.1e9, 0.2e9, 0.3e9, 0.4e9), THREADS_AND_PIECES),
    ):
        asked = rates(*values)
        chosen = choose("auto", tmp_path, measure_again=True)
        assert asked == [list(SETUPS)]
        assert chosen.engine.name == expected.engine
        assert chosen.reason.endswith(str(expected))
        assert chosen.rates == {"uring": max(values[:2]), "threads": max(values[2:])}
        assert f"uring {max(values[:2]) / 1e6:.0f} MB/s" in chosen.reason


@needs_native
@pytest.mark.usefixtures("_without_uring")
def test_what_does_not_work_is_not_measured(rates: Callable[..., list[list[Setup]]], tmp_path: Path) -> None:
    asked = rates(1e9, 1e9, 1e9, 1e9)
    chosen = choose("auto", tmp_path)
    assert asked == [[THREADS, THREADS_AND_PIECES]]
    assert chosen.engine.name == "threads"
    assert "seccomp" in chosen.reason


@needs_uring
def test_a_drive_is_measured_once(
    rates: Callable[..., list[list[Setup]]], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = rates(0.1e9, 0.1e9, 1e9, 0.1e9)
    first = choose("auto", tmp_path)
    another_folder = tmp_path / "another"
    another_folder.mkdir()
    second = choose("auto", another_folder)
    assert len(asked) == 1
    assert first.engine.name == second.engine.name == "threads"
    assert first.rates == second.rates
    file = cache / "zerooffload" / "io_engines.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    monkeypatch.setattr(platform, "release", lambda: "another kernel")
    choose("auto", tmp_path)
    assert len(asked) == 2
    choose("auto", tmp_path, measure_again=True)
    assert len(asked) == 3


@needs_native
def test_what_was_remembered_of_a_ring_is_of_no_use_without_it(
    rates: Callable[..., list[list[Setup]]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    asked = rates(1e9, 1e9, 1e9, 1e9)
    choose("auto", tmp_path)
    request.getfixturevalue("_without_uring")
    assert choose("auto", tmp_path).engine.name == "threads"
    assert asked[-1] == [THREADS, THREADS_AND_PIECES]


@needs_native
@pytest.mark.parametrize(
    "broken",
    [
        "",
        "not JSON",
        "[" * 100_000,
        "[]",
        '{"DRIVE": 3}',
        '{"DRIVE": {"warp 9 4096": 1.0}}',
        '{"DRIVE": {"threads 4 1073741824": "fast"}}',
        '{"DRIVE": {"threads 4 1073741824": -1.0}}',
        '{"DRIVE": {"threads 4 1073741824": NaN}}',
        b"\xff\xfe",
    ],
    ids=range(10),
)
def test_a_broken_memory_is_replaced(
    rates: Callable[..., list[list[Setup]]], tmp_path: Path, cache: Path, broken: str | bytes
) -> None:
    asked = rates(1e9, 1e9, 1e9, 1e9)
    choose("auto", tmp_path)
    file = cache / "zerooffload" / "io_engines.json"
    (drive,) = json.loads(file.read_text())
    file.write_bytes(broken if isinstance(broken, bytes) else broken.replace("DRIVE", drive).encode())
    choose("auto", tmp_path)
    assert len(asked) == 2
    choose("auto", tmp_path)
    assert len(asked) == 2


@needs_native
def test_without_a_place_to_remember_it_is_measured_each_time(
    rates: Callable[..., list[list[Setup]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    asked = rates(1e9, 1e9, 1e9, 1e9)
    choose("auto", tmp_path)
    choose("auto", tmp_path)
    assert len(asked) == 2


@needs_native
def test_it_really_measures_and_leaves_nothing(nvme: Path) -> None:
    chosen = choose("auto", nvme)
    assert chosen.engine.name in ("uring", "threads")
    assert str(nvme) in chosen.reason


@needs_native
def test_a_folder_that_cannot_be_measured_is_no_obstacle(tmp_path: Path) -> None:
    chosen = choose("auto", tmp_path / "missing")
    assert chosen.engine.name == choose().engine.name
    assert "nothing could be measured" in chosen.reason
    assert chosen.rates == {}


@needs_native
def test_a_slow_drive_leaves_nothing_to_choose(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_FILL_SECONDS", -1.0)
    for _ in range(2):
        chosen = choose("auto", nvme)
        assert chosen.engine.name == choose().engine.name
        assert "slower than any engine" in chosen.reason
