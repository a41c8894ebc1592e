"""Cores: affinity and quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerooffload.machine import cpu_quota, usable_cores


def test_usable_cores_keep_to_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 9})
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"run/cpu.max": "150000 100000\n"}, 1.5),
        ({"run/cpu.max": "max 100000\n"}, None),
        ({"run/cpu.max": "max 100000\n", "cpu.max": "400000 100000\n"}, 4.0),
        ({"cpu/a/cpu.cfs_quota_us": "50000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_tightest_quota_of_the_group_and_its_ancestors(
    files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    (tmp_path / "self").write_text("3:cpu,cpuacct:/a\n0::/run\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "self") == cores
