"""Memory limits and what is left of them, from trees made for the test."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from zerooffload.machine import available_host_bytes, cgroup_limit_bytes, host_memory_bytes, lockable_bytes, memory

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


def test_v2_memory_high_limits_too(root: Path, member: Path) -> None:
    member.write_text("0::/run\n")
    put(root / "run/memory.max", "5000\n")
    put(root / "run/memory.high", "4000\n")
    assert cgroup_limit_bytes(root, member) == 4000


def test_v2_beside_v1_is_mounted_one_level_down(root: Path, member: Path) -> None:
    member.write_text("4:memory:/\n0::/a\n")
    put(root / "unified/a/memory.max", "200\n")
    put(root / "a/memory.max", "1\n")
    assert cgroup_limit_bytes(root, member) == 200


def test_what_is_left_counts_the_whole_group_without_droppable_cache(root: Path, member: Path) -> None:
    member.write_text("0::/run\n")
    put(root / "run/memory.max", "10000000\n")
    put(root / "run/memory.current", "7000000\n")
    put(root / "run/memory.stat", "anon 4000000\nfile 3000000\ninactive_file 2500000\nactive_file 500000\n")
    assert available_host_bytes(root, member) == 5_500_000


def test_an_ancestor_that_is_fuller_decides(root: Path, member: Path) -> None:
    member.write_text("4:memory:/jobs/a\n")
    put(root / "memory/jobs/a/memory.limit_in_bytes", "5000000\n")
    put(root / "memory/jobs/a/memory.usage_in_bytes", "1000000\n")
    put(root / "memory/jobs/memory.limit_in_bytes", "9000000\n")
    put(root / "memory/jobs/memory.usage_in_bytes", "8500000\n")
    put(root / "memory/jobs/memory.stat", "inactive_file 1\ntotal_inactive_file 100000\n")
    assert available_host_bytes(root, member) == 600_000


def test_a_group_over_its_limit_leaves_nothing(root: Path, member: Path) -> None:
    member.write_text("0::/\n")
    put(root / "memory.max", "100\n")
    put(root / "memory.current", "400\n")
    assert available_host_bytes(root, member) == 0


def test_without_groups_the_machine_decides(root: Path, member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_host_bytes(root, member) <= psutil.virtual_memory().total
    monkeypatch.setattr(memory, "cgroup_limit_bytes", lambda: None)
    assert host_memory_bytes() == psutil.virtual_memory().total
    monkeypatch.setattr(memory, "cgroup_limit_bytes", lambda: 12345)
    assert host_memory_bytes() == 12345


@pytest.mark.parametrize(
    ("limit", "status", "left"),
    [
        (8 << 20, "VmLck:\t    1024 kB\nCapEff:\t0000000000000000\n", 7 << 20),
        (8 << 20, "VmLck:\t   16384 kB\nCapEff:\t0000000000000000\n", 0),
        (8 << 20, "VmLck:\t       0 kB\nCapEff:\t0000000000004000\n", None),
        (resource.RLIM_INFINITY, "CapEff:\t0000000000000000\n", None),
        (8 << 20, "", 8 << 20),
    ],
    ids=["some locked", "more locked than allowed", "privileged", "unlimited", "a kernel that does not tell"],
)
def test_lockable_memory(
    limit: int, status: str, left: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "status", status)
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    assert lockable_bytes() == left
