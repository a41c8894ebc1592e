"""A training that may be killed at any moment and is continued; in a module that spawned processes can import."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.rank_training import OPTIONS, next_token_loss, whole_params
from support.small_models import VOCABULARY, small_gpt2
from torch import nn

import zerooffload as zo
from zerooffload.accelerator import default_accelerator
from zerooffload.aio import Engine, OpenFile
from zerooffload.entry.offloading import offload_in
from zerooffload.planner import placement
from zerooffload.runtime.build import environment
from zerooffload.sharding.collectives import Collectives, GroupCollectives, SingleRank
from zerooffload.telemetry import Waitable

NUM_STEPS = 6
NUM_MICRO_STEPS = 2
MAX_NORM = 0.7
TIMEOUT_SECONDS = 10.0
"""Of the process group."""
_FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


@dataclass(frozen=True)
class Kill:
    """SIGKILL when a moment of this kind comes for the `number`-th time in the process of that rank.

    With `is_fault` an I/O error instead, for moments after an operation.
    """

    moment: str
    number: int
    rank: int = 0
    is_fault: bool = False


class Moments:
    """Counts what the process comes by, in any thread. The process ends at the one that was chosen."""

    def __init__(self, kill: Kill | None) -> None:
        self.counts: Counter[str] = Counter()
        self.threads: set[str] = set()
        self._kill = kill
        self._lock = threading.Lock()

    def come(self, moment: str) -> None:
        """This is one."""
        with self._lock:
            number = self.counts[moment]
            self.counts[moment] += 1
            self.threads.add(threading.current_thread().name)
        if self._kill is not None and (self._kill.moment, self._kill.number) == (moment, number):
            if self._kill.is_fault:
                raise zo.TierIOError(moment, "a file", errno.EIO)
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_files(self, folder: str) -> None:
        """Come by what the interpreter does to names and files in `folder`, until the process ends."""

        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event in _FILE_EVENTS and str(args[0]).startswith(folder):
                self.come(event)

        sys.addaudithook(audit)


class WatchedEngine:
    """An engine whose operations are moments: before one is begun, while it is under way, and after it."""

    name = "watched"
    reads_devices = False

    def __init__(self, engine: Engine, moments: Moments) -> None:
        self._engine = engine
        self._moments = moments
        self.close = engine.close

    def submit_read(self, file: OpenFile, offset_bytes: int, target: torch.Tensor) -> Waitable:
        """See `Engine`."""
        self._moments.come("before a read")
        return self._begun("read", self._engine.submit_read(file, offset_bytes, target))

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> Waitable:
        """See `Engine`."""
        what = f"write of {file.path.stem.partition('-')[0]}"
        self._moments.come(f"before a {what}")
        return self._begun(what, self._engine.submit_write(file, offset_bytes, source))

    def register(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - the protocol's
        """Memory is taken as it comes."""
        return False

    def submit_flush(self, file: OpenFile) -> Waitable:
        """See `Engine`."""
        what = f"flush of {file.path.stem.partition('-')[0]}"
        self._moments.come(f"before a {what}")
        return self._begun(what, self._engine.submit_flush(file))

    def _begun(self, what: str, ticket: Waitable) -> Waitable:
        self._moments.come(f"during a {what}")
        return _WatchedTicket(what, ticket, self._moments)


class _WatchedTicket:
    def __init__(self, what: str, ticket: Waitable, moments: Moments) -> None:
        self._what = what
        self._ticket = ticket
        self._moments = moments
        self.done = ticket.done

    def wait(self) -> None:
        self._ticket.wait()
        self._moments.come(f"after a {self._what}")


class Batches:
    """Batches that depend on the position and on Python's and numpy's random numbers when they are drawn."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._position = rank
        self._stride = world_size

    def draw(self) -> torch.Tensor:
        """Token ids `[2, 8]`."""
        generator = torch.Generator().manual_seed(self._position)
        self._position += self._stride
        tokens = torch.randint(1, VOCABULARY, (2, 8), generator=generator)
        tokens[random.randrange(2), int(np.random.randint(8))] = 1  # noqa: S311, NPY002 - their states are committed
        return tokens

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._position = state["position"]


