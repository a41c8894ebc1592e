"""Joining shards into whole buffers, whole gradients into shards, and what ranks must agree on.

[Note: one order of collectives]
Every rank starts the same collectives in the same order, decided by the order of the model and by budgets that all
ranks agreed on, never by timing or by which gradient came first. Only the thread that runs the hooks starts them.
"""

from __future__ import annotations

import platform
import time
import zlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import psutil
import torch
import torch.distributed as dist

from zerooffload.errors import RankError
from zerooffload.telemetry import Lane, Link, Recorder

T = TypeVar("T")

_DEATH_SECONDS = 5.0

# torch 2.13 gave both a new name, and warns about the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives(Protocol):
    """What the ranks of a run do together. Buffers are 1D and of one dtype.

    Attributes
    ----------
    world_size, rank : int
        Of the group whose ranks have a shard each. Other such groups may hold replicas of the model.
    global_rank : int
        In the whole job, where several groups may train at once: names files and is named in errors.
    part : tuple[int, ...]
        Which part of the model the ranks train, where others train other parts: of which stage, of which cut.
    is_alone : bool
        Whether no other rank trains the model, or another part of it.
    """

    world_size: int
    rank: int
    global_rank: int
    part: tuple[int, ...]
    is_alone: bool

    def all_gather(self, full: torch.Tensor, name: str) -> None:
        """Fill `full` `[world_size * shard_numel]`, where this rank's shard is already in its place; `name`'s."""

    def reduce_scatter(self, full: torch.Tensor, name: str) -> torch.Tensor:
        """The mean over all ranks of this rank's shard of `full`, as a view `[shard_numel]` of it; `name`'s."""

    def gather_objects(self, value: T) -> list[T]:
        """The small values of all ranks, in rank order."""

    def gather_of_shards(self, value: T) -> list[T]:
        """The small values of the ranks that have a shard each, in the order of the shards."""

    def gather_of_parts(self, value: T) -> list[T]:
        """The small values of a rank of each part, where ranks outside hold other parts of the model; in one order."""

    def agreement(self) -> StepAgreement:
        """A way of its own for a thread to learn what the least of all ranks' numbers is; every rank makes it."""

    def report_to(self, recorder: Recorder) -> None:
        """Count the bytes that come over the links from now on."""


class StepAgreement(Protocol):
    """The least number of any rank, apart from all other collectives."""

    def least(self, mine: int) -> int:
        """Block until every rank has given its number.

        Raises
        ------
        RankError
            If one is gone.
        """


class _AloneAgreement:
    """Of a world of one."""

    def least(self, mine: int) -> int:
        """The one."""
        return mine


