"""Groups of ranks within a job; in a module that spawned processes can import."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from support.rank_training import even_shares, train
from support.small_models import small_gpt2
from torch.distributed.device_mesh import init_device_mesh

import zerooffload as zo

ON_NVME = ("nvme", "nvme", "nvme")


def train_in_groups(rank: int, world_size: int, folder: str, as_mesh: bool) -> dict[str, Any]:  # noqa: FBT001
    """Two groups of two, side by side in one folder, each with the same shares."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    shard = mesh["shard"]
    group = shard if as_mesh else shard.get_group()
    result = train(even_shares(2)[shard.get_local_rank()], folder, ON_NVME, process_group=group)
    assert dist.get_rank() == rank
    return result


def refused(rank: int, world_size: int) -> tuple[str, str]:
    """What is said to a whole mesh, and to a rank that is not in the group."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    # Every rank takes part in making it.
    group = dist.new_group([0, 1])
    whole = _error(mesh)
    outside = _error(group) if rank > 1 else ""
    return whole, outside


def _error(process_group: Any) -> str:
    try:
        zo.offload(small_gpt2(), process_group=process_group)
    except zo.ConfigError as error:
        return str(error)
    return "accepted"
