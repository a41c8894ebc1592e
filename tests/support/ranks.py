"""Running a function on several gloo ranks, with a time limit that leaves nobody behind."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from support.flushes import without_fsync

COLLECTIVE_TIMEOUT = timedelta(seconds=60)

_PRELOADED = (
    "pytest",
    "torch.distributed",
    "zerooffload",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
)
"""What takes seconds to import, once for all ranks of all tests."""


class RanksError(AssertionError):
    """A rank raised or did not finish; the message holds the first traceback."""


@dataclass(frozen=True)
class Ending:
    """How a rank ended: with a `value`, with the traceback of an `error`, or killed, with neither."""

    value: Any = None
    error: str = ""
    died: bool = False


def run_ranks(function: Callable[..., Any], world_size: int, *args: object, limit_seconds: float = 120.0) -> list[Any]:
    """Call `function(rank, world_size, *args)` in one process a rank and return what each returned.

    Raises
    ------
    RanksError
        If a rank raised, died or took longer than the limit. All processes are gone then.
    """
    with started_ranks(function, world_size, *args) as ranks:
        endings: dict[int, Ending] = {}
        for rank, ending in ranks.endings(limit_seconds):
            if ending.died:
                raise RanksError(f"rank {rank} died with exit code {ranks.processes[rank].exitcode}")
            if ending.error:
                raise RanksError(f"rank {rank} failed:\n{ending.error}")
            endings[rank] = ending
    return [endings[rank].value for rank in range(world_size)]


class StartedRanks:
    """Processes that run, one a rank."""

    def __init__(self, processes: list[Any], receivers: list[Connection]) -> None:
        self.processes = processes
        self._receivers = receivers

    def endings(self, limit_seconds: float, ranks: set[int] | None = None) -> Iterator[tuple[int, Ending]]:
        """How each of `ranks` (default: all) ends, as they end.

        Raises
        ------
        RanksError
            If that takes longer than the limit.
        """
        deadline = time.monotonic() + limit_seconds
        waiting = set(range(len(self.processes))) if ranks is None else set(ranks)
        while waiting:
            for rank in sorted(waiting):
                ending = self._ending(rank)
                if ending is not None:
                    waiting.remove(rank)
                    yield rank, ending
            if time.monotonic() > deadline:
                raise RanksError(f"ranks {sorted(waiting)} did not finish within {limit_seconds} s")

    def _ending(self, rank: int) -> Ending | None:
        receiver, process = self._receivers[rank], self.processes[rank]
        alive = process.is_alive()
        if not receiver.poll(0.02):
            return None if alive else Ending(died=True)
        try:
            kind, value = receiver.recv()
        except (EOFError, OSError):
            # The latter if it was killed while it sent.
            return Ending(died=True)
        if kind == "error":
            return Ending(error=value)
        return Ending(value=torch.load(io.BytesIO(value), weights_only=True))


@contextmanager
def started_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
    join: bool = True,
) -> Iterator[StartedRanks]:
    """Start `function(rank, world_size, *args)` in one process a rank; all are killed at the end.

    Parameters
    ----------
    timeout : timedelta
        Of the process group.
    join : bool
        Make the process group first; with False the function does it, under MASTER_ADDR and MASTER_PORT.
    """
    context = _context()
    where = _Where(world_size, free_port(), timeout if join else None)
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=_rank, args=(function, rank, where, pipes[rank][1], args), daemon=True)
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            # The rank's own is then the only one, so that its end is seen here.
            sender.close()
        yield StartedRanks(processes, [receiver for receiver, _ in pipes])
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        for receiver, sender in pipes:
            receiver.close()
            sender.close()


def free_port() -> int:
    """A port that is free on the loopback interface now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@cache
def _context() -> Any:
    """Processes forked from one that has imported the slow modules, and has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    before = os.environ.get("PYTHONSAFEPATH")
    # The folder that the tests run in is not to be searched: the package is the installed one.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
    return context


@dataclass(frozen=True)
class _Where:
    world_size: int
    port: int
    timeout: timedelta | None


def _rank(function: Callable[..., Any], rank: int, where: _Where, sender: Connection, args: tuple[object, ...]) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(where.port),
        RANK=str(rank),
        WORLD_SIZE=str(where.world_size),
        LOCAL_WORLD_SIZE=str(where.world_size),
    )
    torch.set_num_threads(1)
    try:
        if where.timeout is not None:
            dist.init_process_group("gloo", timeout=where.timeout)
        # As bytes: a tensor sent as it is would be shared memory of a process that may end before it is read.
        packed = io.BytesIO()
        # What a process has written stays whatever becomes of it; only a machine that fails loses what was not flushed.
        with without_fsync():
            torch.save(function(rank, where.world_size, *args), packed)
        sender.send(("result", packed.getvalue()))
        if where.timeout is not None:
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - all of it is for the parent
        sender.send(("error", traceback.format_exc()))