class _GroupAgreement:
    """Over a gloo group of its own, whose order of collectives nothing else disturbs."""

    def __init__(self, global_ranks: list[int], who_is_gone: Callable[[], str]) -> None:
        self._group = dist.new_group(global_ranks, backend="gloo", use_local_synchronization=True)
        self._who_is_gone = who_is_gone

    def least(self, mine: int) -> int:
        """See `StepAgreement`."""
        number = torch.tensor([mine])
        try:
            dist.all_reduce(number, dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise RankError(f"a step could not be committed: {self._who_is_gone()} ({error})") from error
        return int(number)


class _AgreementOfParts:
    """Of the ranks that train a part, then of the parts."""

    def __init__(self, sharing: StepAgreement, parts: StepAgreement) -> None:
        self._sharing = sharing
        self._parts = parts

    def least(self, mine: int) -> int:
        """See `StepAgreement`."""
        return self._parts.least(self._sharing.least(mine))


class SingleRank:
    """A world of one: a shard is the whole."""

    world_size = 1
    rank = 0
    part: tuple[int, ...] = ()
    is_alone = True

    def __init__(self, global_rank: int = 0) -> None:
        self.global_rank = global_rank

    def all_gather(self, full: torch.Tensor, name: str) -> None:
        """Nothing is missing."""

    def reduce_scatter(self, full: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002
        """Nothing to add."""
        return full

    def gather_objects(self, value: T) -> list[T]:
        """The one."""
        return [value]

    def gather_of_shards(self, value: T) -> list[T]:
        """The one."""
        return [value]

    def gather_of_parts(self, value: T) -> list[T]:
        """The one."""
        return [value]

    def agreement(self) -> StepAgreement:
        """With nobody."""
        return _AloneAgreement()

    def report_to(self, recorder: Recorder) -> None:
        """No link."""


class GroupCollectives:
    """Collectives over a torch.distributed process group.

    Small values go over a gloo group of the same ranks, so that they need no device.

    Raises
    ------
    RankError
        From every method, if another rank is gone, or does something else at this moment.
    """

    part: tuple[int, ...] = ()
    is_alone = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.global_rank = dist.get_rank()
        self._global_ranks = dist.get_process_group_ranks(group)
        self._recorder = Recorder()
        if dist.get_backend(group) == "gloo":
            self._cpu_group = group
        else:
            # Only the members make it: ranks outside may know nothing of this model.
            self._cpu_group = dist.new_group(self._global_ranks, backend="gloo", use_local_synchronization=True)
        self._members: list[tuple[str, int]] = []
        self._members = self.gather_objects((platform.node(), psutil.Process().pid))

    def all_gather(self, full: torch.Tensor, name: str) -> None:
        """See `Collectives`."""
        shard = full.chunk(self.world_size)[self.rank]
        moved_bytes = full.nbytes - shard.nbytes
        with self._recorder.on_stream(Lane.GATHER, None, name, moved_bytes):
            self._do(f"all-gather of {name}", lambda: _all_gather_single(full, shard, group=self._group))
        self._recorder.moved(Link.GATHERED, moved_bytes)

    def reduce_scatter(self, full: torch.Tensor, name: str) -> torch.Tensor:
        """See `Collectives`. The sum is divided once, in the buffer's dtype."""
        return self.sum_of_shard(full, name).div_(self.world_size)

    def sum_of_shard(self, full: torch.Tensor, name: str) -> torch.Tensor:
        """The sum over the ranks of this rank's shard of `full`, as a view `[shard_numel]` of it; `name`'s."""
        shard = full.chunk(self.world_size)[self.rank]
        moved_bytes = full.nbytes - shard.nbytes
        with self._recorder.on_stream(Lane.REDUCE, None, name, moved_bytes):
            self._do(f"reduce-scatter of {name}", lambda: _reduce_scatter_single(shard, full, group=self._group))
        self._recorder.moved(Link.REDUCED, moved_bytes)
        return shard

    def add_up(self, buffer: torch.Tensor, name: str) -> None:
        """Let `buffer` be the sum over the ranks, the same bits on each; `name`'s."""
        # A reduce-scatter and an all-gather, each of the others' parts.
        moved_bytes = 2 * buffer.nbytes * (self.world_size - 1) // self.world_size
        with self._recorder.on_stream(Lane.REDUCE, None, name, moved_bytes):
            self._do(f"all-reduce of {name}", lambda: dist.all_reduce(buffer, group=self._group))
        self._recorder.moved(Link.REDUCED, moved_bytes)

    def gather_objects(self, value: T) -> list[T]:
        """See `Collectives`."""
        values: list[Any] = [None] * self.world_size
        self._do("exchange of values", lambda: dist.all_gather_object(values, value, group=self._cpu_group))
        return values

    def gather_of_shards(self, value: T) -> list[T]:
        """All ranks have a shard each."""
        return self.gather_objects(value)

    def gather_of_parts(self, value: T) -> list[T]:
        """The model is the one part."""
        return [value]

    def agreement(self) -> StepAgreement:
        """See `Collectives`."""
        made: list[StepAgreement] = []
        self._do("making of a group", lambda: made.append(_GroupAgreement(self._global_ranks, self._who_is_gone)))
        return made[0]

    def report_to(self, recorder: Recorder) -> None:
        """See `Collectives`."""
        self._recorder = recorder

    def _do(self, what: str, collective: Callable[[], object]) -> None:
        try:
            self._check_same(what)
            collective()
        except RuntimeError as error:
            raise RankError(f"{what} failed on rank {self.global_rank}: {self._who_is_gone()} ({error})") from error

    def _check_same(self, what: str) -> None:
        """See that every rank is about to do `what`: messages of one length would be taken for each other."""
        mine = torch.tensor([zlib.crc32(what.encode())])
        everyones = mine.new_empty(self.world_size)
        _all_gather_single(everyones, mine, group=self._cpu_group)
        if bool((everyones == mine).all()):
            return
        doing: list[Any] = [None] * self.world_size
        dist.all_gather_object(doing, what, group=self._cpu_group)
        ranks = ", ".join(f"rank {rank}: {text}" for rank, text in zip(self._global_ranks, doing, strict=True))
        raise RankError(
            f"the ranks do not do the same ({ranks}): every rank must call the same parts of the model in the same"
            " order. Let a rank that does not need a part call it too, and multiply what comes out with 0."
        )

    def _who_is_gone(self) -> str:
        if not self._members:
            return "a rank does not answer"
        host = platform.node()
        # A process that is being killed closes its connections some time before it counts as gone.
        deadline = time.monotonic() + _DEATH_SECONDS
        while time.monotonic() < deadline:
            members = zip(self._global_ranks, self._members, strict=False)  # no members yet while they are exchanged
            gone = [rank for rank, (name, pid) in members if name == host and not lives(pid)]
            if gone:
                return ", ".join(f"rank {rank} is gone" for rank in gone)
            time.sleep(0.05)
        others = sorted({name for name, _ in self._members if name != host})
        return f"a rank does not answer; none of this host's is gone{f', see {others}' if others else ''}"


class ReplicatedCollectives:
    """Of ranks in groups that hold a replica of the model each, sharded inside: hybrid sharding.

    Parameters
    ----------
    everyone, sharing, replicas : GroupCollectives
        Of all ranks, of those that share this rank's replica, and of those that have the same shard as this one.

    Raises
    ------
    RankError
        From every method, if another rank is gone, or does something else at this moment.
    """

    part: tuple[int, ...] = ()
    is_alone = False

    def __init__(self, everyone: GroupCollectives, sharing: GroupCollectives, replicas: GroupCollectives) -> None:
        self._everyone = everyone
        self._sharing = sharing
        self._replicas = replicas
        self.world_size = sharing.world_size
        self.rank = sharing.rank
        self.global_rank = everyone.global_rank

    def all_gather(self, full: torch.Tensor, name: str) -> None:
        """From the ranks that share the replica."""
        self._sharing.all_gather(full, name)

    def reduce_scatter(self, full: torch.Tensor, name: str) -> torch.Tensor:
        """See `Collectives`. First inside a replica, then over the replicas; the sum is divided once."""
        shard = self._sharing.sum_of_shard(full, name)
        self._replicas.add_up(shard, name)
        return shard.div_(self._everyone.world_size)

    def gather_objects(self, value: T) -> list[T]:
        """See `Collectives`."""
        return self._everyone.gather_objects(value)

    def gather_of_shards(self, value: T) -> list[T]:
        """See `Collectives`."""
        return self._sharing.gather_objects(value)

    def gather_of_parts(self, value: T) -> list[T]:
        """The model is the one part."""
        return [value]

    def agreement(self) -> StepAgreement:
        """With all ranks."""
        return self._everyone.agreement()

    def report_to(self, recorder: Recorder) -> None:
        """See `Collectives`."""
        for group in (self._sharing, self._replicas):
            group.report_to(recorder)


class PartCollectives:
    """Of ranks that train a part of a model while others train the other parts.

    A part is a stage of a pipeline, or what a rank of tensor parallelism has; or a part of such a part.

    Parameters
    ----------
    own : Collectives
        Of the ranks that train this part, and of its own parts if it has any.
    parts : GroupCollectives
        Of this rank and one of each other part.

    Raises
    ------
    RankError
        From every method, if another rank is gone, or does something else at this moment.
    """

    is_alone = False

    def __init__(self, own: Collectives, parts: GroupCollectives) -> None:
        self._own = own
        self._parts = parts
        self.part = (*own.part, parts.rank)
        self.world_size = own.world_size
        self.rank = own.rank
        self.global_rank = own.global_rank

    def all_gather(self, full: torch.Tensor, name: str) -> None:
        """Of this part."""
        self._own.all_gather(full, name)

    def reduce_scatter(self, full: torch.Tensor, name: str) -> torch.Tensor:
        """Of this part."""
        return self._own.reduce_scatter(full, name)

    def gather_objects(self, value: T) -> list[T]:
        """Of this part."""
        return self._own.gather_objects(value)

    def gather_of_shards(self, value: T) -> list[T]:
        """Of this part."""
        return self._own.gather_of_shards(value)

    def gather_of_parts(self, value: T) -> list[T]:
        """See `Collectives`."""
        of_parts = self._parts.gather_objects(self._own.gather_of_parts(value))
        return [item for of_part in of_parts for item in of_part]

    def agreement(self) -> StepAgreement:
        """With the ranks of all parts: a step is committed when all of the model is."""
        return _AgreementOfParts(self._own.agreement(), self._parts.agreement())

    def report_to(self, recorder: Recorder) -> None:
        """See `Collectives`."""
        self._own.report_to(recorder)


def gather_from_all(collectives: Collectives, value: T) -> list[T]:
    """The small values of all ranks that train the model, those of its other parts included; in one order."""
    return [item for of_part in collectives.gather_of_parts(collectives.gather_objects(value)) for item in of_part]


def writing_role(collectives: Collectives) -> tuple[bool, bool]:
    """Whether this rank is the first that trains the model, and whether no earlier one has the same shard. Collective.

    Replicas hold the same shards of a part: the first that has one writes it.
    """
    of_part = collectives.gather_objects((collectives.global_rank, collectives.rank))
    first_of_shard = next(number for number, rank in of_part if rank == collectives.rank)
    first_of_all = collectives.gather_of_parts(of_part[0][0])[0]
    return collectives.global_rank == first_of_all, collectives.global_rank == first_of_shard


def agree(collectives: Collectives, work: Callable[[], T], what: str) -> T:
    """Do `work` on every rank, or fail on every rank: one that failed alone would leave the others waiting.

    Raises
    ------
    RankError
        If it failed on another rank only.
    """
    error: Exception | None = None
    result: list[T] = []
    try:
        result.append(work())
    except Exception as failure:  # noqa: BLE001 - raised below, once the others know
        error = failure
    failures = gather_from_all(
        collectives, None if error is None else f"rank {collectives.global_rank}: {type(error).__name__}: {error}"
    )
    if error is not None:
        raise error
    failed = [failure for failure in failures if failure is not None]
    if failed:
        raise RankError(f"{what} failed on another rank: " + "; ".join(failed))
    return result[0]


def lives(pid: int) -> bool:
    """Whether a process of this machine does."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
