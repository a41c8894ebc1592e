from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from support.calibrations import SHORT

from zerooffload.calibration import calibrate, machine_file, measure, remembered_machine
from zerooffload.cli import app
from zerooffload.cli import calibrate as command
from zerooffload.planner.profiles import MachineProfile, read_machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "calibrate", partial(calibrate, effort=SHORT))


def test_it_shows_every_figure_and_keeps_the_profile(run: Callable[..., tuple[int, str, str]], nvme: Path) -> None:
    code, out, err = run("calibrate", "--path", nvme)
    assert (code, err) == (0, "")
    found = remembered_machine()
    assert found is not None
    assert (found.foreign, found.stale) == ("", "")
    assert out.count("+-") == len(found.profile.spread)
    shown = out.replace("\n", "").replace("MFLOP", "GFLOP").replace("MB/s", "GB/s")
    for words in ("matrix products, bf16", "GFLOP/s", "checksums", f"drive: {nvme}", "25% reads", " GB/s", " us "):
        assert words in shown, words
    assert f"profile written to {machine_file()}" in shown


@pytest.mark.parametrize("busy_cores", [1.5, 0.0])
def test_other_programs_that_are_busy_meanwhile_are_told(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, busy_cores: float
) -> None:
    monkeypatch.setattr(measure.OtherPrograms, "busy_cores", lambda _: busy_cores)
    _, out, _ = run("calibrate")
    profile = read_machine(machine_file())
    assert profile.busy_cores == busy_cores
    told = f"other programs kept 1.5 of {profile.host.cores} cores busy meanwhile: end them, then calibrate again"
    assert (told in " ".join(out.split())) == (busy_cores > 0)


def test_json_is_the_profile(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    code, out, err = run("calibrate", "--output", file, "--json")
    assert (code, err) == (0, "")
    assert MachineProfile.from_mapping(json.loads(out)) == read_machine(file)
    assert not machine_file().exists()


def test_without_a_path_it_says_what_is_missing(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    _, out, _ = run("calibrate", "--output", tmp_path / "here.json")
    assert "no drive was measured" in out


@pytest.mark.parametrize(
    ("output", "words"), [("machine.toml", "ends in .json"), ("missing/machine.json", "is not a folder")]
)
def test_a_wrong_output_is_refused_before_anything_is_measured(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, output: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "calibrate", lambda *_, **__: pytest.fail("measured"))
    code, _, err = run("calibrate", "--output", tmp_path / output)
    assert code == app.EXIT_USER_ERROR
    assert words in err


@pytest.mark.usefixtures("wrong_target")
def test_a_target_that_is_not_there_is_told_before_anything_is_measured(
    run: Callable[..., tuple[int, str, str]], nvme: Path
) -> None:
    code, out, err = run("calibrate", "--path", nvme)
    assert (code, out) == (app.EXIT_USER_ERROR, "")
    assert "ZEROOFFLOAD_CPU_TARGET='avx9' is not a CPU target of this build and this CPU: set it to one of" in err
    assert not machine_file().exists()


def test_ctrl_c_ends_it_without_a_profile(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "calibrate", interrupt)
    code, _, err = run("calibrate")
    assert (code, err) == (app.EXIT_INTERRUPTED, "interrupted: ended cleanly\n")
    assert not machine_file().exists()
