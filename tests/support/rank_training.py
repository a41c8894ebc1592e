"""A small training on one rank or several; in a module that spawned processes can import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from support.environments import Homes
from support.small_models import VOCABULARY, small_gpt2
from torch import nn

import zerooffload as zo
from zerooffload.sharding.registry import residence_of

NUM_STEPS = 3
NUM_MICRO_STEPS = 2
NUM_ROWS = 12
LENGTH = 8
MAX_NORM = 1.0
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.1}
"""Of AdamW. With this eps an update is a smooth function of the gradient, so that a bound can say something."""

Loss = Callable[[nn.Module], torch.Tensor]
MicroStep = tuple[list[Loss], Loss]
"""Each rank's loss, and the loss of the whole batch."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch: the rows `[first, last)`, and what its mean loss is multiplied with."""

    first: int
    last: int
    weight: float = 1.0

    def loss(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Of the rows, mean over their tokens; computed in the dtype of the model."""
        return self.weight * next_token_loss(model, tokens[self.first : self.last])


def shares(num_rows: Sequence[int], *, weighted: bool = False) -> list[Share]:
    """So many rows for each rank; weighted, each token of the global batch counts the same."""
    edges = [sum(num_rows[:rank]) for rank in range(len(num_rows) + 1)]
    world_size, total = len(num_rows), edges[-1]
    return [
        Share(first, last, world_size * (last - first) / total if weighted else 1.0) for first, last in pairwise(edges)
    ]


def even_shares(world_size: int) -> list[Share]:
    """The same number of rows for each rank."""
    return shares([NUM_ROWS // world_size] * world_size)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in the dtype of the model."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def global_batch(step: int, micro_step: int) -> torch.Tensor:
    """Token ids `[NUM_ROWS, LENGTH]`, another at each (micro-)step."""
    generator = torch.Generator().manual_seed(1000 * step + micro_step)
    return torch.randint(1, VOCABULARY, (NUM_ROWS, LENGTH), generator=generator)


def micro_steps(step: int, each_rank: Sequence[Share], *, mean_of_ranks: bool = False) -> list[MicroStep]:
    """All of a step. The whole batch's loss is the mean over its tokens, or the mean of the ranks' losses."""
    return [_micro_step(global_batch(step, number), each_rank, mean_of_ranks) for number in range(NUM_MICRO_STEPS)]


def _micro_step(tokens: torch.Tensor, each_rank: Sequence[Share], mean_of_ranks: bool) -> MicroStep:  # noqa: FBT001
    of_ranks: list[Loss] = [partial(share.loss, tokens=tokens) for share in each_rank]
    if mean_of_ranks:
        return of_ranks, lambda model: torch.stack([loss(model) for loss in of_ranks]).mean()
    return of_ranks, partial(Share(0, NUM_ROWS).loss, tokens=tokens)


def train(
    share: Share, folder: str, homes: Homes = ("host", "host", "host"), process_group: Any = None, **fields: Any
) -> dict[str, Any]:
    """A few steps of this rank. Losses are its own."""
    model = small_gpt2()
    zo.offload(model, offload_config(folder, homes, **fields), process_group=process_group)
    optimizer = zo.AdamW(model.parameters(), **OPTIONS)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for micro_step in range(NUM_MICRO_STEPS):
            loss = share.loss(model, global_batch(step, micro_step))
            (loss / NUM_MICRO_STEPS).backward()
            losses.append(loss.item())
        norms.append(zo.clip_grad_norm_(model, MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    report = zo.step_report(model)
    result = {
        "losses": losses,
        "norms": norms,
        "params": whole_params(model),
        "leased": {tier.name: tier.leased_bytes for tier in report.tiers},
        "planned": {tier.name: tier.planned_bytes for tier in report.tiers},
        "moved": dict(report.bytes_moved),
        "flat_bytes": flat_nbytes(model),
    }
    zo.close(model)
    return result


def train_all(
    rank: int,
    world_size: int,
    folder: str,
    each_homes: Sequence[Homes],
    each_rank: Sequence[Share],
    *,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Under each choice of homes, with these fields of `OffloadConfig`: bit-equal to the first."""
    first: dict[str, Any] | None = None
    for homes in each_homes:
        result = train(each_rank[rank], folder, homes, **fields)
        first = first or result
        assert result["losses"] == first["losses"], homes
        assert result["norms"] == first["norms"], homes
        assert all(torch.equal(result["params"][name], first["params"][name]) for name in first["params"]), homes
        assert result["leased"] == result["planned"], homes
    assert first is not None
    assert len(each_rank) == world_size
    return first


def offload_config(folder: str, homes: Homes, **fields: Any) -> zo.OffloadConfig:
    """Homes by name, and one thread."""
    params, optimizer, gradients = homes
    given = {"params": params, "optimizer": optimizer, "gradients": gradients, "nvme_paths": [folder]}
    defaults = {"host_memory": "32MiB", "threads": 1, "overwrite": True, "update": "after_backward"}
    return zo.OffloadConfig(**{**defaults, **given, **fields})


def whole_params(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters of an offloaded model, whose window need not hold them together."""
    state = model.state_dict()
    return {name: state[name].clone() for name, _ in model.named_parameters()}


def flat_nbytes(model: nn.Module) -> int:
    """Bytes of all flat buffers of an offloaded model, padding included."""
    residences = [residence_of(param) for param in model.parameters()]
    return sum({id(item.part): item.part.flat.layout.nbytes for item in residences if item is not None}.values())
