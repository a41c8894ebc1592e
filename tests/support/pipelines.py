"""Pipelines whose stages are offloaded; in a module that spawned processes can import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.environments import Homes
from support.rank_training import MAX_NORM, NUM_STEPS, OPTIONS, Loss, offload_config, whole_params
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import zerooffload as zo
from zerooffload.journal.history import record_path

NUM_BLOCKS = 4
NUM_MICRO_BATCHES = 4
_WIDTH = 16
_NUM_ROWS = 8
_SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


@dataclass(frozen=True)
class PipelineCase:
    """A pipeline: its schedule, how many stages it has, and how each of these is offloaded."""

    schedule: str
    num_stages: int
    zero_stage: int
    homes: Homes
    update: str = "after_backward"

    def __str__(self) -> str:
        return f"{self.schedule}-{self.num_stages}-ZeRO {self.zero_stage}-{'-'.join(self.homes)}-{self.update}"


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        return hidden + self.down(torch.tanh(self.up(hidden)))


def whole_model() -> nn.Sequential:
    """Of all stages, with the same values every time."""
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def rows(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets `[_NUM_ROWS, _WIDTH]` of a pipeline."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    inputs, targets = torch.randn(2, _NUM_ROWS, _WIDTH, generator=generator)
    return inputs, targets


def micro_batch_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of which a step's sum is the mean over the micro-batches."""
    return nn.functional.mse_loss(output, target) / NUM_MICRO_BATCHES


def losses(step: int, num_replicas: int) -> list[list[Loss]]:
    """Of each micro-batch and replica, for the whole model."""
    each = [
        zip(*(part.chunk(NUM_MICRO_BATCHES) for part in rows(step, rank)), strict=True) for rank in range(num_replicas)
    ]
    return [
        [partial(_loss, inputs=inputs, target=target) for inputs, target in of_ranks]
        for of_ranks in zip(*each, strict=True)
    ]


def _loss(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return micro_batch_loss(model(inputs), target)


def train_pipelines(_rank: int, world_size: int, folder: str, cases: Sequence[PipelineCase]) -> list[dict[str, Any]]:
    """Each pipeline after the other, all with the ranks that there are."""
    return [_train(world_size, str(Path(folder, str(number))), case) for number, case in enumerate(cases)]


def _train(world_size: int, folder: str, case: PipelineCase) -> dict[str, Any]:
    pipeline = Pipeline(world_size, folder, case)
    norms = [pipeline.step(step) for step in range(NUM_STEPS)]
    params = pipeline.params()
    pipeline.close()
    return {"norms": norms, "params": params}


class Pipeline:
    """A rank's stage of a pipeline, beside replicas of it."""

    def __init__(self, world_size: int, folder: str, case: PipelineCase) -> None:
        Path(folder).mkdir(exist_ok=True)
        mesh = pipeline_mesh(world_size, case.num_stages)
        self.replica = mesh["dp"].get_local_rank()
        self.number = mesh["pp"].get_local_rank()
        num_blocks = NUM_BLOCKS // case.num_stages
        blocks = whole_model()[self.number * num_blocks : (self.number + 1) * num_blocks]
        fields = {"stage": case.zero_stage, "update": case.update, "accumulation_steps": NUM_MICRO_BATCHES}
        config = offload_config(folder, case.homes, overwrite=False, **fields)
        self.model = zo.offload(blocks, config, process_group=mesh["dp"], pipeline_group=mesh["pp"])
        self.optimizer = zo.AdamW(self.model.parameters(), **OPTIONS)
        stage = PipelineStage(self.model, self.number, case.num_stages, torch.device("cpu"), group=mesh.get_group("pp"))
        self._is_last = self.number == case.num_stages - 1
        self._schedule = _SCHEDULES[case.schedule](
            stage, NUM_MICRO_BATCHES, loss_fn=micro_batch_loss, scale_grads=False
        )

    def backward(self, step: int) -> None:
        """Of all micro-batches."""
        inputs, targets = rows(step, self.replica)
        self._schedule.step(*([inputs] if self.number == 0 else []), **({"target": targets} if self._is_last else {}))

    def step(self, step: int) -> float:
        """The norm before clipping, over all stages."""
        self.backward(step)
        norm = zo.clip_grad_norm_(self.model, MAX_NORM).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def params(self) -> dict[str, torch.Tensor]:
        """This stage's, by the names that they have in the whole model too."""
        return whole_params(self.model)

    def close(self) -> None:
        """End the run."""
        zo.close(self.model)


def pipeline_mesh(world_size: int, num_stages: int) -> DeviceMesh:
    """Of stages and their replicas."""
    return init_device_mesh("cpu", (num_stages, world_size // num_stages), mesh_dim_names=("pp", "dp"))


def overflow_in_one_stage(_rank: int, world_size: int, folder: str) -> tuple[bool, float]:
    """Whether this stage was left alone, and the loss scale, after the first one alone got infinite gradients."""
    pipeline = Pipeline(world_size, folder, PipelineCase("GPipe", 2, 2, ("host", "host", "host")))
    before = pipeline.params()
    pipeline.backward(0)
    if pipeline.number == 0:
        with zo.full_params(pipeline.model, grads=True):
            for param in pipeline.model.parameters():
                assert param.grad is not None
                param.grad.fill_(torch.inf)
    scaler = zo.GradScaler(init_scale=2.0)
    scaler.step(pipeline.optimizer)
    scaler.update()
    after = pipeline.params()
    pipeline.close()
    return all(torch.equal(value, after[name]) for name, value in before.items()), scaler.get_scale()


def resume_pipeline(rank: int, world_size: int, folder: str) -> tuple[int, dict[str, Any]]:
    """The step from which a run continues whose last rank lost its newest record, and what it ends with."""
    case = PipelineCase("1F1B", 2, 3, ("nvme", "nvme", "host"))
    first = Pipeline(world_size, folder, case)
    for step in range(NUM_STEPS):
        first.step(step)
    first.close()
    if rank == world_size - 1:
        record_path(Path(folder, "zerooffload", f"rank-{rank:05d}"), NUM_STEPS).unlink()
    second = Pipeline(world_size, folder, case)
    done = zo.resume(second.model, second.optimizer)
    norms = [second.step(step) for step in range(done, NUM_STEPS)]
    params = second.params()
    second.close()
    return done, {"norms": norms, "params": params}


def refused(_rank: int, world_size: int) -> list[str]:
    """What is said to groups that make no pipeline, and where units are in one stage alone."""
    mesh = pipeline_mesh(world_size, 2)
    groups = {"process_group": mesh["dp"], "pipeline_group": mesh["pp"]}
    is_last = mesh["pp"].get_local_rank() == 1
    blocks = whole_model()[2:] if is_last else whole_model()[:2]
    return [
        error_of(lambda: zo.offload(whole_model(), pipeline_group=mesh["pp"])),
        error_of(lambda: zo.offload(whole_model(), process_group=mesh["dp"], pipeline_group=mesh["dp"])),
        error_of(lambda: zo.offload(whole_model(), process_group=mesh["dp"], pipeline_group=mesh)),
        error_of(lambda: zo.offload(blocks, zo.OffloadConfig(units=["0"]), **groups)),
    ]


def error_of(call: Callable[[], object]) -> str:
    """What is said, or that nothing is."""
    try:
        call()
    except zo.ZeroOffloadError as error:
        return str(error)
    return "accepted"
