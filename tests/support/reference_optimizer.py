"""The product's optimizers on plain tensors, parameter by parameter, in the reference's operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zerooffload.optim import reference
from zerooffload.optim.record import MASTER, REMAINDER, OptimizerStates
from zerooffload.optim.rules import RULES
from zerooffload.optim.rules.rule import step_scalars
from zerooffload.sharding.layout import FlatLayout
from zerooffload.sharding.local_tensors import local_tensor
from zerooffload.sharding.stored import parts_of
from zerooffload.tiers.records import RecordLayout

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


class ReferenceOptimizer(torch.optim.Optimizer):
    """One rule, in plain PyTorch.

    Attributes
    ----------
    grad_factor : float
        What clipping wants the next step's gradients multiplied with.

    Parameters
    ----------
    sums_in_fp32 : bool
        Add gradients up in fp32, apart from `param.grad`: call `take_gradients` after each backward.
    """

    def __init__(self, params: Any, states: OptimizerStates, *, sums_in_fp32: bool = False, **defaults: Any) -> None:
        self.grad_factor = 1.0
        self._sums_in_fp32 = sums_in_fp32
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._states = states
        self._rule = RULES[states.algorithm]
        self._records: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._starts: dict[torch.Tensor, int] = {}
        super().__init__(params, {"eps": 1e-8, "maximize": False, **defaults})

    def take_over(self, model: nn.Module, compute_dtype: str | None, layouts: Iterable[FlatLayout]) -> None:
        """Convert a model's parameters, keeping their masters, and learn where they lie in the flat buffers."""
        params = dict(model.named_parameters(remove_duplicate=False))
        dtype = _DTYPES[compute_dtype]
        for param in model.parameters():
            if parts_of(param):
                # Frozen bytes.
                continue
            tensor = local_tensor(param)
            master = tensor.detach().clone().reshape(-1)
            if dtype is torch.bfloat16:
                tensor.data = reference.split_master(master)[0].view(tensor.shape).clone()
            elif dtype is not None:
                tensor.data = tensor.data.to(dtype)
            if param.requires_grad:
                self._records[tensor] = self._new_record(tensor, master)
        self._starts = {params[slot.param.name]: slot.start for layout in layouts for slot in layout.slots}

    @torch.no_grad()
    def take_master(self, param: torch.Tensor, master: torch.Tensor) -> None:
        """Let a bf16 parameter be `master`, fp32 of its shape, rounded; the rest of that is kept."""
        param.copy_(reference.split_master(master.reshape(-1))[0].view(param.shape))
        self._records[param] = self._new_record(param, master.reshape(-1))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update what has a gradient."""
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if self.gradient(param) is not None:
                    self._update(param, group)
        self.grad_factor = 1.0

    @torch.no_grad()
    def take_gradients(self, params: Iterable[torch.Tensor]) -> None:
        """A backward is over: add its gradients to the fp32 sums, if there are to be such."""
        for param in params if self._sums_in_fp32 else ():
            if param.grad is not None:
                earlier = self._sums.get(param)
                self._sums[param] = param.grad.float() if earlier is None else earlier + param.grad.float()
                param.grad = None

    def gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """What the next step reads: the fp32 sum, or torch's own."""
        return self._sums.get(param) if self._sums_in_fp32 else param.grad

    def set_gradient(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Let the next step read `grad`."""
        if self._sums_in_fp32:
            self._sums[param] = grad
        else:
            param.grad = grad

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Forget the gradients of this optimizer's parameters."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                self._sums.pop(param, None)

    def values_changed_by_hand(self, params: Iterable[torch.Tensor], before: Iterable[torch.Tensor]) -> None:
        """Where values were changed, what their masters had beyond them belonged to the old ones."""
        for param, old in zip(params, before, strict=True):
            record = self._records.get(param)
            if record is None:
                continue
            changed = (param.detach() != old).reshape(-1)
            if REMAINDER.name in record:
                record[REMAINDER.name][changed] = 0
            elif MASTER.name in record:
                record[MASTER.name][changed] = param.detach().reshape(-1).float()[changed]

    def moment(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """A moment as it is now, fp32 1D; zeros before the first step."""
        if param not in self._records:
            return torch.zeros(param.numel())
        (moment,) = (moment for moment in self._rule.moments if moment.name == name)
        return reference.read_moment(self._records[param], moment)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[param], self.gradient(param)
        assert grad is not None
        if param not in self._records:
            self._records[param] = self._new_record(param, param.detach().reshape(-1))
        state["step"] = state.get("step", 0) + 1
        scalars = step_scalars(self._rule, group, state["step"], self.grad_factor)
        reference.step(scalars, param.view(-1), self._records[param], grad.reshape(-1), self._starts.get(param, 0))

    def _new_record(self, param: torch.Tensor, master: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = self._states.parts(param.dtype)
        if not param.numel():
            return {part.name: torch.empty(0, dtype=part.dtype) for part in parts}
        layout = RecordLayout(parts, param.numel(), 1 << 40)
        record = layout.split(0, torch.zeros(layout.file_nbytes(0), dtype=torch.uint8, device=param.device))
        if REMAINDER.name in record and master.dtype is torch.float32:
            record[REMAINDER.name].copy_(reference.split_master(master)[1])
        elif MASTER.name in record:
            record[MASTER.name].copy_(master)
        return record
