from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from zerooffload.calibration import machine_file, remembered_machine
from zerooffload.calibration.identity import HARDWARE, identity
from zerooffload.calibration.remembered import compared
from zerooffload.errors import ConfigError
from zerooffload.planner.profiles import MachineProfile, read_machine, write_machine

NOW = datetime(2030, 6, 15, tzinfo=UTC)
HERE = {"cpu": "A", "cores": "8", "memory": "64 GiB", "devices": "none", "torch": "2.9", "kernel": "6.1"}
FILE = Path("/cache/machine.json")


def profile(**values: Any) -> MachineProfile:
    device = {"memory": "24GB", "shares_host_memory": True, "matmul_flops": {"fp32": 1e12}, "memory_bandwidth": 1e11}
    host = {"memory": "64GB", "cores": 8, "memory_bandwidth": "80GB"}
    return MachineProfile.from_mapping({"name": "fake", "device": device, "host": host, **values})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine_file().parent.mkdir()
    return tmp_path


def test_the_same_machine_soon_after_is_neither_foreign_nor_stale() -> None:
    found = compared(FILE, profile(identity=HERE, measured=NOW - timedelta(days=30)), HERE, NOW)
    assert (found.foreign, found.stale) == ("", "")


def test_one_that_was_written_by_hand_has_nothing_to_be_compared() -> None:
    found = compared(FILE, profile(), HERE, NOW)
    assert (found.foreign, found.stale) == ("", "")


def test_other_hardware_is_another_machine() -> None:
    found = compared(FILE, profile(identity={**HERE, "cpu": "B", "torch": "2.8"}, measured=NOW), HERE, NOW)
    assert found.stale == ""
    assert found.foreign == (
        "the machine profile /cache/machine.json is of another machine (cpu B there, A here):"
        " run `zerooffload calibrate` on this one"
    )


def test_other_software_and_age_make_it_stale() -> None:
    measured = NOW - timedelta(days=31)
    found = compared(FILE, profile(identity={**HERE, "torch": "2.8"}, measured=measured), HERE, NOW)
    assert found.foreign == ""
    assert found.stale == (
        "the machine profile /cache/machine.json is out of date (measured 31 days ago, torch 2.8 there, 2.9 here):"
        " run `zerooffload calibrate` again"
    )


def test_a_date_without_a_zone_is_this_places() -> None:
    assert not compared(FILE, profile(measured=datetime(2030, 6, 14)), HERE, NOW).stale  # noqa: DTZ001 - that is the case
    assert compared(FILE, profile(measured=datetime(2030, 1, 1)), HERE, NOW).stale  # noqa: DTZ001


def test_the_identity_names_all_that_is_told_apart() -> None:
    here = identity()
    assert set(HARDWARE) < here.keys()
    assert all(here.values())
    assert identity() == here


def test_what_was_written_is_remembered() -> None:
    assert remembered_machine() is None
    written = profile(identity=identity(), measured=datetime.now(UTC))
    write_machine(machine_file(), written)
    found = remembered_machine()
    assert found is not None
    assert (found.profile, found.path, found.foreign, found.stale) == (written, machine_file(), "", "")
    write_machine(machine_file(), profile(identity={**identity(), "devices": "8 x B"}))
    foreign = remembered_machine()
    assert foreign is not None
    assert "devices 8 x B there" in foreign.foreign


def test_a_broken_file_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    machine_file().write_text("{")
    assert remembered_machine() is None
    assert "zerooffload calibrate" in caplog.text


def test_every_digit_survives_the_file(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    written = profile(drives=[{"path": "/a", "read": 1e9 / 3, "write": 7e8, "mixed": [{"read_part": 0.3, "rate": 1}]}])
    write_machine(file, written)
    assert read_machine(file) == written


def test_a_file_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the machine profile"):
        write_machine(tmp_path / "missing" / "m.json", profile())
