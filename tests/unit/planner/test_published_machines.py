from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zerooffload.errors import ConfigError
from zerooffload.planner.cost import speeds_of
from zerooffload.planner.profiles import cluster_of, find_machine, published_machines

if TYPE_CHECKING:
    from pathlib import Path


def test_profiles_of_published_machines_come_with_the_package() -> None:
    assert published_machines() == ["4x-rtx4090", "dgx2", "rtx4090"]
    assert [find_machine(name).name for name in published_machines()] == published_machines()
    assert [find_machine(name).device.count for name in published_machines()] == [4, 16, 1]


def test_a_machine_is_also_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(find_machine("dgx2").model_dump_json())
    assert find_machine(str(file)) == find_machine("dgx2")
    with pytest.raises(ConfigError, match=r"cannot read the machine profile .*yours\.toml"):
        find_machine(str(tmp_path / "yours.toml"))


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no machine profile 'dgx3': .* 4x-rtx4090, dgx2, rtx4090"):
        find_machine("dgx3")


def test_ranks_of_a_cluster_have_what_those_of_a_machine_have_but_gather_over_the_network() -> None:
    machine = find_machine("dgx2")
    cluster = cluster_of(machine, 8)
    assert (cluster.device.count, len(cluster.drives), cluster.num_machines) == (128, 64, 8)
    alone, together = speeds_of(machine), speeds_of(cluster)
    for rate in ("read", "write", "drive_mix", "copy_in", "copy_out", "host_memory", "kernel", "num_cores"):
        assert getattr(together, rate) == pytest.approx(getattr(alone, rate), rel=1e-12), rate
    assert (alone.gather, together.gather) == (150e9, 80e9)
    assert cluster_of(machine, 1) == machine


def test_a_cluster_needs_machines_and_a_network() -> None:
    with pytest.raises(ConfigError, match="a cluster needs machines, got 0"):
        cluster_of(find_machine("dgx2"), 0)
    with pytest.raises(ConfigError, match="profile of rtx4090 tells no network"):
        cluster_of(find_machine("rtx4090"), 2)
