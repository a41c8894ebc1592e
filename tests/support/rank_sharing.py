"""Ranks beside devices with memory of their own, whose whole parameters are at home on host."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.environments import Homes, simulated_devices
from support.rank_accounts import least_device_memory
from support.rank_resume import Setup, resume_on_devices
from support.rank_training import OPTIONS, even_shares, global_batch, offload_config, train, whole_params
from support.small_models import VOCABULARY, batch, small_gpt2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerooffload as zo
from zerooffload.optim.stream import StreamedUpdate
from zerooffload.runtime.home_reads import HomeReads
from zerooffload.runtime.resources import Resources
from zerooffload.runtime.snapshots import Snapshot, Snapshots
from zerooffload.sharding.collectives import GroupCollectives
from zerooffload.sharding.registry import residence_of

NUM_STEPS = 3
WIDTH = 256
ON_HOST: Homes = ("host", "host", "host")


class Adapted(nn.Module):
    """A frozen layer with a trained one of few parameters beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        return hidden + torch.tanh(self.base(hidden) + self.up(self.down(hidden)))


class MostlyFrozen(nn.Module):
    """An embedding, which is frozen too, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = hidden @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@contextmanager
def apart(number: int) -> Iterator[None]:
    """As if this rank was on the machine of that number: by its own, ranks are on machines of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerooffload.accelerator.shared_pages.this_machine", lambda: f"machine {number}")
        yield


def offloaded(folder: str, stage: int) -> nn.Module:
    """On this rank."""
    torch.manual_seed(5)
    return zo.offload(MostlyFrozen(), offload_config(folder, ON_HOST, stage=stage))


def train_with_and_without(
    rank: int, world_size: int, folder: str, stage: int, machines: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """On one host copy, or one for each of these machines, which are the ranks'; and on each rank's own."""
    del world_size
    with simulated_devices():
        with apart(machines[rank]) if machines else nullcontext():
            shared = _train(rank, folder, stage)
        gc.collect()
        with apart(rank):
            own = _train(rank, folder, stage)
    return [shared, own]


def _train(rank: int, folder: str, stage: int) -> dict[str, Any]:
    model = offloaded(folder, stage)
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], **OPTIONS)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with zo.full_params(model.get_submodule("blocks.1")), torch.no_grad():
            model.get_parameter("blocks.1.base.weight").mul_(0.5)
            model.get_parameter("blocks.1.down.weight").mul_(0.5)
    # All have touched all pages, and hold them until all have looked.
    dist.barrier()
    resident, own_part = shared_memory()
    dist.barrier()
    result = {
        "losses": losses,
        "params": whole_params(model),
        "leased": {tier.name: tier.leased_bytes for tier in zo.step_report(model).tiers},
        "whole": _flats_of_all(model, stage),
        "resident": resident,
        "own_part": own_part,
    }
    zo.close(model)
    return result


def _flats_of_all(model: nn.Module, stage: int) -> list[int]:
    """Bytes of each flat buffer that is the same on all ranks: frozen, or updated by one of them each part."""
    residences = [residence_of(param) for param in model.parameters() if stage > 0 or not param.requires_grad]
    return list({id(item.part): item.part.flat.layout.nbytes for item in residences if item is not None}.values())


def shared_memory() -> tuple[int, int]:
    """Bytes of the ranks' memory that are mapped here and resident, and this process's part of them."""
    sections = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ours = [section for section in sections if "/memfd:zerooffload" in section]

    def total(name: str) -> int:
        return sum(int(found) * 1024 for section in ours for found in re.findall(rf"(?m)^{name}:\s+(\d+)", section))

    return total("Rss"), total("Pss")


