"""Models that tensor parallelism has cut, offloaded and plain; in a module that spawned processes can import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.environments import Homes
from support.rank_emulation import EmulatedRanks
from support.rank_training import MAX_NORM, NUM_MICRO_STEPS, NUM_STEPS, OPTIONS, Loss, offload_config
from support.slices_by_hand import in_slices_by_hand
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zerooffload as zo
from zerooffload.sharding.local_tensors import local_tensor

WIDTH = 16
_VOCABULARY = 11
"""No multiple of the ranks: one has more rows of the embedding than the other."""


class Block(nn.Module):
    """A residual block. Of its scale, if that is cut, it uses the local tensor, as code for several ranks does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        scale = self.scale
        if isinstance(scale, DTensor) and not isinstance(hidden, DTensor):
            scale = scale.to_local(grad_placements=[Partial()])
        return hidden + scale * self.down(torch.tanh(self.up(self.norm(hidden))))

    def replicate_scale(self, mesh: DeviceMesh) -> None:
        """Over a mesh, of which each rank has a part of the sequence."""
        self.scale = nn.Parameter(distribute_tensor(self.scale.detach(), mesh, [Replicate()]))


class Model(nn.Module):
    """Token by token: embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, _VOCABULARY, bias=False)
        self.checkpoints = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `[batch, length, _VOCABULARY]` of token ids `[batch, length]`."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpoints else block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def _with_plain_norms(model: Model, mesh: DeviceMesh) -> None:
    """Linear layers and the embedding are cut; the norms are plain parameters, the same on each rank."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def _with_sequence_parallelism(model: Model, mesh: DeviceMesh) -> None:
    """Between the layers each rank has a part of the sequence; the norms' gradients are sums over the ranks."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(use_local_output=True),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        block.replicate_scale(mesh)


def _with_distributed_activations(model: Model, mesh: DeviceMesh) -> None:
    """As before, but what modules hand each other are DTensors."""
    by_sequence = {"output_layouts": Shard(1), "use_local_output": False}
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), **by_sequence),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "blocks.*.down": RowwiseParallel(**by_sequence),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        block.replicate_scale(mesh)


def _tied(model: Model, mesh: DeviceMesh) -> None:
    _with_sequence_parallelism(model, mesh)
    model.head.weight = model.embed.weight


def _partly_frozen_and_checkpointed(model: Model, mesh: DeviceMesh) -> None:
    _with_sequence_parallelism(model, mesh)
    model.embed.requires_grad_(requires_grad=False)
    model.blocks[0].requires_grad_(requires_grad=False)
    model.checkpoints = True


CUTS: dict[str, Callable[[Model, DeviceMesh], None]] = {
    "plain norms": _with_plain_norms,
    "sequence parallel": _with_sequence_parallelism,
    "distributed activations": _with_distributed_activations,
    "tied": _tied,
    "partly frozen, checkpointed": _partly_frozen_and_checkpointed,
}


@dataclass(frozen=True)
class Case:
    """How a model is cut, and how it is offloaded."""

    cut: str
    zero_stage: int
    homes: Homes
    update: str = "after_backward"
    micro_batch_size: int | None = None
    compute_dtype: str | None = None
    moments: str = "fp32"

    def __str__(self) -> str:
        slices = "-sliced" if self.micro_batch_size else ""
        dtype = self.compute_dtype or "fp32"
        return f"{self.cut}-ZeRO {self.zero_stage}-{'-'.join(self.homes)}-{self.update}-{dtype}{slices}"


def cut_model(cut: str, mesh: DeviceMesh) -> Model:
    """With the same values every time, cut over a dimension of a mesh."""
    torch.manual_seed(3)
    model = Model()
    CUTS[cut](model, mesh)
    return model


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each token with itself."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tokens_of(step: int, micro_step: int, replica: int) -> torch.Tensor:
    """Token ids `[4, 6]`."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_step + replica)
    return torch.randint(0, _VOCABULARY, (4, 6), generator=generator)


def two_by_two() -> DeviceMesh:
    """Of replicas and of the ranks that have parts of one."""
    return mesh_of(2, 2)


