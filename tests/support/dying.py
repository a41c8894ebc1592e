"""A rank that kills or stops itself at a chosen moment; in a module that spawned processes can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.rank_training import MAX_NORM, OPTIONS, even_shares, global_batch, offload_config
from support.small_models import small_gpt2

import zerooffload as zo
from zerooffload.sharding.collectives import GroupCollectives
from zerooffload.tiers.nvme import NvmeBlock

ON_NVME = ("nvme", "nvme", "nvme")


@dataclass(frozen=True)
class Fate:
    """What happens to a rank at its event of that number."""

    rank: int
    event: int
    signal: int = signal.SIGKILL


@dataclass
class Events:
    """What a rank does: collectives, tier I/O, joining the group; each with the phase of training that it is in."""

    own_fate: Fate | None = None
    phase: str = "start-up"
    seen: list[tuple[str, str]] = field(default_factory=list)

    def happen(self, what: str) -> None:
        """Count one; it may be the last."""
        if self.own_fate is not None and len(self.seen) == self.own_fate.event:
            os.kill(os.getpid(), self.own_fate.signal)
        self.seen.append((self.phase, what))

    def watch(self) -> None:
        """Count what this process does from now on."""
        self._watch(GroupCollectives, "_do", lambda what: what)
        self._watch(NvmeBlock, "read", lambda _: "read")
        self._watch(NvmeBlock, "write", lambda _: "write")

    def _watch(self, owner: type, name: str, describe: Callable[[Any], str]) -> None:
        method = getattr(owner, name)

        def watched(instance: Any, first: Any, second: Any) -> Any:
            self.happen(describe(first))
            return method(instance, first, second)

        setattr(owner, name, watched)


def train_under(  # noqa: PLR0917 - arguments of ranks have places
    rank: int,
    world_size: int,
    folder: str,
    fate: Fate | None,
    timeout_seconds: float,
    num_steps: int,
) -> dict[str, Any]:
    """Join the group and train. Returns the events, and how it ended: the error's class and text."""
    events = Events(fate if fate is not None and fate.rank == rank else None)
    events.watch()
    try:
        events.happen("join")
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
        events.happen("joined")
        _train(rank, world_size, folder, events, num_steps)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        ending = [type(error).__name__, str(error)]
    else:
        ending = ["", ""]
    if fate is not None and fate.signal == signal.SIGSTOP:
        _wait_for_the_others(Path(folder), rank, world_size - 1)
    return {"events": events.seen, "ending": ending}


def offload_in_folders(rank: int, world_size: int, folders: Sequence[str]) -> tuple[list[str], str]:
    """Offload with a folder for each rank; returns what is in it after the error, and the error."""
    assert world_size == len(folders)
    model = small_gpt2()
    try:
        zo.offload(model, offload_config(folders[rank], ON_NVME, nvme_space="1MiB"))
    except zo.ZeroOffloadError as error:
        folder = Path(folders[rank])
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [], str(error)
    return [], ""


def _train(rank: int, world_size: int, folder: str, events: Events, num_steps: int) -> None:
    share = even_shares(world_size)[rank]
    model = small_gpt2()
    zo.offload(model, offload_config(folder, ON_NVME))
    try:
        optimizer = zo.AdamW(model.parameters(), **OPTIONS)
        for step in range(num_steps):
            events.phase = "forward"
            loss = share.loss(model, global_batch(step, 0))
            events.phase = "backward"
            loss.backward()
            events.phase = "clipping"
            zo.clip_grad_norm_(model, MAX_NORM)
            events.phase = "step"
            optimizer.step()
            optimizer.zero_grad()
            Path(folder, f"trains-{rank}").touch()
        # Who died in the last step is missed here.
        events.phase = "end"
        share.loss(model, global_batch(num_steps, 0))
    finally:
        zo.close(model)


def _wait_for_the_others(folder: Path, rank: int, num_others: int) -> None:
    """A rank that ended would be one that is gone."""
    (folder / f"ended-{rank}").touch()
    deadline = time.monotonic() + 10.0
    while len(list(folder.glob("ended-*"))) < num_others and time.monotonic() < deadline:
        time.sleep(0.02)
