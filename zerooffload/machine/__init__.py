"""The machine: what this process may take of its memory and cores, what a folder is on; and a cache."""

from zerooffload.machine.cache_folder import cache_folder
from zerooffload.machine.cores import (
    CoreShare,
    core_share,
    cpu_name,
    cpu_quota,
    ranks_of_this_machine,
    this_ranks_cores,
    usable_cores,
)
from zerooffload.machine.drives import drive_model, file_system, rotates
from zerooffload.machine.memory import available_host_bytes, cgroup_limit_bytes, host_memory_bytes, lockable_bytes
from zerooffload.machine.other_programs import OtherPrograms
from zerooffload.machine.whole_file import write_whole

__all__ = [
    "CoreShare",
    "OtherPrograms",
    "available_host_bytes",
    "cache_folder",
    "cgroup_limit_bytes",
    "core_share",
    "cpu_name",
    "cpu_quota",
    "drive_model",
    "file_system",
    "host_memory_bytes",
    "lockable_bytes",
    "ranks_of_this_machine",
    "rotates",
    "this_ranks_cores",
    "usable_cores",
    "write_whole",
]
