"""A machine as one of its ranks sees it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zerooffload.errors import ConfigError
from zerooffload.planner.profiles import Drive, MachineProfile, PassWork

_FIRST_TOUCH_OF_A_CORE = 2.5e9
_OPERATIONS_OF_A_VISIT = 300
"""Of a run on a CPU: a model of 9 units so small that nothing else counts takes 0.6 ms more a visit than without a run,
where an empty operation takes 1.9 us."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What a rank has of each resource: of what the ranks of a machine share, its part. Bytes a second.

    Attributes
    ----------
    drive_mix : float
        How much faster, or slower, half a gigabyte read and half written are together than one after the other.
    copy_mix : float
        The same of copies in both directions.
    """

    machine: MachineProfile
    read: float
    write: float
    drive_mix: float
    copy_in: float
    copy_out: float
    copy_mix: float
    gather: float
    host_memory: float
    kernel: float
    first_touch: float
    checksum: float
    num_cores: float

    def compute_seconds(self, work: PassWork) -> float:
        """What a pass takes on the device.

        Raises
        ------
        ConfigError
            If the machine's profile has no rate for a dtype.
        """
        device, rates = self.machine.device, self._matmul_rates
        missing = sorted(work.flops.keys() - rates.keys())
        if missing:
            raise ConfigError(
                f"the profile of {self.machine.name} has no rate of matrix products in {missing[0]}: add it to"
                " device.matmul_flops, or run zerooffload calibrate"
            )
        products = sum(flops / rates[name] for name, flops in work.flops.items())
        others = work.memory_bytes / device.memory_bandwidth + work.num_operations * device.operation_seconds
        first_touches = work.new_bytes / self.first_touch if device.shares_host_memory else 0.0
        return self.corrected("compute", products + others + first_touches)

    @cached_property
    def _matmul_rates(self) -> Mapping[str, float]:
        return {str(name): rate for name, rate in self.machine.device.matmul_flops.items()}

    @property
    def visit_seconds(self) -> float:
        """What a run does in Python at each visit of a unit. A device computes meanwhile; a CPU does it in between."""
        device = self.machine.device
        return _OPERATIONS_OF_A_VISIT * device.operation_seconds if device.shares_host_memory else 0.0

    def corrected(self, resource: str, seconds: float) -> float:
        """As runs have taught."""
        return seconds * self.machine.corrections.get(resource, 1.0)


def speeds_of(machine: MachineProfile) -> Speeds:
    """What each of its ranks has."""
    device, host, ranks = machine.device, machine.host, machine.device.count
    # A copy in host memory reads and writes it.
    copy_in, copy_out = device.copy_in or host.memory_bandwidth / 2, device.copy_out or host.memory_bandwidth / 2
    both = device.copy_both or copy_in + copy_out
    return Speeds(
        machine=machine,
        read=sum(drive.read for drive in machine.drives) / ranks,
        write=sum(_write(drive) for drive in machine.drives) / ranks,
        drive_mix=_drive_mix(machine.drives),
        copy_in=copy_in,
        copy_out=copy_out,
        copy_mix=(1 / copy_in + 1 / copy_out) / (2 / both),
        gather=device.gather or copy_in,
        host_memory=host.memory_bandwidth / ranks,
        kernel=(host.update_bandwidth or host.memory_bandwidth) / ranks,
        first_touch=(host.first_touch_bandwidth or _FIRST_TOUCH_OF_A_CORE * host.cores) / ranks,
        checksum=host.checksum_bandwidth,
        num_cores=host.cores / ranks,
    )


def _write(drive: Drive) -> float:
    return min(drive.write, drive.sustained_write or drive.write)


def _drive_mix(drives: tuple[Drive, ...]) -> float:
    """In time: that of the drives together, weighted by what each moves."""
    if not drives:
        return 1.0
    weights = [even_rate(drive) for drive in drives]
    return sum(
        weight * even_rate(drive) * (1 / drive.read + 1 / _write(drive)) / 2
        for weight, drive in zip(weights, drives, strict=True)
    ) / sum(weights)


def even_rate(drive: Drive) -> float:
    """Bytes a second of a drive, read and written alike: what was measured nearest to that, or in turns."""
    if not drive.mixed:
        return 2 / (1 / drive.read + 1 / _write(drive))
    return min(drive.mixed, key=lambda mixed: abs(mixed.read_part - 0.5)).rate
