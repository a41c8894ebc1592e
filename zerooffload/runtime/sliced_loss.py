"""The head of a model and its loss, in slices: what the head makes of the whole batch never exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zerooffload.accelerator import Accelerator
from zerooffload.errors import ConfigError
from zerooffload.runtime.sliced_call import (
    Joining,
    KeptByAutograd,
    OutputRules,
    SlicedCall,
    SlicedFunction,
    random_state,
    set_random_state,
)
from zerooffload.runtime.slicing import Cut, Leaf, Rebuild, Rule, find_cut, take_arguments_apart
from zerooffload.sharding.local_tensors import is_distributed

_NAME = "(head and loss)"
_ADDS_UP_WITHIN = 2.0**-5
"""By which the loss of two samples may be off the sum of theirs: far more than rounding, far less than a mean's."""


class SlicedLoss:
    """The sum of a loss over a batch; see `zo.sliced_loss`.

    Parameters
    ----------
    setting : callable
        The device, and how many samples a slice has; asked for in each call.
    """

    def __init__(
        self,
        head: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        setting: Callable[[], tuple[Accelerator, int]],
    ) -> None:
        if any(is_distributed(param) for param in head.parameters()):
            raise ConfigError(
                "zo.sliced_loss: parallelize_module has cut the head, and its hooks know of logits and of no loss:"
                " leave the head out of the plan, or take the loss of the whole batch"
            )
        self._head = head
        self._loss_fn = loss_fn
        self._setting = setting
        self._adds_up = False

    def __call__(self, hidden: torch.Tensor, *targets: Any, **shared: Any) -> torch.Tensor:
        """The sum over the batch.

        Parameters
        ----------
        hidden : torch.Tensor
            `[batch, ...]`: the head's input.
        *targets
            Further arguments of the loss; tensors `[batch, ...]` are cut as `hidden` is.
        **shared
            Passed on as they are.

        Raises
        ------
        ConfigError
            If the batch does not divide, or the loss is no sum over samples.
        """
        own = self._head.__dict__.get("forward")
        head_forward = self._head.forward

        def in_slices(hidden: torch.Tensor, *targets: Any, **shared: Any) -> torch.Tensor:
            return self._in_slices(head_forward, hidden, targets, shared)

        # In the head's place, so that what happens at its boundaries happens once for all slices.
        self._head.__dict__["forward"] = in_slices
        try:
            total: torch.Tensor = self._head(hidden, *targets, **shared)
        finally:
            if own is None:
                self._head.__dict__.pop("forward", None)
            else:
                self._head.__dict__["forward"] = own
        return total

    def _in_slices(self, head: Callable[..., Any], hidden: torch.Tensor, targets: Any, shared: Any) -> torch.Tensor:
        def loss_of_slice(hidden: torch.Tensor, *targets: Any, **shared: Any) -> torch.Tensor:
            return self._loss_fn(head(hidden), *targets, **shared)

        accelerator, slice_size = self._setting()
        leaves, rebuild = take_arguments_apart(loss_of_slice, (hidden, *targets), shared)
        declared = {leaf.argument: Rule.BATCH for leaf in leaves} | dict.fromkeys(shared, Rule.SHARED)
        cut = find_cut(_NAME, leaves, slice_size, declared)
        function = SlicedFunction(
            _NAME,
            loss_of_slice,
            tuple(param for param in self._head.parameters() if param.requires_grad),
            accelerator,
            lambda _: KeptByAutograd(),
            lambda: None,
        )
        self._check(function, leaves, rebuild, cut)
        call = SlicedCall(function, leaves, rebuild, cut, OutputRules((Joining.ADDED,), (True,)))
        tensors = [leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
        total: torch.Tensor = call(tensors)
        return total

    def _check(self, function: SlicedFunction, leaves: list[Leaf], rebuild: Rebuild, cut: Cut) -> None:
        """See, once, that the loss of two samples is the sum of theirs."""
        if self._adds_up or cut.batch_size == cut.slice_size:
            return
        call = SlicedCall(function, leaves, rebuild, cut, OutputRules((), ()))
        tensors = [leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
        wanted = [False] * len(tensors)
        state = random_state(function.accelerator)
        found = []
        for rows in (slice(0, 2), slice(0, 1), slice(1, 2)):
            set_random_state(function.accelerator, state)
            outputs, _ = call.run(call.of_slice(tensors, wanted, rows))
            if len(outputs) != 1 or outputs[0].ndim:
                raise ConfigError("zo.sliced_loss: the loss function must return one number, the sum over its samples")
            found.append(float(outputs[0].detach()))
        set_random_state(function.accelerator, state)
        both, first, second = found
        if abs(both - first - second) > _ADDS_UP_WITHIN * (abs(first) + abs(second)):
            raise ConfigError(
                f"zo.sliced_loss: the loss of two samples is {both:g}, those of each are {first:g} and {second:g}: the"
                ' loss function must return the sum over its samples (reduction="sum"). Divide the result by the number'
                " of terms in the whole batch"
            )
        self._adds_up = both != 0.0
