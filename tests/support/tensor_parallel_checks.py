"""What ranks find out about a model that tensor parallelism has cut; in a module that spawned processes can import."""

from __future__ import annotations

import copy
import filecmp
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.environments import Homes
from support.pipelines import error_of
from support.rank_training import MAX_NORM, NUM_STEPS, OPTIONS
from support.tensor_parallel import (
    WIDTH,
    Case,
    CutModel,
    Model,
    cut_model,
    local_copy,
    local_values,
    loss_of,
    mesh_of,
    tokens_of,
    train_plain,
    two_by_two,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import zerooffload as zo
from zerooffload.checkpoint.safetensors_file import SafetensorsFile
from zerooffload.journal.history import record_path
from zerooffload.optim import low_bits
from zerooffload.sharding.collectives import GroupCollectives, PartCollectives, SingleRank, gather_from_all

ON_HOST: Homes = ("host", "host", "host")


def norms_of_whole_gradients(_rank: int, _world_size: int, folder: str) -> list[tuple[float, float]]:
    """Norms of several orders, by `zo.clip_grad_norm_` and of the gradients put together."""
    mesh, pairs = two_by_two(), list[tuple[float, float]]()
    for cut in ("plain norms", "sequence parallel", "tied"):
        cut_up = CutModel(str(Path(folder, cut)), Case(cut, 3, ON_HOST), mesh)
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
    cut_up = CutModel(folder, Case("plain norms", 2, ON_HOST), mesh)
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
    return done, second.train(done), train_plain(case, mesh)


def continue_as_another_part(_rank: int, _world_size: int, folder: str) -> str:
    """What is said where the ranks of a run come back with the mesh's dimensions exchanged."""
    case = Case("sequence parallel", 0, ("nvme", "nvme", "nvme"))
    first = CutModel(folder, case, two_by_two())
    first.step(0)
    zo.close(first.model)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    return error_of(lambda: CutModel(folder, case, other))


def save_and_load(_rank: int, _world_size: int, folder: str) -> dict[str, Any]:
    """Which states differ after a checkpoint went into another cut, and how training goes on from there."""
    others = {
        Case("sequence parallel", 3, ("nvme", "nvme", "host"), compute_dtype="bf16"): mesh_of(1, 4),
        Case("tied", 1, ON_HOST): mesh_of(4, 1),
        Case("partly frozen, checkpointed", 2, ("host", "nvme", "host"), "during_backward"): mesh_of(1, 4),
    }
    differing, continued = list[str](), list[dict[str, Any]]()
    for case, mesh in others.items():
        own = Path(folder, str(case))
        own.mkdir(exist_ok=True)
        first = CutModel(str(own / "first"), case, two_by_two())
        states = _after_steps(first, 2)
        zo.save(own / "saved", first.model, first.optimizer, extra="of the first")
        zo.save_dcp(own / "dcp", first.model, first.optimizer)
        zo.export_safetensors(first.model, own / "exported", dtype=torch.float32)
        zo.close(first.model)
        differing += _differing_weights(own / "exported", states)
        other = CutModel(str(own / "other"), case, mesh)
        assert zo.load(own / "saved", other.model, other.optimizer) == "of the first"
        differing += _differing(states, whole_states(other.model, other.optimizer))
        zo.save(own / "saved by other", other.model, other.optimizer)
        zo.export_safetensors(other.model, own / "exported by other", dtype=torch.float32)
        zo.close(other.model)
        exports = (own / name / "model.safetensors" for name in ("exported", "exported by other"))
        if not filecmp.cmp(*exports, shallow=False):
            differing.append("model.safetensors")
        afresh = CutModel(str(own / "afresh"), case, mesh)
        zo.load_dcp(own / "dcp", afresh.model, afresh.optimizer)
        differing += _differing(states, whole_states(afresh.model, afresh.optimizer))
        zo.close(afresh.model)
        again = CutModel(str(own / "again"), case, two_by_two())
        zo.load(own / "saved by other", again.model, again.optimizer)
        continued.append({"plain": train_plain(case, two_by_two()), "offloaded": again.train(2)})
    return {"differing": differing, "continued": continued}


def load_into_whole_model(_rank: int, _world_size: int, folder: str) -> dict[str, list[str]]:
    """Which states differ of a model that is not cut, by the format of moments; there and back."""
    differing: dict[str, list[str]] = {}
    for moments in ("fp32", "8bit"):
        own = Path(folder, moments)
        own.mkdir(exist_ok=True)
        case = Case("plain norms", 3, ON_HOST, moments=moments)
        first = CutModel(str(own / "first"), case, two_by_two())
        states = _after_steps(first, 2)
        zo.save(own / "saved", first.model, first.optimizer)
        zo.close(first.model)
        model = Model()
        zo.offload(model, zo.OffloadConfig(threads=1, host_memory="32MiB", moments=moments))
        optimizer = zo.AdamW(model.parameters(), **OPTIONS)
        with patch.object(SafetensorsFile, "read_data", autospec=True, side_effect=SafetensorsFile.read_data) as read:
            zo.load(own / "saved", model, optimizer)
        reads = [(call.args[0].path, call.args[1]) for call in read.call_args_list]
        # The rows of matrices that were cut in columns come from both parts in turn.
        differing[f"{moments} read twice"] = sorted(str(path) for path, _ in set(reads) if len(set(reads)) < len(reads))
        if moments == "8bit":
            states |= {name: _in_8_bits(name, value) for name, value in states.items() if "exp_avg" in name}
        differing[moments] = _differing(states, whole_states(model, optimizer))
        zo.save(own / "whole", model, optimizer)
        zo.close(model)
        again = CutModel(str(own / "again"), case, two_by_two())
        zo.load(own / "whole", again.model, again.optimizer)
        params = [name for name, _ in again.model.named_parameters()]
        found = _differing(states, whole_states(again.model, again.optimizer))
        differing[f"{moments} again"] = [name for name in found if moments != "8bit" or name in params]
        zo.close(again.model)
    return differing


def save_cut_stages(_rank: int, _world_size: int, folder: str) -> dict[str, str]:
    """What is said to two stages of a pipeline, each cut in two, that have the same names; and to what joins none."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    model = cut_model("plain norms", mesh["tp"])
    zo.offload(model, zo.OffloadConfig(threads=1), process_group=mesh["dp"], pipeline_group=mesh["pp"])
    optimizer = zo.AdamW(model.parameters(), **OPTIONS)
    said = {
        "zo.save": error_of(lambda: zo.save(folder, model, optimizer)),
        "zo.save_dcp": error_of(lambda: zo.save_dcp(folder, model, optimizer)),
        "zo.export_safetensors": error_of(lambda: zo.export_safetensors(model, folder)),
    }
    zo.close(model)
    return said


def whole_states(model: nn.Module, optimizer: zo.AdamW) -> dict[str, torch.Tensor]:
    """Copies of parameters and what the optimizer has of them, all of each on each rank."""
    found = {name: whole(value).clone() for name, value in model.state_dict().items()}
    for number, entry in optimizer.state_dict()["state"].items():
        # Gloo gathers no int16.
        found |= {f"{number} {name}": whole(value.to(torch.float64)).clone() for name, value in entry.items()}
    return found


def _after_steps(cut_up: CutModel, num_steps: int) -> dict[str, torch.Tensor]:
    for step in range(num_steps):
        cut_up.step(step)
    return whole_states(cut_up.model, cut_up.optimizer)


def _differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same, to the bit."""
    names = one.keys() | other.keys()
    return sorted(name for name in names if not torch.equal(one[name], other[name]))


def _differing_weights(folder: Path, states: dict[str, torch.Tensor]) -> list[str]:
    """Of exported fp32 masters, those that another state of the model was not rounded from; or that are missing."""
    weights = load_file(folder / "model.safetensors")
    return sorted(
        name for name, value in weights.items() if not torch.equal(value.to(states[name].dtype), states[name])
    )


def _in_8_bits(name: str, value: torch.Tensor) -> torch.Tensor:
    """A moment as it is rounded to the blocks of the whole parameter."""
    non_negative = name.endswith("exp_avg_sq")
    codes, exponents = low_bits.encode(value.float().flatten(), low_bits.NEAREST, non_negative=non_negative)
    return low_bits.decode(codes, exponents, non_negative=non_negative).view(value.shape).double()


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
    two_meshes.norm.weight = nn.Parameter(distribute_tensor(torch.ones(WIDTH), dp, [Replicate()]))

    def said_in_training(cut: str, **fields: Any) -> str:
        model = zo.offload(cut_model(cut, row), zo.OffloadConfig(threads=1, **fields), process_group=dp)
        error = error_of(lambda: loss_of(model, tokens_of(0, 0, 0)))
        zo.close(model)
        return error

    ones, hooked = torch.ones(8, 8), cut()
    hooked.head.weight.register_hook(lambda grad: grad)
    hooked_at_node = cut()
    node = torch.autograd.graph.get_gradient_edge(hooked_at_node.head.weight).node
    node.register_prehook(lambda grads: grads)
    compiled = cut()
    compiled.blocks[0].compile()
    uneven = torch.zeros(3 if row.get_local_rank() else 5, 8)
    return {
        "no group": said(cut(), process_group=None),
        "same group": said(cut(), process_group=row),
        "pipeline": said(cut(), pipeline_group=row),
        "fully sharded": said(fully_shard(Model(), mesh=row)),
        "two dimensions": said(of_tensor(distribute_tensor(ones, mesh, [Replicate(), Shard(0)]))),
        "two meshes": said(two_meshes),
        "partial": said(of_tensor(DTensor.from_local(ones, row, [Partial()]))),
        "uneven": said(of_tensor(DTensor.from_local(uneven, row, [Shard(0)], shape=(8, 8), stride=(8, 1)))),
        "meta": said(parallelize_module(on_meta, row, {"head": ColwiseParallel()})),
        "subclass": said(of_tensor(DTensor.from_local(TwoTensor(ones, ones), row, [Shard(0)]))),
        "compiled": said(compiled),
        "weights": said(cut(), weights="folder"),
        "hook": said(hooked, zo.OffloadConfig(compute_dtype="bf16")),
        "hook of a node": said(hooked_at_node, zo.OffloadConfig(compute_dtype="bf16")),
        "activations": said_in_training("distributed activations", micro_batch_size=2),
        "sliced loss": error_of(lambda: zo.sliced_loss(cut().head, nn.functional.cross_entropy)),
    }


def check_apart(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What each of the functions above that train little returns, by its name."""
    in_folders: list[Callable[[int, int, str], Any]] = [
        norms_of_whole_gradients,
        overflow_in_one_part,
        resume_cut_model,
        continue_as_another_part,
        call_ordinary,
        exchange_optimizer_states,
    ]
    found = _each(in_folders, rank, world_size, folder)
    found["norms_of_cut_stages"] = norms_of_cut_stages(rank, world_size)
    found["refused"] = refused(rank, world_size)
    return found


def check_checkpoints(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """As `check_apart`, of the functions that save."""
    return _each([save_and_load, load_into_whole_model, save_cut_stages], rank, world_size, folder)


def _each(
    functions: Sequence[Callable[[int, int, str], Any]], rank: int, world_size: int, folder: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for function in functions:
        own = Path(folder, function.__name__)
        own.mkdir(exist_ok=True)
        found[function.__name__] = function(rank, world_size, str(own))
    return found
