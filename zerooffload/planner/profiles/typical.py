"""A machine that nobody has measured."""

from __future__ import annotations

from zerooffload.planner.profiles.machine import DeviceSpeeds, Drive, HostSpeeds, MachineProfile


def typical_machine(*, shares_host_memory: bool) -> MachineProfile:
    """Figures of an ordinary workstation: good enough to tell which home is slower, not how long a step takes.

    Copies over PCIe 4.0 x16, two channels of DDR5, one NVMe drive on PCIe 4.0 x4, each at what it reaches in practice.
    """
    return MachineProfile(
        name="a typical workstation",
        device=DeviceSpeeds(
            memory=24 << 30,
            shares_host_memory=shares_host_memory,
            matmul_flops={"fp32": 2e13, "bf16": 1e14, "fp16": 1e14},
            memory_bandwidth=8e11,
            copy_in=2.4e10,
            copy_out=2.4e10,
        ),
        host=HostSpeeds(memory=128 << 30, cores=16, memory_bandwidth=6e10),
        drives=(Drive(path="", read=6e9, write=4e9),),
    )