def mesh_of(num_replicas: int, num_parts: int) -> DeviceMesh:
    """Of so many replicas, and ranks that have parts of one."""
    return init_device_mesh("cpu", (num_replicas, num_parts), mesh_dim_names=("dp", "tp"))


class CutReplicas(EmulatedRanks):
    """The replicas of a cut model, in plain PyTorch: each rank of the mesh has its part of all of them."""

    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        model = cut_model(case.cut, mesh)
        if case.micro_batch_size is not None:
            in_slices_by_hand(case.micro_batch_size)(model)
        masters: dict[str, torch.Tensor] = {}
        if case.compute_dtype == "bf16":
            masters = {name: local_copy(param) for name, param in model.named_parameters()}
            model.to(torch.bfloat16)
        super().__init__(model, 2, sums_in_fp32=bool(masters), **OPTIONS)
        for name, master in masters.items():
            self.optimizer.take_master(local_tensor(self._params[name]), master)

    def norm_sums(self) -> list[float]:
        """Those of the parts too, in the order of their ranks."""
        of_parts: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(of_parts, super().norm_sums(), group=self._group)
        return [of_shard for of_part in of_parts for of_shard in of_part]


def train_cut_models(_rank: int, _world_size: int, folder: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What each case ends with, and what it is in plain PyTorch."""
    mesh, plain = two_by_two(), dict[Any, Any]()
    results = []
    for number, case in enumerate(cases):
        kind = (case.cut, case.micro_batch_size, case.compute_dtype)
        if kind not in plain:
            plain[kind] = train_plain(case, mesh)
        own = str(Path(folder, str(number)))
        results.append({"plain": plain[kind], "offloaded": CutModel(own, case, mesh).train()})
    return results


def train_plain(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    """What a case is to end with."""
    replicas = CutReplicas(case, mesh["tp"])
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for micro_step in range(NUM_MICRO_STEPS):
            each: list[Loss] = [partial(loss_of, tokens=tokens_of(step, micro_step, replica)) for replica in range(2)]
            losses.append(replicas.micro_step(each, NUM_MICRO_STEPS)[mesh["dp"].get_local_rank()])
        norms.append(replicas.clip(MAX_NORM))
        replicas.step()
    return {"losses": losses, "norms": norms, "params": local_values(replicas.model)}


class CutModel:
    """A rank's part of an offloaded model, beside a replica of it."""

    def __init__(self, folder: str, case: Case, mesh: DeviceMesh) -> None:
        Path(folder).mkdir(exist_ok=True)
        self.replica = mesh["dp"].get_local_rank()
        self.model = cut_model(case.cut, mesh["tp"])
        config = offload_config(
            folder,
            case.homes,
            overwrite=False,
            stage=case.zero_stage,
            update=case.update,
            accumulation_steps=NUM_MICRO_STEPS,
            micro_batch_size=case.micro_batch_size,
            compute_dtype=case.compute_dtype,
            moments=case.moments,
        )
        zo.offload(self.model, config, process_group=mesh["dp"])
        self.optimizer = zo.AdamW(self.model.parameters(), **OPTIONS)

    def backward(self, step: int) -> list[float]:
        """Of all micro-steps: their losses."""
        losses = []
        for micro_step in range(NUM_MICRO_STEPS):
            loss = loss_of(self.model, tokens_of(step, micro_step, self.replica))
            (loss / NUM_MICRO_STEPS).backward()
            losses.append(loss.item())
        return losses

    def step(self, step: int) -> tuple[list[float], float]:
        """The losses, and the norm before clipping."""
        losses = self.backward(step)
        norm = zo.clip_grad_norm_(self.model, MAX_NORM).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm

    def train(self, done: int = 0) -> dict[str, Any]:
        """To the end."""
        losses, norms = [], []
        for step in range(done, NUM_STEPS):
            of_step, norm = self.step(step)
            losses += of_step
            norms.append(norm)
        params = local_values(self.model)
        zo.close(self.model)
        return {"losses": losses, "norms": norms, "params": params}


def local_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what this rank has of each entry of `state_dict`."""
    return {name: local_copy(value) for name, value in model.state_dict().items()}


def local_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Of what this rank has of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, on each rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
