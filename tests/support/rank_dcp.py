"""Ranks that come from FSDP2, and go to it; in a module that spawned processes can import."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.rank_training import OPTIONS, even_shares, global_batch, next_token_loss, offload_config
from support.small_models import small_llama
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerooffload as zo
from zerooffload.optim.rules import RULES
from zerooffload.optim.rules.rule import step_scalars
from zerooffload.planner import placement
from zerooffload.runtime import dcp_exchange, loading

NVME = ("nvme", "nvme", "nvme")
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Whole on rank 0, nothing on the others."""
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def with_buffer() -> nn.Module:
    model = small_llama()
    model.register_buffer("counts", torch.zeros(5))
    return model


def small_pieces() -> None:
    """A parameter is several chunks, and a chunk several boxes."""
    placement.CHUNK_NUMEL = 4096
    dcp_exchange._BOX_NUMEL = 1000
    loading._PIECE_NUMEL = 512


def sharded(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2, in fp32."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = with_buffer()
    for block in model.get_submodule("model.layers").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), **OPTIONS)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int, number: int) -> None:
    even_shares(world_size)[rank].loss(model, global_batch(number, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def save_from_fsdp2(rank: int, world_size: int, folder: str) -> None:
    """Two steps, and its states: as a checkpoint in two layouts, and whole in a file of rank 0."""
    model, optimizer = sharded(world_size)
    for number in range(2):
        step(model, optimizer, rank, world_size, number)
    model.get_buffer("counts").fill_(7)
    with quiet():
        states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save({"app": states, "progress": {"tokens": 5}}, checkpoint_id=f"{folder}/nested")
        flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
        dcp.save({**get_model_state_dict(model), "optimizer": flat}, checkpoint_id=f"{folder}/flat")
        whole = {
            "model": get_model_state_dict(model, options=FULL),
            "state": get_optimizer_state_dict(model, optimizer, options=FULL).get("state"),
        }
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    dist.barrier()


def offloaded(folder: str, **fields: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = with_buffer()
    zo.offload(model, offload_config(folder, NVME, **fields))
    return model, zo.AdamW(model.parameters(), **OPTIONS)


def states_of(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Masters, moments and steps, by name."""
    states: dict[str, Any] = {"state": {}}
    for (name, _), state in zip(model.named_parameters(), optimizer.state_dict()["state"].values(), strict=True):
        states["state"][name] = {key: value.clone() for key, value in state.items() if key != "remainder"}
    zo.export_safetensors(model, Path(folder) / "masters", dtype=torch.float32, overwrite=True)
    states["model"] = load_file(Path(folder) / "masters" / "model.safetensors")
    return states


def load_and_compare(rank: int, world_size: int, folder: str, name: str, fields: Mapping[str, Any]) -> list[str]:
    """Take over a checkpoint over other states; what is not as `whole.pt` says."""
    small_pieces()
    model, optimizer = offloaded(folder, **fields)
    step(model, optimizer, rank, world_size, 9)
    zo.load_dcp(f"{folder}/{name}", model, optimizer)
    found = states_of(folder, model, optimizer)
    zo.close(model)
    return differences(found, torch.load(f"{folder}/whole.pt", weights_only=True))


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    wrong = [name for name, tensor in found["model"].items() if not torch.equal(tensor, expected["model"][name])]
    for name, state in found["state"].items():
        keys = ("exp_avg", "exp_avg_sq", "step")
        wrong += [f"{key} of {name}" for key in keys if not torch.equal(state[key], expected["state"][name][key])]
    return wrong


def save_for_fsdp2(rank: int, world_size: int, folder: str, fields: Mapping[str, Any]) -> list[str]:
    """Two steps of ours, taken over by FSDP2 in both layouts; what differs there, and what does after a return."""
    small_pieces()
    model, optimizer = offloaded(folder, **fields)
    for number in range(2):
        step(model, optimizer, rank, world_size, number)
    model.get_buffer("counts").fill_(7)
    expected = states_of(folder, model, optimizer)
    zo.save_dcp(f"{folder}/ours", model, optimizer)
    zo.close(model)
    wrong = []
    for options in (None, FLAT):
        target, its_optimizer = sharded(world_size)
        with quiet():
            states = {
                "model": get_model_state_dict(target),
                "optimizer": get_optimizer_state_dict(target, its_optimizer, options=options),
            }
            dcp.load(states, checkpoint_id=f"{folder}/ours")
            set_model_state_dict(target, states["model"])
            set_optimizer_state_dict(target, its_optimizer, states["optimizer"], options=options)
            found = {
                "model": get_model_state_dict(target, options=FULL),
                "state": get_optimizer_state_dict(target, its_optimizer, options=FULL).get("state"),
            }
        if rank == 0:
            found["model"] = {name: found["model"][name] for name in expected["model"]}
            wrong += differences(found, expected)
        wrong += [] if its_optimizer.param_groups[0]["lr"] == OPTIONS["lr"] else ["lr"]
    if rank == 0:
        torch.save(expected, f"{folder}/whole.pt")
    dist.barrier()
    return wrong


@contextmanager
def quiet() -> Any:
    """torch's own calls use what torch has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def continue_both_ways(folder: str, name: str) -> list[str]:
    """Two more steps of one rank, from the checkpoint and in plain torch from the whole states: what differs."""
    whole = torch.load(f"{folder}/whole.pt", weights_only=True)
    plain = with_buffer()
    plain.load_state_dict(whole["model"])
    model, optimizer = offloaded(folder)
    zo.load_dcp(f"{folder}/{name}", model, optimizer)
    for number in (2, 3):
        step(model, optimizer, 0, 1, number)
        next_token_loss(plain, global_batch(number, 0)).backward()
        for each, param in plain.named_parameters():
            plain_update(param, whole["state"][each])
    expected = plain.state_dict()
    wrong = [each for each, tensor in model.state_dict().items() if not torch.equal(tensor, expected[each])]
    zo.close(model)
    return wrong


@torch.no_grad()
def plain_update(param: nn.Parameter, state: dict[str, torch.Tensor]) -> None:
    """A step of AdamW in the operations of the reference."""
    state["step"] += 1
    rule = RULES["adamw"]
    scalars = step_scalars(rule, {**OPTIONS, "maximize": False}, int(state["step"]), 1.0)
    moments = [state[moment.name].view(-1) for moment in rule.moments]
    rule.step(param.view(-1), moments, param.grad.view(-1), scalars.values)
    param.grad = None
