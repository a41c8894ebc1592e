"""Models that tensor parallelism has cut, offloaded and plain; in a module that spawned processes can import."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.environments import Homes
from support.pipelines import error_of
from support.rank_emulation import EmulatedRanks
from support.rank_training import MAX_NORM, NUM_MICRO_STEPS, NUM_STEPS, OPTIONS, Loss, offload_config
from support.slices_by_hand import in_slices_by_hand
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import zerooffload as zo
from zerooffload.journal.history import record_path
from zerooffload.sharding.collectives import GroupCollectives, PartCollectives, SingleRank, gather_from_all
from zerooffload.sharding.local_tensors import local_tensor

_WIDTH = 16
_VOCABULARY = 11
"""No multiple of the ranks: one has more rows of the embedding than the other."""
_ON_HOST: Homes = ("host", "host", "host")


class Block(nn.Module):
    """A residual block. Of its scale, if that is cut, it uses the local tensor, as code for several ranks does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, _WIDTH))
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

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
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
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
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


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
            plain[kind] = _train_plain(case, mesh)
        own = str(Path(folder, str(number)))
        results.append({"plain": plain[kind], "offloaded": CutModel(own, case, mesh).train()})
    return results


def _train_plain(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
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


def norms_of_whole_gradients(_rank: int, _world_size: int, folder: str) -> list[tuple[float, float]]:
    """Norms of several orders, by `zo.clip_grad_norm_` and of the gradients put together."""
    mesh, pairs = two_by_two(), list[tuple[float, float]]()
    for cut in ("plain norms", "sequence parallel", "tied"):
        cut_up = CutModel(str(Path(folder, cut)), Case(cut, 3, _ON_HOST), mesh)
        cut_up.backward(0)
        for params in (list(cut_up.model.parameters()), list(cut_up.model.blocks[0].parameters())):
            with zo.full_params(cut_up.model, writeback=False, grads=True):
                grads = [whole(param.grad).double().flatten() for param in params if param.grad is not None]
            values = torch.cat(grads).abs().tolist()
            expected = {2.0: math.sqrt(math.fsum(value**2 for value in values)), 1.0: math.fsum(values)}
            expected[math.inf] = max(values)
            for order, norm in expected.items():
                pairs.append((zo.clip_grad_norm_(params, math.inf, norm_type=order).item(), norm))
        zo.close(cut_up.model)
    return pairs


def norms_of_cut_stages(rank: int, world_size: int) -> tuple[list[int], float, float]:
    """Of two stages of a pipeline, each cut in two: the order of all ranks, their norm, and what it should be."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    own = PartCollectives(SingleRank(rank), GroupCollectives(mesh.get_group("tp")))
    order = gather_from_all(PartCollectives(own, GroupCollectives(mesh.get_group("pp"))), rank)
    model = cut_model("plain norms", mesh["tp"])
    zo.offload(model, zo.OffloadConfig(threads=1), process_group=mesh["dp"], pipeline_group=mesh["pp"])
    loss_of(model, tokens_of(0, 0, mesh["pp"].get_local_rank())).backward()
    with zo.full_params(model, writeback=False, grads=True):
        grads = [whole(param.grad).double().flatten() for param in model.parameters() if param.grad is not None]
    each: list[Any] = [None] * world_size
    dist.all_gather_object(each, math.fsum(torch.cat(grads).square().tolist()))
    norm = zo.clip_grad_norm_(model, MAX_NORM).item()
    zo.close(model)
    first_of_stages = mesh.mesh[:, 0, 0].tolist()
    return order, norm, math.sqrt(sum(each[first] for first in first_of_stages))


def overflow_in_one_part(_rank: int, _world_size: int, folder: str) -> tuple[bool, float]:
    """Whether this part was left alone, and the loss scale, after one rank alone got infinite gradients."""
    mesh = two_by_two()
    cut_up = CutModel(folder, Case("plain norms", 2, _ON_HOST), mesh)
    before = local_values(cut_up.model)
    cut_up.backward(0)
    with zo.full_params(cut_up.model, grads=True):
        if mesh["tp"].get_local_rank() == 1:
            local_grad = cut_up.model.blocks[0].up.weight.grad.to_local()
            local_grad.fill_(torch.inf)
    scaler = zo.GradScaler(init_scale=2.0)
    scaler.step(cut_up.optimizer)
    scaler.update()
    after = local_values(cut_up.model)
    zo.close(cut_up.model)
    return all(torch.equal(value, after[name]) for name, value in before.items()), scaler.get_scale()


def resume_cut_model(rank: int, world_size: int, folder: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The step from which a run continues whose last rank lost its newest record, what it ends with, and should."""
    mesh, case = two_by_two(), Case("sequence parallel", 3, ("nvme", "nvme", "host"))
    first = CutModel(folder, case, mesh)
    for step in range(NUM_STEPS):
        first.step(step)
    zo.close(first.model)
    if rank == world_size - 1:
        record_path(Path(folder, "zerooffload", f"rank-{rank:05d}"), NUM_STEPS).unlink()
    second = CutModel(folder, case, mesh)
    done = zo.resume(second.model, second.optimizer)
    return done, second.train(done), _train_plain(case, mesh)


def continue_as_another_part(_rank: int, _world_size: int, folder: str) -> str:
    """What is said where the ranks of a run come back with the mesh's dimensions exchanged."""
    case = Case("sequence parallel", 0, ("nvme", "nvme", "nvme"))
    first = CutModel(folder, case, two_by_two())
    first.step(0)
    zo.close(first.model)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    return error_of(lambda: CutModel(folder, case, other))


def call_ordinary(_rank: int, _world_size: int, folder: str) -> dict[str, Any]:
    """What ordinary calls do to an offloaded model; by what is done."""
    mesh = two_by_two()
    cut_up = CutModel(folder, Case("sequence parallel", 3, ("nvme", "nvme", "nvme")), mesh)
    model, weight = cut_up.model, cut_up.model.blocks[0].up.weight
    start = cut_model("sequence parallel", mesh["tp"])
    found: dict[str, Any] = {
        "state_dict": _same_tensors(model.state_dict(), start.state_dict()),
        "deepcopy": error_of(lambda: copy.deepcopy(model)),
        "pickle": error_of(lambda: pickle.dumps(model)),
        "compile": error_of(model.blocks[0].compile),
        "to": error_of(lambda: model.to(torch.bfloat16)),
        "to_local": error_of(weight.to_local),
        "full_tensor": error_of(weight.full_tensor),
        "redistribute": error_of(lambda: weight.redistribute(placements=[Replicate()])),
        "add": error_of(lambda: weight.detach().add_(1)),
    }
    doubled = {name: value * 2 for name, value in start.state_dict().items()}
    model.load_state_dict(doubled)
    found["load_state_dict"] = _same_tensors(model.state_dict(), doubled)
    with torch.no_grad(), zo.full_params(model):
        weight.zero_()
    found["edit"] = local_copy(model.state_dict()["blocks.0.up.weight"]).abs().max().item()
    cut_up.backward(0)
    with zo.full_params(model, grads=True):
        grads = {name: param.grad for name, param in model.named_parameters()}
        found["gradients"] = [name for name, grad in grads.items() if not isinstance(grad, DTensor)]
        weight.grad = distribute_tensor(torch.ones(weight.shape), mesh["tp"], [Replicate()])
    with zo.full_params(model, writeback=False, grads=True):
        found["new gradient"] = (
            weight.grad.placements == weight.placements and local_copy(weight.grad).unique().tolist()
        )
    with zo.full_params(model):
        local = weight.to_local()
        product = (local * torch.ones(local.shape, requires_grad=True)).sum()
    output = model(tokens_of(0, 0, 0))
    cut_up.optimizer.step()
    found["stale"] = []
    for result in (output.sum(), product):
        try:
            result.backward()
        except RuntimeError as error:
            found["stale"].append(str(error))
    zo.close(model)
    return found


def _same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """In names, cuts and values."""
    return list(one) == list(other) and all(
        one[name].placements == value.placements and torch.equal(local_copy(one[name]), local_copy(value))
        for name, value in other.items()
    )


def exchange_optimizer_states(_rank: int, _world_size: int, folder: str) -> dict[str, Any]:
    """With torch's AdamW on a model that is cut in the same way, there and back."""
    mesh = two_by_two()
    plain = cut_model("plain norms", mesh["tp"])
    torchs = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    loss_of(plain, tokens_of(0, 0, 0)).backward()
    torchs.step()
    cut_up = CutModel(folder, Case("plain norms", 3, ("nvme", "nvme", "host")), mesh)
    cut_up.optimizer.load_state_dict(torchs.state_dict())
    state = cut_up.optimizer.state_dict()
    expected = torchs.state_dict()["state"]
    number = next(number for number, entry in expected.items() if isinstance(entry["exp_avg"], DTensor))
    found: dict[str, Any] = {
        "same": [_same_state(state["state"][number], entry) for number, entry in expected.items()],
        "torch takes it": torchs.load_state_dict(state) is None,
    }
    plain_state = {**state["state"][number], "exp_avg": torch.zeros(state["state"][number]["exp_avg"].shape)}
    found["plain"] = _refusal_of_state(cut_up.optimizer, state, number, plain_state)
    moved = state["state"][number]["exp_avg"].redistribute(placements=[Replicate()])
    found["moved"] = _refusal_of_state(cut_up.optimizer, state, number, {**plain_state, "exp_avg": moved})
    zo.close(cut_up.model)
    return found


def _refusal_of_state(optimizer: zo.AdamW, state: dict[str, Any], number: int, entry: dict[str, Any]) -> str:
    return error_of(lambda: optimizer.load_state_dict({**state, "state": {**state["state"], number: entry}}))


def _same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        type(one[name]) is type(value)
        and getattr(one[name], "placements", None) == getattr(value, "placements", None)
        and torch.equal(local_copy(one[name]), local_copy(value))
        for name, value in other.items()
    )


