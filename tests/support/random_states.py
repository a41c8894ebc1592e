"""The global random states of Python, numpy and torch: taken, and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomStates:
    """As they were at a moment."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> RandomStates:
        """Of this process."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002

    def put_back(self) -> None:
        """Let numbers be drawn as from that moment."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.torch)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Whatever is drawn inside, nobody notices."""
    before = RandomStates.now()
    try:
        yield
    finally:
        before.put_back()
