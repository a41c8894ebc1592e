"""What several ranks compute, in one process and in plain PyTorch, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from support.rank_training import Loss
from support.reference_optimizer import ReferenceOptimizer
from support.reference_training import ParamGroups, flat_layouts, go_back
from torch import nn
from torch.distributed.tensor import DTensor

from zerooffload.optim import reference
from zerooffload.optim.record import OptimizerStates
from zerooffload.sharding.local_tensors import local_tensor

Backwards = Callable[[torch.Tensor], list[torch.Tensor]]


class EmulatedRanks:
    """One model that is trained as `world_size` ranks train it with the package.

    They hold `num_replicas` replicas, each sharded over as many ranks: the sums of these are added up.

    In each micro-step every rank's loss has a backward of its own. The flat buffers of its gradients are added in the
    order in which gloo adds them, and divided by the number of ranks once, in the dtype of the model. Micro-steps add
    up in it too, or in fp32 with a `compute_dtype` or `sums_in_fp32`. The norm adds exact sums of squares over each
    rank's shard, in rank order.

    Buffers, and how often a model was called (`num_calls`, where it counts), are each rank's own; between micro-steps
    the model has those of the last rank.

    Everything runs on one thread, as in the ranks: other threads cut sums in other places.
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        *,
        compute_dtype: str | None = None,
        sums_in_fp32: bool = False,
        num_replicas: int = 1,
        groups: ParamGroups | None = None,
        **options: object,
    ) -> None:
        self.model = model
        self.world_size = world_size
        self.num_shards = world_size // num_replicas
        self._sums_in_fp32 = sums_in_fp32 or compute_dtype is not None
        self._params = dict(model.named_parameters(remove_duplicate=False))
        given = [local_tensor(param) for param in model.parameters()] if groups is None else groups
        self.optimizer = ReferenceOptimizer(given, OptimizerStates(), sums_in_fp32=self._sums_in_fp32, **options)
        self.optimizer.register_step_post_hook(lambda *_: self._start_afresh())
        self.optimizer.take_over(model, compute_dtype, [])
        self._layouts = list(flat_layouts(model, world_size=self.num_shards))
        self._means: list[torch.Tensor | None] = [None] * len(self._layouts)
        self._held: set[str] = set()
        self._buffers = [self._copies_of_buffers()] * world_size

    def micro_step(
        self, losses: Sequence[Loss], num_micro_steps: int = 1, backwards: Backwards = lambda loss: [loss]
    ) -> list[float]:
        """Each rank's forward, and the backwards of its loss; returns their losses."""
        values: list[float] = []
        of_backwards: list[list[list[torch.Tensor]]] = []
        self._buffers[-1] = self._copies_of_buffers()
        num_calls = getattr(self.model, "num_calls", None)
        for rank, loss in enumerate(losses):
            self._take_place_of(rank, num_calls)
            self.model.zero_grad()
            value = loss(self.model)
            of_backwards.append([self._take_flats() for _ in go_back(backwards(value / num_micro_steps))])
            self._buffers[rank] = self._copies_of_buffers()
            values.append(value.item())
        for flats_of_ranks in zip(*of_backwards, strict=True):
            self._add_up(flats_of_ranks)
        return values

    def show_gradients(self) -> None:
        """Let the model's gradients be what has been added up so far; edits of them count."""
        for name in self._held:
            self.optimizer.set_gradient(local_tensor(self._params[name]), self.gradient(name))

    def _take_flats(self) -> list[torch.Tensor]:
        """The flat buffers of one rank's gradients."""
        flats = []
        for layout in self._layouts:
            flat = torch.zeros(layout.numel, dtype=layout.dtype)
            for slot in layout.slots:
                grad = self._params[slot.param.name].grad
                if grad is not None:
                    flat[slot.start : slot.stop] = self._local(slot.param.name, grad).reshape(-1)
                    self._held.add(slot.param.name)
            flats.append(flat)
        self.model.zero_grad()
        return flats

    def _add_up(self, flats_of_ranks: Sequence[Sequence[torch.Tensor]]) -> None:
        """Add the means of a backward to those of the backwards before."""
        for position, of_ranks in enumerate(zip(*flats_of_ranks, strict=True)):
            first, *others = (
                torch.cat(
                    [ring_sum(of_ranks[start : start + self.num_shards], rank) for rank in range(self.num_shards)]
                )
                for start in range(0, self.world_size, self.num_shards)
            )
            mean = sum(others, start=first).div_(self.world_size)
            mean = mean.float() if self._sums_in_fp32 else mean
            earlier = self._means[position]
            self._means[position] = mean if earlier is None else earlier + mean

    def gradient(self, name: str) -> torch.Tensor:
        """The mean over the ranks that has been added up so far, before clipping."""
        for layout, mean in zip(self._layouts, self._means, strict=True):
            for slot in layout.slots:
                if name == slot.param.name and mean is not None:
                    return mean[slot.start : slot.stop].view(slot.param.shape)
        raise KeyError(name)

    def norm_sums(self) -> list[float]:
        """Of squares of the mean, in double; of each shard."""
        parts = []
        for rank in range(self.num_shards):
            sums: list[float] = []
            for layout, mean in zip(self._layouts, self._means, strict=True):
                if mean is not None and layout.counts:
                    sums += reference.square_sums(mean.float().chunk(self.num_shards)[rank]).tolist()
            parts.append(math.fsum(sums))
        return parts

    def norm(self) -> float:
        """Of the mean, in double."""
        return math.sqrt(sum(self.norm_sums()))

    def clip(self, max_norm: float) -> float:
        """Let the step multiply gradients so that their norm is at most `max_norm`. Returns it before, as fp32."""
        norm = self.norm()
        self.optimizer.grad_factor = float(np.float32(min(1.0, max_norm / (norm + 1e-6))))
        return float(np.float32(norm))

    def step(self) -> None:
        """Update what has a gradient on any rank, and forget gradients."""
        self.show_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _local(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """This process's part of a gradient, cut as its parameter is."""
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=self._params[name].placements)
        return local_tensor(grad)

    def params(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters."""
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def _start_afresh(self) -> None:
        self._means = [None] * len(self._layouts)
        self._held.clear()

    def _take_place_of(self, rank: int, num_calls: int | None) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self._buffers[rank][name])
        if num_calls is not None:
            self.model.num_calls = num_calls

    def _copies_of_buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}


def ring_sum(of_ranks: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """The shard of `rank` as gloo sums it: a ring, in which it starts at the rank before and ends at its own.

    Of three ranks, rank 0 gets (g2 + g1) + g0, rank 1 (g0 + g2) + g1, rank 2 (g1 + g0) + g2. Of two, either order is
    the same sum.
    """
    world_size = len(of_ranks)
    shards = [flat.chunk(world_size)[rank] for flat in of_ranks]
    total = shards[rank - 1].clone()
    for distance in range(2, world_size + 1):
        total += shards[(rank - distance) % world_size]
    return total
