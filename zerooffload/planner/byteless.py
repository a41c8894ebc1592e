"""A step of a model, run without memory for it.

[Note: runs without bytes]
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
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watcher(Protocol):
    """Is told how a step goes."""

    def built(self, model: nn.Module) -> None:
        """The model is there; its forward begins."""

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation is done."""

    def turned(self) -> None:
        """Forward is over, backward begins."""


def run_without_bytes(
    build_model: Callable[[], nn.Module],
    run_step: Callable[[nn.Module], torch.Tensor],
    watcher: Watcher,
    *,
    device: torch.device | str,
) -> None:
    """Build a model and run forward and backward of the loss that `run_step` returns. See the note above."""
    mode = _ByteLess()
    with torch.random.fork_rng(devices=[]), torch.device(device), mode:
        model = build_model()
        let_gradients_go(model)
        watcher.built(model)
        mode.watcher = watcher
        loss = run_step(model)
        watcher.turned()
        loss.backward()
    # Hooks and parameters refer to each other; what is left of the model should not wait for a collection.
    del model, loss
    gc.collect()


class _ByteLess(TorchDispatchMode):
    """Runs each operation, on fake tensors as soon as a floating-point tensor takes part."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watcher: Watcher | None = None
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
        if self.watcher is None:
            # Parameters that are remembered by weak references cannot be converted (`.to(dtype)`, as adapters do).
            self._fakes.fake_tensor_converter.meta_converter.tensor_memo.clear()
        else:
            self.watcher.ran(func, args, kwargs, result)
        return result

    def _run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._fakes:
            if func is torch.ops.aten._grouped_mm.default:
                return _grouped_mm_of_any_dtype(func, *args, **kwargs)
            return func(*args, **kwargs)


def _grouped_mm_of_any_dtype(func: Any, left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Unlike the kernels, what fakes go by knows bf16 alone."""
    result = func(left.to(torch.bfloat16), right.to(torch.bfloat16), *args, **kwargs)
    return result.to(left.dtype)


@dataclass(eq=False)
class StorageLife:
    """A storage that was made in a step. Times are those of `StorageTracker.now`.

    Attributes
    ----------
    gone_at : int, optional
        None while it lives.
    """

    nbytes: int
    made_at: int
    gone_at: int | None = None


class StorageTracker:
    """Adds up the storages that are alive, each once however many tensors share it.

    Attributes
    ----------
    now : int
        Operations so far.
    lives : list[StorageLife]
        All storages, in the order in which they were made.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.now = 0
        self.lives: list[StorageLife] = []
        # The life is None for what the model consists of.
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], StorageLife | None]] = {}

    def begin(self, model: nn.Module) -> None:
        """Do not count what the model consists of."""
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            self._known[id(storage)] = weakref.ref(storage), None

    def made(self, result: Any) -> None:
        """Count the storages of an operation's results that are new."""
        self.now += 1
        for tensor in tensors_among(result):
            self._count(tensor.untyped_storage())

    def life_of(self, tensor: torch.Tensor) -> StorageLife | None:
        """That of a tensor's storage; None if it is the model's, or was not made in the step."""
        return self._known.get(id(tensor.untyped_storage()), (None, None))[1]

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        ref = self._ref_of(key)
        if ref is not None and ref() is storage:
            return
        life = StorageLife(storage.nbytes(), made_at=self.now)

        def gone(ref: weakref.ref[torch.UntypedStorage]) -> None:
            self.live_bytes -= life.nbytes
            life.gone_at = self.now
            # Another storage may live at the same address by now.
            if self._ref_of(key) is ref:
                del self._known[key]

        self._known[key] = weakref.ref(storage, gone), life
        self.lives.append(life)
        self.live_bytes += life.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _ref_of(self, key: int) -> weakref.ref[torch.UntypedStorage] | None:
        return self._known[key][0] if key in self._known else None


def tensors_among(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def let_gradients_go(model: nn.Module) -> None:
    """Drop each gradient when autograd has finished it, as the runtime does."""

    def let_go(param: torch.Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(let_go)
