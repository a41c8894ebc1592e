"""Checkpoints as DeepSpeed's ZeRO lays them out: made by hand, and by DeepSpeed where it is installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")


class Stage:
    """Pickles as an enumeration of DeepSpeed's does: a class that is not known here, with a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return Stage, (self.number,)


class Net(nn.Module):
    """With odd sizes, a frozen bias, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 5)
        self.inside = nn.Linear(5, 5)
        self.inside.bias.requires_grad_(requires_grad=False)
        self.out = nn.Linear(5, 11, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3, 1))
        self.register_buffer("counts", torch.arange(3.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.inside(self.embed(tokens)).tanh() * self.scale.sum()
        return self.out(hidden).float().pow(2).mean()


GROUPS = (("embed.weight", "scale"), ("inside.weight",))
"""The parameters of the optimizer's groups."""


def states_of(net: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Some values and moments of each trained parameter."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: {state: torch.rand(param.shape, generator=generator) for state in ("values", *MOMENTS)}
        for name, param in net.named_parameters()
        if param.requires_grad
    }


def write_by_hand(folder: Path, stage: int, world_size: int, net: nn.Module, num_steps: int) -> None:
    """What DeepSpeed 0.19 writes of `states_of(net)`, in each group after another number of steps."""
    states, params = states_of(net), dict(net.named_parameters())
    step_folder = folder / "global_step7"
    step_folder.mkdir(parents=True)
    (folder / "latest").write_text("global_step7", encoding="utf-8")
    cut = _cut_parameters if stage == 3 else _cut_groups
    for rank in range(world_size):
        vectors = [
            {state: cut(states, names, state, rank, world_size) for state in ("values", *MOMENTS)} for names in GROUPS
        ]
        kept = {
            "state": {
                group: {"step": torch.tensor(float(num_steps + group)), **{name: of_group[name] for name in MOMENTS}}
                for group, of_group in enumerate(vectors)
            },
            "param_groups": [{"lr": 0.1}, {"lr": 0.2}],
        }
        values = [of_group["values"] for of_group in vectors]
        of_rank: dict[str, Any] = {"zero_stage": Stage(stage), "loss_scaler": Stage(0)}
        if stage == 3:
            of_rank |= {"partition_count": world_size, "optimizer_state_dict": kept, "fp32_flat_groups": values}
        else:
            paddings = [[0] * len(names) for names in GROUPS]
            of_rank |= {"partition_count": [world_size] * len(GROUPS), "param_alignment_paddings": paddings}
            of_rank |= {"base_optimizer_state": kept, "single_partition_of_fp32_groups": values}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": of_rank}, step_folder / f"bf16_{name}_optim_states.pt")
        if stage == 3 or not rank:
            bias = params["inside.bias"].detach()
            fragment = _share(bias, rank, world_size).clone() if stage == 3 else bias
            module = {
                "module": {"counts": net.get_buffer("counts"), **({} if stage == 3 else {"inside.bias": bias})},
                "buffer_names": ["counts"],
                "param_shapes": [{name: params[name].shape for name in names} for names in GROUPS],
                # Stage 1 does not tell.
                "frozen_param_shapes": {} if stage == 1 else {"inside.bias": bias.shape},
                "frozen_param_fragments": {} if stage == 1 else {"inside.bias": fragment},
                "shared_params": {"out.weight": "embed.weight"},
                "mp_world_size": 1,
            }
            torch.save(module, step_folder / f"{name if stage == 3 else 'mp_rank_00'}_model_states.pt")


def _share(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's `ceil(numel / ranks)` elements, padded."""
    share = -(-tensor.numel() // world_size)
    padded = torch.cat(
        [tensor.reshape(-1), torch.full((share * world_size - tensor.numel(),), -9.0, dtype=tensor.dtype)]
    )
    return padded[rank * share : (rank + 1) * share]


def _cut_parameters(
    states: Mapping[str, Any], names: tuple[str, ...], state: str, rank: int, world_size: int
) -> torch.Tensor:
    return torch.cat([_share(states[name][state], rank, world_size) for name in names])


def _cut_groups(
    states: Mapping[str, Any], names: tuple[str, ...], state: str, rank: int, world_size: int
) -> torch.Tensor:
    return _share(torch.cat([states[name][state].reshape(-1) for name in names]), rank, world_size).clone()


def train_with_deepspeed(rank: int, world_size: int, port: int, folder: str, stage: int) -> None:
    """Three steps, a checkpoint, and rank 0's consolidation of it in `whole.pt`.

    In a process without a process group: in one that has it, DeepSpeed compiles things as it is imported.
    """
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size), DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed  # noqa: PLC0415
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # noqa: PLC0415

    # It would be compiled too.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    net = Net()
    params = dict(net.named_parameters())
    groups = [{"params": [params[name] for name in names]} for names in GROUPS]
    config = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.init_distributed("gloo")
    engine, _, _, _ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
    for step in range(3):
        engine.backward(engine(torch.tensor([[step, rank + 4, 9]])))
        engine.step()
    engine.save_checkpoint(folder)
    torch.distributed.barrier()
    if rank == 0:
        torch.save(dict(get_fp32_state_dict_from_zero_checkpoint(folder)), f"{folder}/whole.pt")
    torch.distributed.destroy_process_group()
