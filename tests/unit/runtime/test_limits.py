"""The bounds that a run plans with, on machines of several sizes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

import zerooffload as zo
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.formats import GIB, MIB
from zerooffload.runtime import resources
from zerooffload.runtime.resources import Limits, limits_of


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(resources, "host_memory_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(resources, "available_host_bytes", lambda: 12 * GIB)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return monkeypatch


def limits(**settings: object) -> Limits:
    return limits_of(zo.OffloadConfig(**settings), CpuAccelerator())


@pytest.mark.usefixtures("machine")
def test_three_quarters_of_what_is_available() -> None:
    assert limits().host_bytes == 9 * GIB


def test_ranks_of_a_machine_share(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setenv("LOCAL_WORLD_SIZE", "4")
    machine.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100 * GIB}))
    found = limits(nvme_paths=tmp_path, params="nvme")
    assert found.host_bytes == int(0.75 * 12 * GIB) // 4
    assert found.nvme_bytes == 25 * GIB


def test_paths_on_one_drive_count_its_space_once(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100 * GIB}))
    for name in "ab":
        (tmp_path / name).mkdir()
    assert limits(nvme_paths=[tmp_path / "a", tmp_path / "b"], params="nvme").nvme_bytes == 100 * GIB


@pytest.mark.usefixtures("machine")
def test_more_than_the_machine_has_is_told_and_not_planned_with(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zerooffload"):
        assert limits(host_memory="64GiB").host_bytes == 16 * GIB
    assert "64.00 GiB" in caplog.text
    assert "16.00 GiB" in caplog.text
    caplog.clear()
    assert limits(host_memory="8GiB").host_bytes == 8 * GIB
    assert not caplog.records


def test_a_plan_for_more_than_is_left_now_is_told(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.setattr(resources, "available_host_bytes", lambda: 1 * MIB)
    machine.setattr(resources, "process_resident_bytes", lambda: 1 * MIB)
    model = torch.nn.Linear(1024, 1024)
    with caplog.at_level(logging.WARNING, "zerooffload"):
        zo.offload(model, zo.OffloadConfig(host_memory="64MiB", threads=1))
    zo.close(model)
    assert "only 2.00 MiB can be had now" in caplog.text
