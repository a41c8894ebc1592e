"""Models of transformers in slices: which arguments of their blocks are cut, and the loss of language models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import nn

from zerooffload.entry.training import sliced_loss
from zerooffload.errors import ConfigError

SLICE_RULES: Mapping[str, Literal["batch", "shared"]] = {
    "attention_mask": "batch",
    "causal_mask": "batch",
    "position_ids": "batch",
    "position_embeddings": "batch",
    "position_bias": "batch",
    "encoder_hidden_states": "batch",
    "encoder_attention_mask": "batch",
    "encoder_decoder_position_bias": "batch",
    "shift_labels": "batch",
    "cache_position": "shared",
    "layer_head_mask": "shared",
    "num_items_in_batch": "shared",
}
"""For `OffloadConfig(slice_rules=...)`: arguments that mean the same in every model of transformers. In those that are
"batch" dimension 0 is the batch's, or 1."""

_IGNORED = -100


class PendingLogits(torch.Tensor):
    """In place of logits that are made slice by slice in the loss: their shape, and an error for any operation.

    The head's input is held until the loss takes it.
    """

    _hidden: torch.Tensor | None

    @staticmethod
    def __new__(cls, hidden: torch.Tensor, vocabulary_numel: int) -> Self:
        """For the head's input, `[batch, sequence, width]`."""
        shape = (*hidden.shape[:-1], vocabulary_numel)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=hidden.dtype, device=hidden.device)

    def __init__(self, hidden: torch.Tensor, vocabulary_numel: int) -> None:  # noqa: ARG002 - `__new__` has used it
        super().__init__()
        self._hidden = hidden

    def take_hidden(self) -> torch.Tensor:
        """What the head was given; once.

        Raises
        ------
        ConfigError
            When it was taken before.
        """
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise ConfigError("the loss of these logits was computed already; they are not kept for another")
        return hidden

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse every operation."""
        raise ConfigError(
            f"{func} was called on logits that do not exist: the model's loss makes them slice by slice. If the model"
            " changes its logits before the loss, use zo.sliced_loss; to see logits, call it without labels or in"
            " evaluation mode"
        )


def slice_language_loss(model: nn.Module, *, micro_batch_size: int | None = None) -> None:
    """Let a causal language model compute its logits and its loss slice by slice when it trains on labels.

        huggingface.slice_language_loss(model)
        model(input_ids=tokens, labels=tokens).loss.backward()

    The loss is the mean over the labels of the whole batch that are not ignored, as ever. `logits` of the output is a
    stand-in that refuses every operation. In evaluation mode, without gradients or without labels nothing is changed.

    Parameters
    ----------
    micro_batch_size : int, optional
        Samples of a slice. Default: that of the run in which the model is offloaded.

    Raises
    ------
    ConfigError
        If the model is no causal language model of transformers with a head and its usual loss.
    """
    head, loss = _head_and_loss(model)
    switch = _Switch(model, head)
    total = sliced_loss(head, _loss_of_slice(loss), micro_batch_size=micro_batch_size)

    def loss_function(logits: Any = None, labels: Any = None, vocab_size: Any = None, **settings: Any) -> Any:
        if not isinstance(logits, PendingLogits):
            return loss(logits=logits, labels=labels, vocab_size=vocab_size, **settings)
        hidden = logits.take_hidden()
        targets = settings.pop("shift_labels", None)
        if targets is None:
            ignored = settings.get("ignore_index", _IGNORED)
            targets = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        num_items = settings.pop("num_items_in_batch", None)
        if num_items is None:
            num_items = (targets != settings.get("ignore_index", _IGNORED)).sum()
        # The loss takes views of it.
        targets = targets.contiguous()
        return total(hidden, targets, vocab_size=vocab_size, num_items_in_batch=num_items, **settings)

    # A property of transformers' models.
    setattr(model, "loss_function", loss_function)  # noqa: B010
    switch.install()


def _loss_of_slice(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A slice's part of the batch's loss: with the number of the batch's labels given, it is a sum."""

    def of_slice(logits: torch.Tensor, targets: torch.Tensor, **settings: Any) -> torch.Tensor:
        return loss(logits=logits, labels=None, shift_labels=targets, **settings)

    return of_slice


def _head_and_loss(model: nn.Module) -> tuple[nn.Linear, Callable[..., torch.Tensor]]:
    getter: Any = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    loss: Any = getattr(model, "loss_function", None)
    if not isinstance(head, nn.Linear) or getattr(loss, "__name__", None) != "ForCausalLMLoss":
        raise ConfigError(
            f"{type(model).__name__} has no linear head and loss of a causal language model of transformers: use"
            " zo.sliced_loss(head, loss_fn)"
        )
    return head, loss


class _Switch:
    """Lets the head return `PendingLogits` in a forward of the model that trains on labels."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self._model = model
        self._head = head
        self._model_forward: Callable[..., Any] = model.forward
        self._head_forward: Callable[..., Any] = head.forward
        self._is_on = False

    def install(self) -> None:
        """Take the places of both forwards."""
        self._model.__dict__["forward"] = self._forward
        self._head.__dict__["forward"] = self._logits

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self._model_forward).bind(*args, **kwargs).arguments
        trains = self._model.training and torch.is_grad_enabled()
        self._is_on = trains and given.get("labels") is not None
        try:
            return self._model_forward(*args, **kwargs)
        finally:
            self._is_on = False

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._is_on:
            return self._head_forward(hidden)  # type: ignore[no-any-return]
        # The loss calls the head again, slice by slice.
        self._is_on = False
        return PendingLogits(hidden, self._head.out_features)
