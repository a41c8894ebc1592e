"""What a rank of a machine has of each resource."""

from __future__ import annotations

from typing import Any

import pytest

from zerooffload.planner.cost import speeds_of
from zerooffload.planner.profiles import MachineProfile, PassWork


def machine(**host: Any) -> MachineProfile:
    return MachineProfile.from_mapping(
        {
            "name": "some machine",
            "device": {
                "memory": "8GiB",
                "shares_host_memory": True,
                "matmul_flops": {"fp32": 1e11},
                "memory_bandwidth": "20GB",
                "operation_seconds": 0.001,
            },
            "host": {"memory": "8GiB", "cores": 2, "memory_bandwidth": "20GB", **host},
        }
    )


def test_a_pass_takes_products_other_operations_and_first_touches() -> None:
    work = PassWork(flops={"fp32": 3e11}, memory_bytes=40e9, num_operations=5, new_bytes=12e9)
    assert speeds_of(machine(first_touch_bandwidth="6GB")).compute_seconds(work) == pytest.approx(3 + 2 + 0.005 + 2)


def test_without_a_figure_each_core_zeroes_pages_as_cores_do() -> None:
    assert speeds_of(machine()).compute_seconds(PassWork(new_bytes=10e9)) == pytest.approx(2)


def test_a_device_with_memory_of_its_own_touches_nothing_for_the_first_time() -> None:
    device = machine().device.model_copy(update={"shares_host_memory": False, "copy_in": 1e9, "copy_out": 1e9})
    speeds = speeds_of(machine().model_copy(update={"device": device}))
    assert speeds.compute_seconds(PassWork(new_bytes=10e9)) == 0


def test_what_runs_have_taught_of_compute_counts() -> None:
    taught = machine().model_copy(update={"corrections": {"compute": 1.5}})
    assert speeds_of(taught).compute_seconds(PassWork(flops={"fp32": 1e11})) == pytest.approx(1.5)


@pytest.mark.parametrize(("shares_host", "seconds"), [(True, 0.3), (False, 0.0)])
def test_only_a_cpu_waits_for_what_a_run_does_at_a_visit(shares_host: bool, seconds: float) -> None:  # noqa: FBT001
    device = machine().device.model_copy(update={"shares_host_memory": shares_host})
    assert speeds_of(machine().model_copy(update={"device": device})).visit_seconds == pytest.approx(seconds)
