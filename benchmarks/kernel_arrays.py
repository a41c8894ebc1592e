"""What `adam_kernel.py` times: the arrays of a configuration, our step on them, and the same bytes as traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerooffload import native
from zerooffload.accelerator.pages import PAGE_BYTES, populated_pages
from zerooffload.optim.kernels import NativeKernels, TorchKernels
from zerooffload.optim.record import MomentFormat, OptimizerStates
from zerooffload.optim.rules import RULES, StepScalars
from zerooffload.optim.rules.rule import step_scalars

if TYPE_CHECKING:
    from zerooffload._native import ThreadPool

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPE_NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
    "initial_accumulator_value": 0.0,
    "lr_decay": 0.0,
}
CHECKED_NUMEL = 2**16
# Elements of the random numbers that all arrays repeat.
PATTERN_NUMEL = 2**17
STAGGER_BYTES, NUM_STAGGERS = 576, 7

Contenders = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Configuration:
    """What is stepped, and how it is kept."""

    rule: str
    param: torch.dtype = FP32
    grad: torch.dtype = FP32
    moments: MomentFormat = "fp32"
    target: float | None = None
    """Of the ratio to the limit."""

    @property
    def name(self) -> str:
        """Rule, then the formats of parameter, gradient and moments."""
        return f"{self.rule} {DTYPE_NAMES[self.param]}/{DTYPE_NAMES[self.grad]}/{self.moments}"


CONFIGURATIONS = (
    Configuration("adamw", target=0.95),
    Configuration("adamw", FP32, BF16, target=0.95),
    Configuration("adamw", BF16, BF16, target=0.95),
    Configuration("adamw", BF16, FP32, target=0.95),
    Configuration("adamw", FP16, FP16, target=0.95),
    Configuration("adamw", FP32, FP32, "bf16", target=0.9),
    Configuration("adamw", BF16, BF16, "bf16", target=0.9),
    Configuration("adamw", FP32, FP32, "8bit", target=0.85),
    Configuration("adamw", BF16, BF16, "8bit", target=0.85),
    Configuration("lion"),
    Configuration("sgd"),
    Configuration("adagrad"),
    Configuration("adam"),
)


class Memory:
    """Gives out arrays that do not displace each other in the caches."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._given = 0
        generator = torch.Generator().manual_seed(0)
        self._pattern = torch.randn(PATTERN_NUMEL, generator=generator)

    def array(self, dtype: torch.dtype, num_items: int | None = None) -> torch.Tensor:
        """Zeros, of `numel` items where nothing else is said, all touched."""
        nbytes = (self.numel if num_items is None else num_items) * dtype.itemsize
        offset = self._given % NUM_STAGGERS * STAGGER_BYTES
        self._given += 1
        return populated_pages(nbytes + PAGE_BYTES)[offset : offset + nbytes].zero_().view(dtype)

    def random(self, dtype: torch.dtype) -> torch.Tensor:
        """Normal numbers."""
        return self.scatter(self.array(dtype))

    def scatter(self, array: torch.Tensor) -> torch.Tensor:
        """Fill with normal numbers."""
        array.view(-1, PATTERN_NUMEL).copy_(self._pattern)
        return array


@dataclass(frozen=True)
class Stream:
    """An array of a pass."""

    tensor: torch.Tensor
    written: bool


class Traffic:
    """The bytes of passes over arrays, moved with nothing computed."""

    def __init__(self, pool: ThreadPool, passes: Sequence[Sequence[Stream]]) -> None:
        self._pool = pool
        self._passes = passes

    def variants(self, name: str) -> Contenders:
        """The same bytes in tiles of several lengths. One call stays with an array for 1024 items."""
        smallest = min(stream.tensor.element_size() for streams in self._passes for stream in streams)
        shapes = {f"{name}, shortest tiles": (1, smallest), f"{name}, tiles": (1, 1), f"{name}, long tiles": (8, 1)}
        if smallest == 1:
            del shapes[f"{name}, shortest tiles"]
        return {label: self._mover(*shape) for label, shape in shapes.items()}

    def _mover(self, times: int, parts: int) -> Callable[[], None]:
        """Taking `times` items as one, or one as `parts`."""
        calls = []
        for streams in self._passes:
            numel = streams[0].tensor.numel() * parts // times
            items = [(s.tensor.data_ptr(), s.tensor.element_size() * times // parts, s.written) for s in streams]
            calls.append((items, numel))

        def move() -> None:
            for items, numel in calls:
                native.module.move_traffic(self._pool, items, numel)

        return move


class OurStep:
    """The arrays of a configuration, and its kernel on them."""

    def __init__(self, configuration: Configuration, memory: Memory, kernels: NativeKernels) -> None:
        self.configuration = configuration
        self.kernels = kernels
        self.rule = RULES[configuration.rule]
        self.param = memory.random(configuration.param)
        self.grad = memory.random(configuration.grad)
        parts = OptimizerStates(configuration.rule, configuration.moments).parts(configuration.param)
        self.record = {part.name: memory.array(part.dtype, part.num_items(memory.numel)) for part in parts}
        if "master" in self.record:
            memory.scatter(self.record["master"])
        self._scalars = self.scalars(3, 1.0)

    def scalars(self, step: int, grad_factor: float) -> StepScalars:
        """Of one step."""
        return step_scalars(self.rule, GROUP, step, grad_factor)

    def __call__(self) -> None:
        """One step."""
        self.step(self._scalars)

    def step(self, scalars: StepScalars) -> None:
        """One step, with these scalars."""
        self.kernels.step(scalars, self.param, self.record, self.grad, 0)

    @property
    def bytes_per_param(self) -> float:
        """That the step must move for each: all are read and written, but gradients and copies of masters."""
        moved = self.grad.nbytes + sum(2 * array.nbytes for array in self.record.values())
        moved += self.param.nbytes * (1 if self.configuration.param is FP16 else 2)
        return moved / self.param.numel()

    def passes(self) -> list[list[Stream]]:
        """The same as traffic. A read stands for a write without a read, of which the traffic loop has none.

        The scales of 8-bit moments, of another length, come as a second, tiny pass.
        """
        numel = self.param.numel()
        arrays = [Stream(self.grad, written=False), Stream(self.param, written=self.configuration.param is not FP16)]
        arrays += [Stream(array, written=True) for array in self.record.values()]
        whole = [stream for stream in arrays if stream.tensor.numel() == numel]
        scales = [stream for stream in arrays if stream.tensor.numel() != numel]
        return [whole, scales] if scales else [whole]

    def verify(self) -> None:
        """Make two steps, and compare the first elements with the reference's.

        Raises
        ------
        RuntimeError
            If a bit differs.
        """
        ours = {"param": self.param, "grad": self.grad, **self.record}
        numel = self.param.numel()
        firsts = {name: array[: CHECKED_NUMEL * array.numel() // numel] for name, array in ours.items()}
        expected = {name: array.clone() for name, array in firsts.items()}
        record = {name: expected[name] for name in self.record}
        for step in (1, 2):
            scalars = self.scalars(step, 0.5)
            self.step(scalars)
            TorchKernels().step(scalars, expected["param"], record, expected["grad"], 0)
        for name, array in firsts.items():
            require_equal(f"{self.configuration.name}: {name}", array, expected[name])


def require_equal(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise RuntimeError if a bit differs."""
    if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        raise RuntimeError(f"{what} differs from the reference: nothing was timed")
