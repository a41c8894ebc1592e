"""Budgets: every byte of ours is leased before it is taken."""

from zerooffload.memory.budget import Budget, Lease
from zerooffload.memory.limits import available_host_bytes, cgroup_limit_bytes

__all__ = ["Budget", "Lease", "available_host_bytes", "cgroup_limit_bytes"]
