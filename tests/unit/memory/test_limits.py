"""The cgroup's memory limit, from trees made for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerooffload.memory import available_host_bytes, cgroup_limit_bytes, limits

NO_LIMIT_V1 = "9223372036854771712\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


@pytest.fixture
def member(tmp_path: Path) -> Path:
    return tmp_path / "self"


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_v2_takes_the_tightest_of_the_group_and_its_ancestors(root: Path, member: Path) -> None:
    member.write_text("0::/user/run\n")
    put(root / "memory.max", "max\n")
    put(root / "user/memory.max", "1000\n")
    put(root / "user/run/memory.max", "5000\n")
    put(root / "other/memory.max", "1\n")
    assert cgroup_limit_bytes(root, member) == 1000


def test_v2_without_any_limit_has_none(root: Path, member: Path) -> None:
    member.write_text("0::/run\n")
    put(root / "run/memory.max", "max\n")
    assert cgroup_limit_bytes(root, member) is None


def test_v2_in_a_namespace_finds_the_limit_at_the_root(root: Path, member: Path) -> None:
    member.write_text("0::/\n")
    put(root / "memory.max", "777\n")
    assert cgroup_limit_bytes(root, member) == 777


def test_v1_reads_the_memory_controller_alone(root: Path, member: Path) -> None:
    member.write_text("5:cpu,cpuacct:/a\n4:memory:/jobs/a\n1:name=systemd:/a\n")
    put(root / "memory/jobs/a/memory.limit_in_bytes", "4096\n")
    put(root / "memory/memory.limit_in_bytes", NO_LIMIT_V1)
    put(root / "cpu,cpuacct/a/memory.limit_in_bytes", "1\n")
    assert cgroup_limit_bytes(root, member) == 4096


def test_v1_without_a_limit_writes_a_huge_number(root: Path, member: Path) -> None:
    member.write_text("4:memory:/\n")
    put(root / "memory/memory.limit_in_bytes", NO_LIMIT_V1)
    assert cgroup_limit_bytes(root, member) is None


def test_a_hybrid_takes_the_tighter(root: Path, member: Path) -> None:
    member.write_text("4:memory:/a\n0::/a\n")
    put(root / "memory/a/memory.limit_in_bytes", "300\n")
    put(root / "a/memory.max", "200\n")
    assert cgroup_limit_bytes(root, member) == 200


def test_no_cgroups_mean_no_limit(root: Path, member: Path) -> None:
    assert cgroup_limit_bytes(root, member) is None


def test_a_group_outside_the_namespace_still_has_the_roots_limit(root: Path, member: Path) -> None:
    member.write_text("0::/../elsewhere\n")
    put(root / "memory.max", "555\n")
    assert cgroup_limit_bytes(root, member) == 555


def test_available_memory_keeps_to_the_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cgroup_limit_bytes", lambda: None)
    machine = available_host_bytes()
    assert machine > 0
    monkeypatch.setattr(limits, "cgroup_limit_bytes", lambda: 1 << 62)
    assert available_host_bytes() == pytest.approx(machine, rel=0.2)
    used = limits.psutil.Process().memory_info().rss
    monkeypatch.setattr(limits, "cgroup_limit_bytes", lambda: used + (1 << 20))
    assert available_host_bytes() < 64 << 20
