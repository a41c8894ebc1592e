"""What a plan is made from: how fast a machine is, and what a model asks of it."""

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
    "read_machine",
    "typical_machine",
    "write_machine",
]
