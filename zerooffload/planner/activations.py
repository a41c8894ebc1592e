"""What a step's activations and temporaries will take, found without memory for them.

[Note: the forecast's run]
The model is built and a step is run once, with floating-point tensors that know their storage but have no bytes
(torch's fake tensors: on the meta device itself attention would go by another kernel than on a real device). Integer
and boolean tensors are real: they are small, and models decide by their values which way to go. A storage counts from
the operation that makes it until nothing refers to it any more, autograd included. Weights do not count, nor gradients
at rest: the runtime takes each away as soon as autograd has finished it, so only the fresh one counts, while it lives.
Memory that an operation uses inside itself is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, kw_only=True)
class ActivationForecast:
    """Bytes beside weights, gradients at rest and optimizer state.

    Attributes
    ----------
    peak_bytes : int
        The most that are alive at the same time in forward and backward.
    saved_bytes : int
        Alive between forward and backward.
    """

    peak_bytes: int
    saved_bytes: int


def predict_activation_bytes(
    build_model: Callable[[], nn.Module],
    run_step: Callable[[nn.Module], torch.Tensor],
    *,
    device: torch.device | str = "cpu",
) -> ActivationForecast:
    """Run forward and backward without memory, and measure what they would take.

    Parameters
    ----------
    build_model : callable
        Makes the model, in the dtype that it computes in, with weights of any value. Nothing is allocated for them.
    run_step : callable
        Runs forward on one (micro-)batch and returns the loss, 0-dim.
    device : torch.device or str
        Where the step will run; it decides which kernels are used.

    Raises
    ------
    RuntimeError
        Whatever torch raises for a model whose way depends on computed floating-point values (routing by experts).
    """
    tracker = _StorageTracker()
    with torch.random.fork_rng(devices=[]), torch.device(device), _ByteLess(tracker):
        model = build_model()
        _let_gradients_go(model)
        tracker.begin(model)
        loss = run_step(model)
        saved_bytes = tracker.live_bytes
        loss.backward()
    # Hooks and parameters refer to each other; what is left of the model should not wait for a collection.
    del model, loss
    gc.collect()
    return ActivationForecast(peak_bytes=tracker.peak_bytes, saved_bytes=saved_bytes)


class _ByteLess(TorchDispatchMode):
    """Runs each operation, on fake tensors as soon as a floating-point tensor takes part. See the note above."""

    def __init__(self, tracker: _StorageTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            result = self._run_fake(func, args, kwargs)
        elif tensors:
            result = func(*args, **kwargs)
        else:
            # A factory; its result's dtype may follow from its arguments.
            result = self._run_fake(func, args, kwargs)
            if not any(leaf.is_floating_point() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
                result = func(*args, **kwargs)
        self._tracker.made(result)
        return result

    def _run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._fakes:
            return func(*args, **kwargs)


class _StorageTracker:
    """Adds up the storages that are alive, each once however many tensors share it."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._is_on = False

    def begin(self, model: nn.Module) -> None:
        """Count what is made from now on, but not what the model consists of."""
        self._is_on = True
        for tensor in _tensors_of(model):
            storage = tensor.untyped_storage()
            self._seen[id(storage)] = weakref.ref(storage)

    def made(self, result: Any) -> None:
        """Count the storages of an operation's results that are new."""
        if not self._is_on:
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        known = self._seen.get(key)
        if known is not None and known() is storage:
            return

        def gone(ref: weakref.ref[torch.UntypedStorage]) -> None:
            self.live_bytes -= nbytes
            # Another storage may live at the same address by now.
            if self._seen.get(key) is ref:
                del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _let_gradients_go(model: nn.Module) -> None:
    """Drop each gradient when autograd has finished it, as the runtime does."""

    def let_go(param: torch.Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(let_go)