@dataclass(frozen=True)
class Case:
    """A training whose parameters are on host, with these further fields of `OffloadConfig`.

    Attributes
    ----------
    machines : tuple[int, ...]
        On which the ranks are; all on one if there is none.
    """

    stage: int
    update: str
    optimizer: str = "host"
    num_replicas: int = 1
    machines: tuple[int, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


@contextmanager
def counted_homes() -> Iterator[list[str]]:
    """The names of the states that get a home in memory that the ranks share."""
    names: list[str] = []
    share = Resources.share

    def noting(self: Resources, state: Any) -> Any:
        names.append(state.name)
        return share(self, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Resources, "share", noting)
        yield names


def train_in_the_least_window(rank: int, world_size: int, folder: str, cases: Sequence[Case]) -> list[str]:
    """What is not the same on one host copy as on each rank's own, while units come and go."""
    wrong: list[str] = []
    owns: dict[tuple[int, str | None], dict[str, Any]] = {}
    for case in cases:
        with simulated_devices():
            key = (case.num_replicas, case.fields.get("compute_dtype"))
            if key not in owns:
                plainly = Case(case.stage, "after_backward", num_replicas=key[0], fields={"compute_dtype": key[1]})
                with apart(rank), counted_homes() as names:
                    owns[key] = _train_case(rank, world_size, folder, plainly)
                assert not names
            with counted_homes() as names, apart(case.machines[rank]) if case.machines else nullcontext():
                shared = _train_case(rank, world_size, folder, case)
        own, params = owns[key], owns[key]["params"].items()
        wrong += [f"{case}: {name}" for name in ("losses", "norms") if shared[name] != own[name]]
        wrong += [f"{case}: {name}" for name, value in params if not torch.equal(shared["params"][name], value)]
        wrong += [f"{case}: {run['leased']}" for run in (shared, own) if run["leased"] != run["planned"]]
        # Nobody takes home what its owner has put there; what nobody here owns, the machine's ranks do together.
        num_shards = world_size // case.num_replicas
        num_here = case.machines.count(case.machines[rank]) if case.machines else num_shards
        of_others, of_other_machines = (own["flat_bytes"] * (num_shards - many) // num_shards for many in (1, num_here))
        taken = of_others + shared["moved"]["copy_out"] - own["moved"]["copy_out"]
        everyones: list[tuple[int, int]] = [(0, 0)] * world_size
        dist.all_gather_object(everyones, (case.machines[rank] if case.machines else rank, taken))
        if case.machines:
            taken = sum(many for machine, many in everyones if machine == case.machines[rank])
        if bool(names) != (num_here > 1) or taken != of_other_machines:
            wrong.append(f"{case}: {names} are shared; {taken} {of_other_machines} {shared['moved']} {own['moved']}")
    return wrong


def _train_case(rank: int, world_size: int, folder: str, case: Case) -> dict[str, Any]:
    ranks = None
    if case.num_replicas > 1:
        ranks = init_device_mesh("cpu", (case.num_replicas, world_size // case.num_replicas))
    homes: Homes = ("host", case.optimizer, "host")
    fields = {"stage": case.stage, "update": case.update, "accumulation_steps": 2, **case.fields}
    fields["device_memory"] = least_device_memory(small_gpt2(), offload_config(folder, homes, **fields), ranks)
    return train(even_shares(world_size)[rank], folder, homes, process_group=ranks, **fields)


def resume_on_one_copy(rank: int, world_size: int, folder: str, stages: tuple[int, int]) -> dict[str, Any]:
    """What `train_damage_resume` returns of parameters that are shared in both stages, and copied to files."""
    with counted_homes() as names:
        result = resume_on_devices(rank, world_size, folder, Setup(ON_HOST, stages, durable=True))
    assert names
    return result


def save_beside_training_and_load(rank: int, world_size: int, folder: str) -> list[str]:
    """What differs from the moment of the save, after further steps and a load; and from the steps after it."""
    share, checkpoints = even_shares(world_size)[rank], Path(folder, "checkpoints")
    with simulated_devices(on_files=True), counted_homes() as names:
        model = small_gpt2()
        config = offload_config(folder, ON_HOST, stage=2, update="under_next_forward")
        device_memory = least_device_memory(model, config)
        zo.offload(model, config.model_copy(update={"device_memory": device_memory}))
        optimizer = zo.AdamW(model.parameters(), **OPTIONS)

        def steps(first: int) -> list[float]:
            losses = []
            for step in range(first, first + 2):
                loss = share.loss(model, global_batch(step, 0))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        steps(0)
        ticket = zo.save(checkpoints, model, optimizer, blocking=False)
        later = steps(2)
        after = whole_params(model)
        ticket.wait()
        zo.load(checkpoints, model, optimizer)
        again = steps(2)
        loaded = whole_params(model)
        zo.close(model)
    wrong = [name for name, value in after.items() if not torch.equal(loaded[name], value)]
    wrong += [] if again == later else [f"{later} {again}"]
    return wrong if names else ["nothing was shared"]


def _telling(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    """The function, of which the other ranks learn by `key` that this one is about to call it."""
    store = dist.distributed_c10d._get_default_store()

    def told(*args: Any) -> Any:
        store.set(key, "")
        return function(*args)

    return told


def update_in_turn(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    """Losses on each rank's own copy, and on one for all, where one rank is early or late.

    "own", "after_backward", "under_next_forward"   Rank 1 computes one more loss each time when rank 0 is in its step,
                                                    or through with it.
    "not in turn"                                   So too, where no rank waits for the others before it updates.
    "own, late", "late"                             Rank 0 updates when rank 1 already waits for what that writes.
    """
    losses = {}
    with simulated_devices():
        with apart(rank):
            losses["own"] = _look(rank, world_size, folder, "own")
            losses["own, late"] = _wait_for_late_update(rank, world_size, folder, "own")
        for update in ("after_backward", "under_next_forward"):
            losses[update] = _look(rank, world_size, folder, update, update=update)
        losses["late"] = _wait_for_late_update(rank, world_size, folder, "shared")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HomeReads, "let_shared_change", lambda *_: None)
            losses["not in turn"] = _look(rank, world_size, folder, "not in turn")
    return losses


def _look(rank: int, world_size: int, folder: str, run: str, *, update: str = "after_backward") -> list[float]:
    store = dist.distributed_c10d._get_default_store()
    share, losses = even_shares(world_size)[rank], []
    config = offload_config(folder, ON_HOST, stage=2, update=update)
    model = small_gpt2()
    zo.offload(model, config.model_copy(update={"device_memory": least_device_memory(model, config)}))
    optimizer = zo.AdamW(model.parameters(), **{**OPTIONS, "lr": 0.1})
    for step in range(2):
        loss = share.loss(model, global_batch(step, 0))
        loss.backward()
        losses.append(loss.item())
        key = f"{run} {step}"
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(GroupCollectives, "gather_of_shards", _telling(GroupCollectives.gather_of_shards, key))
            elif rank == 1:
                store.wait([key])
                with torch.no_grad():
                    losses.append(share.loss(model, global_batch(step, 1)).item())
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            store.set(key, "")
    zo.close(model)
    # Rank 0 has the store.
    dist.barrier()
    return losses


def _wait_for_late_update(rank: int, world_size: int, folder: str, run: str) -> list[float]:
    store = dist.distributed_c10d._get_default_store()
    share, losses = even_shares(world_size)[rank], []
    config = offload_config(folder, ON_HOST, stage=2, update="under_next_forward")
    model = small_gpt2()
    zo.offload(model, config.model_copy(update={"device_memory": least_device_memory(model, config)}))
    optimizer = zo.AdamW(model.parameters(), **{**OPTIONS, "lr": 0.1})
    share.loss(model, global_batch(0, 0)).backward()
    with pytest.MonkeyPatch.context() as patch:
        step, key = StreamedUpdate._step, f"late {run}"

        def late(self: StreamedUpdate, staged: Any) -> None:
            store.wait([key])
            step(self, staged)

        if rank == 0:
            patch.setattr(StreamedUpdate, "_step", late)
        elif rank == 1:
            patch.setattr(GroupCollectives, "all_gather", _telling(GroupCollectives.all_gather, key))
        optimizer.step()
        optimizer.zero_grad()
        for micro_step in range(2):
            with torch.no_grad():
                losses.append(share.loss(model, global_batch(1, micro_step)).item())
    zo.close(model)
    return losses


def edit_one_after_the_other(
    rank: int, _world_size: int, folder: str, names: Sequence[str]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What every rank sees and doubles, rank 0 first: the others begin when it has written, or waits for them.

    Of each module the weight as it was seen before, and afterwards.
    """
    store = dist.distributed_c10d._get_default_store()
    seen_and_edited = []
    with simulated_devices():
        model = offloaded(folder, 2)
        for name in names:
            with pytest.MonkeyPatch.context() as patch:
                weight, key = model.get_parameter(f"{name}.weight"), f"edited {name}"
                if rank == 0:
                    patch.setattr(GroupCollectives, "gather_objects", _telling(GroupCollectives.gather_objects, key))
                else:
                    store.wait([key])
                with zo.full_params(model.get_submodule(name)), torch.no_grad():
                    seen = weight.detach().clone()
                    weight.mul_(2)
                if rank == 0:
                    store.set(key, "")
            seen_and_edited.append((seen, whole_params(model)[f"{name}.weight"]))
        zo.close(model)
    return seen_and_edited


def edit_beside_a_save(rank: int, _world_size: int, folder: str) -> torch.Tensor:
    """What a save has of a frozen parameter that is edited while rank 1's save has not read anything.

    That begins to read when it is asked to, and rank 1 writes when rank 0 is through.
    """
    store, is_asked = dist.distributed_c10d._get_default_store(), threading.Event()
    following, gather, before_change = Snapshot.next, GroupCollectives.gather_of_shards, Snapshots.before_change

    def asking(self: Snapshots, *chunk: Any) -> None:
        is_asked.set()
        before_change(self, *chunk)

    def late(self: Snapshot) -> Any:
        is_asked.wait()
        return following(self)

    def behind(self: GroupCollectives, value: Any) -> list[Any]:
        values = gather(self, value)
        store.wait(["edited"])
        return values

    with simulated_devices(on_files=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshots, "before_change", asking)
        model = offloaded(folder, 2)
        optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], **OPTIONS)
        if rank == 1:
            patch.setattr(Snapshot, "next", late)
            patch.setattr(GroupCollectives, "gather_of_shards", behind)
        ticket = zo.save(Path(folder, "checkpoints"), model, optimizer, blocking=False)
        with zo.full_params(model.get_submodule("embed")), torch.no_grad():
            model.get_parameter("embed.weight").mul_(2)
        if rank == 0:
            store.set("edited", "")
        ticket.wait()
        zo.load(ticket.path, model, optimizer)
        saved = whole_params(model)["embed.weight"]
        zo.close(model)
    return saved


def lose_a_rank(rank: int, world_size: int, folder: str, *, in_update: bool) -> tuple[str, int]:
    """The last rank is killed after a backward, or in the hidden update that follows.

    What the others are told, and what they then have of the memory.
    """
    with simulated_devices(), pytest.MonkeyPatch.context() as patch:
        model = zo.offload(MostlyFrozen(), offload_config(folder, ON_HOST, stage=2, update="under_next_forward"))
        optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], **OPTIONS)
        model(batch(0, rank)).backward()
        if rank == world_size - 1:
            if in_update:
                patch.setattr(StreamedUpdate, "_step", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.step()
            model(batch(1, rank))
            told = ""
        except zo.ZeroOffloadError as error:
            told = str(error)
        zo.close(model)
    del model, optimizer
    gc.collect()
    return told, shared_memory()[0]
