"""Ranks that train in each of ZeRO's stages; in a module that spawned processes can import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from support.environments import Homes, simulated_devices
from support.leaky_waits import LeakyWaits
from support.rank_accounts import least_device_memory
from support.rank_sharing import apart
from support.rank_training import OPTIONS, Share, even_shares, global_batch, offload_config, train
from support.small_models import small_gpt2

import zerooffload as zo
from zerooffload.errors import ZeroOffloadError
from zerooffload.telemetry import Wait, Waits
from zerooffload.telemetry.recorder import CountingRecorder

STAGES = (0, 1, 2, 3)
Case = tuple[int, Homes]
"""A stage, and homes."""
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


def train_in_stages(
    rank: int,
    world_size: int,
    folder: str,
    cases: Sequence[Case],
    *,
    fields: Mapping[str, Any] = NO_FIELDS,
    least_window: bool = False,
) -> list[str]:
    """What is not as in stage 3 with all on host; by stage and homes.

    With `least_window` units come and go in the least device memory with which a run is accepted.
    """
    share, wrong = even_shares(world_size)[rank], []
    expected = train(share, folder, **fields)
    for stage, homes in cases:
        given = {**fields, "stage": stage}
        if least_window:
            given["device_memory"] = least_device_memory(small_gpt2(), offload_config(folder, homes, **given))
        found = train(share, folder, homes, **given)
        wrong += [f"{stage} {homes}: {name}" for name in ("losses", "norms") if found[name] != expected[name]]
        params = found["params"].items()
        wrong += [f"{stage} {homes}: {name}" for name, got in params if not torch.equal(got, expected["params"][name])]
        wrong += [f"{stage} {homes}: leases"] if found["leased"] != found["planned"] else []
    return wrong


def train_in_stages_on_devices(
    rank: int,
    world_size: int,
    folder: str,
    cases: Sequence[Case],
    *,
    fields: Mapping[str, Any] = NO_FIELDS,
    together: bool = True,
) -> list[str]:
    """The same on simulated devices with memory of their own, as little as can be, and late drives.

    Without `together` the ranks are on machines of their own, so that each has its own copy of what is whole.
    """
    with simulated_devices(), nullcontext() if together else apart(rank):
        return train_in_stages(rank, world_size, folder, cases, fields=fields, least_window=True)


def train_without(rank: int, world_size: int, folder: str, case: Case, leak: tuple[str, Wait]) -> tuple[list[str], int]:
    """What goes wrong on simulated devices without a wait at a place, and how often it was left out.

    The ranks are on machines of their own.
    """
    place, wait = leak
    leaky: list[LeakyWaits] = []

    def make_waits(recorder: CountingRecorder) -> Waits:
        leaky.append(LeakyWaits(recorder, wait, place))
        return leaky[-1]

    with simulated_devices(make_waits), apart(rank):
        try:
            wrong = train_in_stages(rank, world_size, folder, [case], least_window=True)
        except (ZeroOffloadError, RuntimeError) as error:
            wrong = [repr(error)]
    return wrong, sum(waits.leaked[place] for waits in leaky)


def edit_in_stages(rank: int, world_size: int, folder: str, cases: Sequence[Case]) -> list[str]:
    """What is not as in stage 3 with all on host where values, gradients and optimizer states are seen and changed."""
    share = even_shares(world_size)[rank]
    expected = _edited(share, folder, 3, ("host", "host", "host"))
    wrong = []
    for stage, homes in cases:
        found = _edited(share, folder, stage, homes)
        assert found.keys() == expected.keys()
        wrong += [f"{stage} {homes}: {name}" for name, got in found.items() if not torch.equal(got, expected[name])]
    return wrong


def _edited(share: Share, folder: str, stage: int, homes: Homes) -> dict[str, torch.Tensor]:
    """All that can be seen, by name."""
    model, seen = small_gpt2(), {}
    model.get_parameter("transformer.wpe.weight").requires_grad_(False)
    config = offload_config(folder, homes, stage=stage, compute_dtype="bf16")
    zo.offload(model, config.model_copy(update={"device_memory": least_device_memory(model, config)}))
    optimizer = zo.AdamW(model.parameters(), **OPTIONS)
    block = model.get_submodule("transformer.h.0")
    for step in range(2):
        for micro_step in range(2):
            share.loss(model, global_batch(step, micro_step)).backward()
        some = list(block.parameters())[1:]
        seen[f"norm {step}"] = zo.clip_grad_norm_(some, 0.01)
        seen[f"largest {step}"] = zo.clip_grad_norm_(model, 1e3, norm_type=float("inf"))
        with zo.full_params(block, grads=True), torch.no_grad():
            for name, param in block.named_parameters():
                assert param.grad is not None
                seen[f"gradient {name} {step}"] = param.grad.clone()
                param.grad[0].mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        with zo.full_params(block), torch.no_grad():
            for param in block.parameters():
                param[0].add_(1.0 / 64)
        seen[f"evaluated {step}"] = share.loss(model, global_batch(step, 2)).detach()
        state = optimizer.state_dict()
        for of_param in state["state"].values():
            of_param["exp_avg"] = of_param["exp_avg"] * 0.5
        optimizer.load_state_dict(state)
    seen |= {name: value.clone() for name, value in model.state_dict().items()}
    for index, of_param in optimizer.state_dict()["state"].items():
        seen |= {f"{index} {name}": value for name, value in of_param.items()}
    zo.close(model)
    return seen
