"""Cores: affinity and quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerooffload.machine import core_share, cores, cpu_quota, usable_cores


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


def machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, num_cores: int, nodes: list[str], affinity: set[int]
) -> Path:
    """Hyperthreads are cores i and i + num_cores; the nodes' cpulists as the kernel writes them."""
    for core in range(2 * num_cores):
        path = folder / f"cpu/cpu{core}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{core % num_cores},{core % num_cores + num_cores}\n")
    (folder / "cpu/online").write_text(f"0-{2 * num_cores - 1}\n")
    for number, cpus in enumerate(nodes):
        (folder / f"node/node{number}").mkdir(parents=True)
        (folder / f"node/node{number}/cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(cores, "affinity", lambda: sorted(affinity))
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    return folder


def test_one_rank_has_a_thread_for_each_physical_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = machine(tmp_path, monkeypatch, num_cores=4, nodes=["0-7"], affinity=set(range(8)))
    share = core_share(0, 1, topology)
    assert (sorted(share.cores), share.num_threads, share.nodes) == (list(range(8)), 4, (0,))


def test_ranks_divide_the_machine_by_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = machine(tmp_path, monkeypatch, num_cores=4, nodes=["0-1,4-5", "2-3,6-7"], affinity=set(range(8)))
    shares = [core_share(rank, 2, topology) for rank in range(2)]
    assert [sorted(share.cores) for share in shares] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [share.nodes for share in shares] == [(0,), (1,)]
    assert [share.num_threads for share in shares] == [2, 2]


def test_no_core_is_given_twice_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = machine(tmp_path, monkeypatch, num_cores=8, nodes=["0-3,8-11", "4-7,12-15"], affinity=set(range(16)))
    for world_size in range(1, 9):
        given = [core for rank in range(world_size) for core in core_share(rank, world_size, topology).cores]
        assert sorted(given) == list(range(16))


def test_ranks_that_are_bound_already_keep_their_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = machine(tmp_path, monkeypatch, num_cores=4, nodes=["0-7"], affinity={2, 6})
    assert core_share(1, 4, topology).cores == (2, 6)


def test_more_ranks_than_cores_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = machine(tmp_path, monkeypatch, num_cores=2, nodes=["0-3"], affinity=set(range(4)))
    shares = [core_share(rank, 3, topology) for rank in range(3)]
    assert all(share.num_threads == 1 and share.cores for share in shares)


def test_the_quota_limits_threads_and_not_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = machine(tmp_path, monkeypatch, num_cores=8, nodes=["0-15"], affinity=set(range(16)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: 5.0)
    assert core_share(0, 1, topology).num_threads == 5
    assert core_share(0, 2, topology).num_threads == 3


def test_a_machine_that_tells_nothing_has_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "affinity", lambda: [0, 1])
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    share = core_share(0, 1, tmp_path)
    assert (share.cores, share.num_threads, share.nodes) == ((0, 1), 2, (0,))
