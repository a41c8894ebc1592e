"""Several machines of one kind that train together, as one large machine."""

from __future__ import annotations

from zerooffload.errors import ConfigError
from zerooffload.planner.profiles.machine import Drive, MachineProfile


def cluster_of(machine: MachineProfile, num_machines: int) -> MachineProfile:
    """So many of these machines: each rank has what it had, but gathers over the network too.

    A ring over all ranks goes through each machine's network once in each direction, so a gather is as fast as the
    slower of the two: the links inside a machine, and the network of a machine.

    Raises
    ------
    ConfigError
        If there is no machine, or the profile tells no network.
    """
    if num_machines < 1:
        raise ConfigError(f"a cluster needs machines, got {num_machines}")
    if num_machines == 1:
        return machine
    if machine.network is None:
        raise ConfigError(f"the profile of {machine.name} tells no network (bytes a second between machines)")
    device, host = machine.device, machine.host
    inside = device.gather or device.copy_in or machine.network
    larger_host = {
        "memory": host.memory * num_machines,
        "cores": host.cores * num_machines,
        "memory_bandwidth": host.memory_bandwidth * num_machines,
        "update_bandwidth": host.update_bandwidth and host.update_bandwidth * num_machines,
    }
    together = {"count": device.count * num_machines, "gather": min(inside, machine.network)}
    return machine.model_copy(
        update={
            "name": f"{num_machines} x {machine.name}",
            "num_machines": num_machines * machine.num_machines,
            "device": device.model_copy(update=together),
            "host": host.model_copy(update=larger_host),
            "drives": tuple(_of_machine(drive, number) for number in range(num_machines) for drive in machine.drives),
        }
    )


def _of_machine(drive: Drive, number: int) -> Drive:
    return drive.model_copy(update={"name": f"{drive.name} of machine {number}"})
