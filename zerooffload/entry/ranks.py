"""The ranks that train a model, and those that train its other parts."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerooffload.errors import ConfigError
from zerooffload.sharding.collectives import (
    Collectives,
    GroupCollectives,
    PartCollectives,
    ReplicatedCollectives,
    SingleRank,
)


def collectives_of(ranks: dist.ProcessGroup | DeviceMesh | None) -> Collectives:
    """Those of the group, of the default group, or of a world of one."""
    if not (dist.is_available() and dist.is_initialized()):
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE is {world_size}, but there is no process group:"
                " call torch.distributed.init_process_group() before zo.offload"
            )
        return SingleRank()
    world_size = dist.get_world_size()
    if world_size != int(os.environ.get("WORLD_SIZE", str(world_size))):
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the process group has {world_size} ranks:"
            " start all of them the same way"
        )
    if isinstance(ranks, DeviceMesh) and ranks.ndim > 1:
        return _replicated(ranks)
    group = _group(ranks, "the process group")
    if dist.get_world_size(group) == 1:
        return SingleRank(dist.get_rank())
    return GroupCollectives(group)


def _group(ranks: dist.ProcessGroup | DeviceMesh | None, what: str) -> dist.ProcessGroup:
    """That of a mesh's only dimension, the one given, or the default one; this rank is in it."""
    if isinstance(ranks, DeviceMesh):
        ranks = ranks.get_group()
    group = ranks if ranks is not None else dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise ConfigError(f"rank {dist.get_rank()} is not in {what}: call zo.offload on its members alone")
    return group


def with_other_stages(
    own: Collectives,
    ranks: dist.ProcessGroup | DeviceMesh | None,
    mesh: DeviceMesh | None,
    stages: dist.ProcessGroup | DeviceMesh,
) -> Collectives:
    """Those of a pipeline's stage, whose `own` collectives are given, and of the other stages.

    It is trained by `ranks`, and cut over `mesh`, if it is cut.
    """
    if ranks is None:
        raise ConfigError(
            "pipeline_group without process_group: all ranks would train the same stage. Hand in the ranks that train"
            ' this one, as in zo.offload(stage, process_group=mesh["dp"], pipeline_group=mesh["pp"])'
        )
    if isinstance(stages, DeviceMesh) and stages.ndim > 1:
        raise ConfigError(f"pipeline_group is {stages}: hand in the dimension of the stages, mesh[name]")
    group = _group(stages, "the pipeline's group")
    for others, what in ((ranks, "process_group"), (mesh, "the mesh over which the model is cut")):
        shared = _shared_ranks(others, group) if others is not None else {dist.get_rank()}
        if shared != {dist.get_rank()}:
            raise ConfigError(
                f"{what} and pipeline_group have ranks {sorted(shared)} in common, expected this one,"
                f" {dist.get_rank()}, alone: a rank trains one stage"
            )
    return own if dist.get_world_size(group) == 1 else PartCollectives(own, GroupCollectives(group))


def with_other_cuts(own: Collectives, ranks: dist.ProcessGroup | DeviceMesh | None, mesh: DeviceMesh) -> Collectives:
    """Those of a model that is cut over `mesh`, of which `ranks`, whose `own` collectives are given, have one part."""
    shared = _shared_ranks(ranks or _group(None, "the process group"), mesh)
    if shared != {dist.get_rank()}:
        raise ConfigError(
            f"process_group and the mesh over which the model is cut have ranks {sorted(shared)} in common, expected"
            f" this one, {dist.get_rank()}, alone. Hand in the ranks that have the same part of it, as in"
            ' zo.offload(model, process_group=mesh["dp"]) after parallelize_module(model, mesh["tp"], ...)'
        )
    return own if mesh.size() == 1 else PartCollectives(own, GroupCollectives(mesh.get_group()))


def _shared_ranks(one: dist.ProcessGroup | DeviceMesh, other: dist.ProcessGroup | DeviceMesh) -> set[int]:
    return set(_global_ranks(one)) & set(_global_ranks(other))


def _global_ranks(ranks: dist.ProcessGroup | DeviceMesh) -> list[int]:
    if isinstance(ranks, DeviceMesh):
        members: list[int] = ranks.mesh.flatten().tolist()
        return members
    return dist.get_process_group_ranks(ranks)


def _replicated(mesh: DeviceMesh) -> Collectives:
    """Of a mesh of replicas and shards."""
    if mesh.ndim > 2:
        raise ConfigError(f"{mesh} has {mesh.ndim} dimensions: hand in the two of replicas and shards, mesh[names]")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"rank {dist.get_rank()} is not in {mesh}: call zo.offload on its members alone")
    num_replicas, num_shards = mesh.shape
    if num_shards == 1:
        raise ConfigError(
            f"{mesh} shares a replica among 1 rank, so nothing is sharded: hand in its other dimension, and set"
            " OffloadConfig(stage=0)"
        )
    sharing = mesh.get_group(1)
    if num_replicas == 1:
        return GroupCollectives(sharing)
    everyone = dist.new_group(sorted(mesh.mesh.flatten().tolist()), use_local_synchronization=True)
    return ReplicatedCollectives(
        GroupCollectives(everyone), GroupCollectives(sharing), GroupCollectives(mesh.get_group(0))
    )
