"""Ranks on several machines, as they believe, whose whole parameters are at home on host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.environments import simulated_devices
from support.leaky_waits import LeakyWaits
from support.rank_accounts import least_device_memory
from support.rank_sharing import ON_HOST, apart, counted_homes
from support.rank_training import OPTIONS, even_shares, global_batch, offload_config, whole_params
from support.simulated_accelerator import RaceError
from support.small_models import small_gpt2
from torch import nn

import zerooffload as zo
from zerooffload.runtime.arrivals import Arrivals, Arrived
from zerooffload.runtime.residency import Residency
from zerooffload.telemetry import Wait, Waits
from zerooffload.telemetry.recorder import CountingRecorder

WIDTH = 32
"""Of what a block takes."""


def live_with_and_without(
    rank: int, world_size: int, folder: str, machines: Sequence[int], fields: Sequence[dict[str, Any]]
) -> list[str]:
    """What differs between a copy for each machine and one for each rank, of all that a run may do."""
    wrong: list[str] = []
    for given in fields:
        with simulated_devices(on_files=True):
            with apart(rank):
                own = _live(rank, world_size, f"{folder}/own", given)
            with apart(machines[rank]), counted_homes() as names:
                found = _live(rank, world_size, f"{folder}/shared", given)
        assert bool(names) == (machines.count(machines[rank]) > 1)
        wrong += [f"{given}: {name}" for name, value in own.items() if not torch.equal(found[name], value)]
    return wrong


def _live(rank: int, world_size: int, folder: str, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Steps; between them evaluations, two of a rank alone, an edit, a save and a load, and time off the device."""
    share, seen = even_shares(world_size)[rank], {}
    Path(folder).mkdir(exist_ok=True)
    model = small_gpt2()
    model.get_parameter("transformer.wpe.weight").requires_grad_(False)
    config = offload_config(folder, ON_HOST, **fields)
    zo.offload(model, config.model_copy(update={"device_memory": least_device_memory(model, config)}))
    optimizer = zo.AdamW(model.parameters(), **OPTIONS)

    def evaluate(name: str, number: int) -> None:
        with torch.no_grad():
            seen[name] = share.loss(model, global_batch(number, 1)).detach()

    def step(number: int) -> None:
        loss = share.loss(model, global_batch(number, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen[f"loss {number}"] = loss.detach()

    for number in range(2):
        step(number)
        evaluate(f"evaluated {number}", number)
        if rank == world_size - 1 - number:
            evaluate("alone", number)
    step(2)
    for name in ("transformer.h.0", "transformer.wpe"):
        edited = model.get_submodule(name)
        with zo.full_params(edited), torch.no_grad():
            for param in edited.parameters():
                param[0].add_(1.0 / 64)
    evaluate("edited", 3)
    ticket = zo.save(Path(folder, "checkpoints"), model, optimizer, blocking=False)
    step(3)
    ticket.wait()
    zo.load(ticket.path, model, optimizer)
    evaluate("loaded", 4)
    step(4)
    zo.release_device(model)
    zo.reclaim_device(model)
    step(5)
    seen |= whole_params(model)
    zo.close(model)
    return seen


def look_before_all_is_home(
    rank: int, world_size: int, folder: str, leaks: Sequence[tuple[str, Wait]]
) -> list[tuple[float, int]]:
    """What a block does on rank 1: on its own copy, and on one with rank 0, with all waits, and without each of these.

    Rank 2 updates a part of what they have. Of that, rank 0 takes its share home, but has not done so when rank 1 has
    left the device, and brings the block in again. Rank 0 goes on when rank 1 waits for it, or is through. How often
    the wait was left out is told too.
    """
    with simulated_devices(), apart(rank):
        own = _look_again(rank, world_size, folder, "own")
    with simulated_devices(), apart(rank // 2):
        found = [(own, 0), (_look_again(rank, world_size, folder, "shared", holds=True), 0)]
    return found + [_look_without(rank, world_size, folder, *leak) for leak in leaks]


def _look_without(rank: int, world_size: int, folder: str, place: str, wait: Wait) -> tuple[float, int]:
    leaky: list[LeakyWaits] = []

    def make_waits(recorder: CountingRecorder) -> Waits:
        leaky.append(LeakyWaits(recorder, wait, place))
        return leaky[-1]

    seen = math.nan
    with suppress(RaceError), simulated_devices(make_waits), apart(rank // 2):
        seen = _look_again(rank, world_size, folder, place, holds=place == "fetch._begin")
    return seen, sum(waits.leaked[place] for waits in leaky)


def _look_again(rank: int, world_size: int, folder: str, run: str, *, holds: bool = False) -> float:
    store = dist.distributed_c10d._get_default_store()
    share, key = even_shares(world_size)[rank], f"{run} is waited for"
    work, wait = Arrivals._work, Arrived.wait

    def late(self: Arrivals) -> None:
        store.wait([key])
        work(self)

    def telling(self: Arrived) -> None:
        store.set(key, "")
        wait(self)

    with pytest.MonkeyPatch.context() as patch:
        if holds and rank == 0:
            patch.setattr(Arrivals, "_work", late)
        patch.setattr(Arrived, "wait", telling)
        model = small_gpt2()
        config = offload_config(folder, ON_HOST, stage=2)
        zo.offload(model, config.model_copy(update={"device_memory": least_device_memory(model, config)}))
        optimizer = zo.AdamW(model.parameters(), **{**OPTIONS, "lr": 0.1})
        share.loss(model, global_batch(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            # It would make room for what comes next, and wait until the block's part is home.
            patch.setattr(Residency, "prefetch", lambda *_: None)
        seen = _out_of_a_block(model)
        if rank == 1:
            zo.release_device(model)
            zo.reclaim_device(model)
            seen = _out_of_a_block(model)
            store.set(key, "")
        dist.barrier()
        try:
            # Without a wait a race may be found here.
            zo.close(model)
        finally:
            # Rank 0 has the store.
            dist.barrier()
    return seen


@torch.no_grad()
def _out_of_a_block(model: nn.Module) -> float:
    hidden = torch.linspace(-1, 1, WIDTH).expand(1, 1, WIDTH)
    out = model.get_submodule("transformer.h.0")(hidden)
    return float((out if isinstance(out, torch.Tensor) else out[0]).sum())