class Log:
    """Lines that survive the process, and would survive a power cut."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *words: object) -> None:
        """One line."""
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())
        os.fsync(self._fd)


def log_path(folder: str | Path, rank: int) -> Path:
    """Where `train` writes what it does: "resumed step", "loss step value", "finished step"."""
    return Path(folder, f"log-{rank}")


def drives(folder: str | Path) -> list[Path]:
    """The nvme paths of a training."""
    return [Path(folder, f"drive-{number}") for number in range(2)]


def train(rank: int, world_size: int, folder: str, kill: Kill | None) -> dict[str, Any]:
    """Train to the end, from wherever an earlier call in this folder came to.

    Returns the moments that came, on which threads, and how it ended: an error's class and text, or the final states.
    """
    moments = Moments(kill if kill is not None and kill.rank == rank else None)
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    moments.watch_files(str(Path(folder, "drive")))
    result: dict[str, Any] = {}
    try:
        result = _train(rank, world_size, folder, moments)
    except zo.ZeroOffloadError as error:
        ending = [type(error).__name__, str(error)]
    else:
        ending = ["", ""]
    return {"moments": dict(moments.counts), "threads": sorted(moments.threads), "ending": ending, **result}


def _train(rank: int, world_size: int, folder: str, moments: Moments) -> dict[str, Any]:
    log = Log(log_path(folder, rank))
    model = _offloaded(world_size, folder, moments)
    try:
        optimizer = zo.AdamW(model.parameters(), **OPTIONS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        batches = Batches(rank, world_size)
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002
        zo.track(model, scheduler=scheduler, batches=batches)
        first = zo.resume(model, optimizer)
        log.write("resumed", first)
        if first and world_size == 1:
            # Numbers that the training would not have drawn are forgotten when its next forward begins.
            torch.rand(3)
        for step in range(first, NUM_STEPS):
            losses = _backward(model, batches, moments)
            norm = zo.clip_grad_norm_(model, MAX_NORM).item()
            log.write("loss", step, *(loss.hex() for loss in (*losses, norm, scheduler.get_last_lr()[0])))
            moments.come("step")
            optimizer.step()
            log.write("finished", step + 1)
            moments.come("stepped")
            optimizer.zero_grad()
            scheduler.step()
            moments.come("scheduled")
        return {
            "params": whole_params(model),
            "moments of parameters": optimizer.state_dict()["state"] if world_size == 1 else {},
            "next random number": torch.rand(1) if first < NUM_STEPS else None,
        }
    finally:
        moments.come("close")
        zo.close(model)
        moments.come("closed")


def _backward(model: nn.Module, batches: Batches, moments: Moments) -> list[float]:
    losses = []
    for _ in range(NUM_MICRO_STEPS):
        moments.come("drawing")
        tokens = batches.draw()
        moments.come("forward")
        loss = next_token_loss(model, tokens)
        losses.append(loss.item())
        moments.come("backward")
        (loss / NUM_MICRO_STEPS).backward()
    moments.come("clipping")
    return losses


def _offloaded(world_size: int, folder: str, moments: Moments) -> nn.Module:
    # Several chunks a block.
    placement.CHUNK_NUMEL = 4096
    homes: dict[str, Any] = dict.fromkeys(("params", "optimizer", "gradients"), "nvme")
    paths = drives(folder)
    for path in paths:
        Path(path).mkdir(exist_ok=True)
    config = zo.OffloadConfig(**homes, nvme_paths=paths, host_memory="32MiB", nvme_space="64MiB", threads=1)
    collectives: Collectives = GroupCollectives(dist.group.WORLD) if world_size > 1 else SingleRank()
    real = environment(config, default_accelerator(), collectives)
    watched = replace(real, open_engine=lambda: WatchedEngine(real.open_engine(), moments))
    moments.come("offload")
    model = small_gpt2(dropout=0.1)
    model.train()
    return offload_in(model, config, watched)
