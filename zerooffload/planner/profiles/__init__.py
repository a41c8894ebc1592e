"""What a plan is made from: how fast a machine is, and what a model asks of it."""

from zerooffload.planner.profiles.cluster import cluster_of
from zerooffload.planner.profiles.machine import (
    DeviceSpeeds,
    Drive,
    HostSpeeds,
    MachineProfile,
    MixedRate,
    read_machine,
    write_machine,
)
from zerooffload.planner.profiles.model import ModelProfile, PassWork, UnitWork
from zerooffload.planner.profiles.published import find_machine, published_machines
from zerooffload.planner.profiles.typical import typical_machine

__all__ = [
    "DeviceSpeeds",
    "Drive",
    "HostSpeeds",
    "MachineProfile",
    "MixedRate",
    "ModelProfile",
    "PassWork",
    "UnitWork",
    "cluster_of",
    "find_machine",
    "published_machines",
    "read_machine",
    "typical_machine",
    "write_machine",
]
