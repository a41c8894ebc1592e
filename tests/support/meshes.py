"""Groups of ranks within a job; in a module that spawned processes can import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from support.rank_stages import Case
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


def train_replicated(
    rank: int, world_size: int, folder: str, num_replicas: int, cases: Sequence[Case]
) -> list[dict[str, Any]]:
    """Over a mesh of replicas and shards; by stage and homes."""
    mesh = init_device_mesh("cpu", (num_replicas, world_size // num_replicas), mesh_dim_names=("replicate", "shard"))
    share = even_shares(world_size)[rank]
    return [train(share, folder, homes, process_group=mesh, stage=stage) for stage, homes in cases]


def refused(rank: int, world_size: int) -> tuple[str, str, str]:
    """What is said to a mesh of three dimensions, to one that shards nothing, and to a rank outside of the group."""
    cube = init_device_mesh("cpu", (1, 2, world_size // 2))
    column = init_device_mesh("cpu", (world_size, 1))
    # Every rank takes part in making it.
    group = dist.new_group([0, 1])
    outside = _error(group) if rank > 1 else ""
    return _error(cube), _error(column), outside


def cut_differently(rank: int, _world_size: int) -> str:
    """What is said where only the first rank names units that there are."""
    return _error(None, units=["transformer.h.*" if rank == 0 else "layers.*"])


def _error(process_group: Any, **fields: Any) -> str:
    try:
        zo.offload(small_gpt2(), zo.OffloadConfig(**fields), process_group=process_group)
    except zo.ZeroOffloadError as error:
        return str(error)
    return "accepted"
