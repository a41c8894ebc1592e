"""What a model's forward and backward ask of the device, unit by unit, for one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class PassWork:
    """What a pass through a unit takes.

    Attributes
    ----------
    flops : Mapping[str, float]
        Floating-point operations in matrix products (2 for each multiplication and addition), by dtype: "fp32", ...
    memory_bytes : float
        Read and written by operations that are no matrix products: all their operands and results.
    num_operations : int
    new_bytes : float
        Of results that are too large for memory that the process has in hand; see [Note: large results are new memory].
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: float = 0.0
    num_operations: int = 0
    new_bytes: float = 0.0

    def __add__(self, other: PassWork) -> PassWork:
        flops = {name: self.flops.get(name, 0.0) + other.flops.get(name, 0.0) for name in {**self.flops, **other.flops}}
        return PassWork(
            flops=flops,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            num_operations=self.num_operations + other.num_operations,
            new_bytes=self.new_bytes + other.new_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """A hook point's part of a step on one batch, without that of the points inside it. Bytes are activations'.

    Attributes
    ----------
    name : str
        Of the unit; see sharding/grouping.py.
    forward, backward : PassWork
        Backward without what is computed again.
    input_nbytes : int
        What enters, and is kept where the unit is computed again. What enters several counts in the first.
    saved_nbytes : int
        What autograd keeps between forward and backward, if it is not. What it keeps for several units, or for none,
        counts where it was made.
    forward_peak_nbytes, backward_peak_nbytes : int
        The most that is alive inside, beside what other units have saved; the first counts what is saved here.
    """

    name: str
    forward: PassWork
    backward: PassWork
    input_nbytes: int
    saved_nbytes: int
    forward_peak_nbytes: int
    backward_peak_nbytes: int


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """What a model asks for on a batch.

    Attributes
    ----------
    name : str
    batch_size, sequence_length : int
        Samples of a forward, and tokens of each; 1 for models without sequences.
    units : tuple[UnitWork, ...]
        In the order of their first forwards, the root last.
    peak_nbytes, saved_nbytes : int
        Activations of the whole model: the most at the same time, and between forward and backward.
    """

    name: str
    batch_size: int
    sequence_length: int
    units: tuple[UnitWork, ...]
    peak_nbytes: int
    saved_nbytes: int

    @property
    def num_tokens(self) -> int:
        """Of a forward."""
        return self.batch_size * self.sequence_length
