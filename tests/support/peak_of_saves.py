"""How much memory saving and loading take beside training; in a module that spawned processes can import."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zerooffload as zo
from zerooffload.formats import MIB
from zerooffload.planner import placement
from zerooffload.telemetry import process_peak_bytes
from zerooffload.train.process import give_freed_memory_back

WIDTH = 640
NUM_BLOCKS = 20
BUDGET_BYTES = 18 * MIB


def state_bytes() -> int:
    """Of the model: fp32 parameters and two moments."""
    return 12 * NUM_BLOCKS * WIDTH * (WIDTH + 1)


def write_deepspeed(folder: Path) -> None:
    """What DeepSpeed's ZeRO-3 would have saved of the model on one rank, with any values."""
    shapes = {
        f"{block}.0.{name}": shape
        for block in range(NUM_BLOCKS)
        for name, shape in (("weight", torch.Size([WIDTH, WIDTH])), ("bias", torch.Size([WIDTH])))
    }
    values, exp_avg, exp_avg_sq = (torch.rand(state_bytes() // 12) for _ in range(3))
    step_folder = folder / "global_step3"
    step_folder.mkdir(parents=True)
    (folder / "latest").write_text(step_folder.name, encoding="utf-8")
    states = {0: {"step": torch.tensor(3.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}}
    optimizer = {
        "zero_stage": 3,
        "partition_count": 1,
        "optimizer_state_dict": {"state": states, "param_groups": [{"lr": 0.1}]},
        "fp32_flat_groups": [values],
    }
    module = {
        "module": {},
        "buffer_names": [],
        "param_shapes": [shapes],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "mp_world_size": 1,
    }
    name = "zero_pp_rank_0_mp_rank_00"
    torch.save({"optimizer_state_dict": optimizer}, step_folder / f"bf16_{name}_optim_states.pt")
    torch.save(module, step_folder / f"{name}_model_states.pt")


def peaks(_rank: int, world_size: int, folder: str, *, loads: str) -> dict[str, int]:
    """The process's peak in bytes, so far, after training, a save, one beside training, and a load.

    Or after one load alone, of what is in "checkpoints" or "deepspeed".
    """
    torch.set_num_threads(1)
    # Else the C library keeps what is freed, more or less of it by chance.
    give_freed_memory_back()
    # A chunk of any model takes a part of this one's budget that is as small as a large one's.
    placement.CHUNK_NUMEL = 1 << 15
    drive = Path(folder, f"drive-{loads}")
    drive.mkdir(exist_ok=True)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_BLOCKS)))
    homes = dict.fromkeys(("params", "optimizer", "gradients"), "nvme")
    budget = BUDGET_BYTES // world_size
    config = zo.OffloadConfig(**homes, nvme_paths=[drive], host_memory=budget, threads=1, atomic_steps=False)  # type: ignore[arg-type]
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters())
    found: dict[str, int] = {}
    try:
        if loads:
            load = zo.load if loads == "checkpoints" else zo.load_deepspeed
            load(Path(folder, loads), model, optimizer)
            return {loads: process_peak_bytes()}
        for _ in range(3):
            # The first ones do not reach it.
            _train(model, optimizer)
        found["training"] = process_peak_bytes()
        zo.save(Path(folder, "checkpoints"), model, optimizer)
        found["save"] = process_peak_bytes()
        ticket = zo.save(Path(folder, "checkpoints"), model, optimizer, blocking=False, keep_last=1)
        _train(model, optimizer)
        ticket.wait()
        found["save beside training"] = process_peak_bytes()
        zo.load(Path(folder, "checkpoints"), model, optimizer)
        found["load"] = process_peak_bytes()
    finally:
        zo.close(model)
    return found


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
