"""What this process may take of the machine: memory and cores, as its kernel and control groups say; and a cache."""

from zerooffload.machine.cache_folder import cache_folder
from zerooffload.machine.cores import (
    CoreShare,
    core_share,
    cpu_quota,
    ranks_of_this_machine,
    this_ranks_cores,
    usable_cores,
)
from zerooffload.machine.memory import available_host_bytes, cgroup_limit_bytes, host_memory_bytes, lockable_bytes

__all__ = [
    "CoreShare",
    "available_host_bytes",
    "cache_folder",
    "cgroup_limit_bytes",
    "core_share",
    "cpu_quota",
    "host_memory_bytes",
    "lockable_bytes",
    "ranks_of_this_machine",
    "this_ranks_cores",
    "usable_cores",
]
