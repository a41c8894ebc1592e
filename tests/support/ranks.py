"""Running a function on several gloo ranks, with a time limit that leaves nobody behind."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class RanksError(AssertionError):
    """A rank raised or did not finish; the message holds the first traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: object, limit_seconds: float = 120.0) -> list[Any]:
    """Call `function(rank, world_size, *args)` in one process a rank and return what each returned.

    Raises
    ------
    RanksError
        If a rank raised, died or took longer than the limit. All processes are gone then.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=_rank, args=(function, rank, world_size, port, pipes[rank][1], args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, [receiver for receiver, _ in pipes], limit_seconds)
    finally:
        for process in processes:
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


def _collect(processes: list[Any], receivers: list[Connection], limit_seconds: float) -> list[Any]:
    deadline = time.monotonic() + limit_seconds
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        for rank, (process, receiver) in enumerate(zip(processes, receivers, strict=True)):
            if rank in results or not receiver.poll(0.02):
                if rank not in results and not process.is_alive() and not receiver.poll(0):
                    raise RanksError(f"rank {rank} died with exit code {process.exitcode}")
                continue
            kind, value = receiver.recv()
            if kind == "error":
                raise RanksError(f"rank {rank} failed:\n{value}")
            results[rank] = torch.load(io.BytesIO(value), weights_only=True)
        if time.monotonic() > deadline:
            missing = [rank for rank in range(len(processes)) if rank not in results]
            raise RanksError(f"ranks {missing} did not finish within {limit_seconds} s")
    return [results[rank] for rank in range(len(processes))]


def _rank(  # noqa: PLR0917 - what a process is started with
    function: Callable[..., Any], rank: int, world_size: int, port: int, sender: Connection, args: tuple[object, ...]
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
        # As bytes: a tensor sent as it is would be shared memory of a process that may end before it is read.
        packed = io.BytesIO()
        torch.save(function(rank, world_size, *args), packed)
        sender.send(("result", packed.getvalue()))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - all of it is for the parent
        sender.send(("error", traceback.format_exc()))