def refused(_rank: int, _world_size: int) -> dict[str, str]:
    """What is said to models that are not cut as they should be, and to groups that do not go with the cut."""
    mesh = two_by_two()
    row, dp = mesh["tp"], mesh["dp"]

    def said(model: nn.Module, config: zo.OffloadConfig | None = None, **groups: Any) -> str:
        return error_of(lambda: zo.offload(model, config, **{"process_group": dp, **groups}))

    def of_tensor(tensor: torch.Tensor) -> nn.Module:
        model = nn.Linear(8, 8, bias=False)
        model.weight = nn.Parameter(tensor)
        return model

    def cut() -> nn.Module:
        return cut_model("plain norms", row)

    with torch.device("meta"):
        on_meta = Model()
    two_meshes = cut()
    two_meshes.norm.weight = nn.Parameter(distribute_tensor(torch.ones(_WIDTH), dp, [Replicate()]))

    def said_in_training(cut: str, **fields: Any) -> str:
        model = zo.offload(cut_model(cut, row), zo.OffloadConfig(threads=1, **fields), process_group=dp)
        error = error_of(lambda: loss_of(model, tokens_of(0, 0, 0)))
        zo.close(model)
        return error

    ones, hooked = torch.ones(8, 8), cut()
    hooked.head.weight.register_hook(lambda grad: grad)
    compiled = cut()
    compiled.blocks[0].compile()
    return {
        "no group": said(cut(), process_group=None),
        "same group": said(cut(), process_group=row),
        "pipeline": said(cut(), pipeline_group=row),
        "fully sharded": said(fully_shard(Model(), mesh=row)),
        "two dimensions": said(of_tensor(distribute_tensor(ones, mesh, [Replicate(), Shard(0)]))),
        "two meshes": said(two_meshes),
        "partial": said(of_tensor(DTensor.from_local(ones, row, [Partial()]))),
        "meta": said(parallelize_module(on_meta, row, {"head": ColwiseParallel()})),
        "subclass": said(of_tensor(DTensor.from_local(TwoTensor(ones, ones), row, [Shard(0)]))),
        "compiled": said(compiled),
        "hook": said(hooked, zo.OffloadConfig(compute_dtype="bf16")),
        "activations": said_in_training("distributed activations", micro_batch_size=2),
        "sliced loss": error_of(lambda: zo.sliced_loss(cut().head, nn.functional.cross_entropy)),
    }


def check_apart(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What each of the functions above that train little returns, by its name."""
    found: dict[str, Any] = {}
    in_a_folder: list[Callable[[int, int, str], Any]] = [
        norms_of_whole_gradients,
        overflow_in_one_part,
        resume_cut_model,
        continue_as_another_part,
        call_ordinary,
        exchange_optimizer_states,
    ]
    for function in in_a_folder:
        own = Path(folder, function.__name__)
        own.mkdir(exist_ok=True)
        found[function.__name__] = function(rank, world_size, str(own))
    found["norms_of_cut_stages"] = norms_of_cut_stages(rank, world_size)
    found["refused"] = refused(rank, world_size)
    return found
