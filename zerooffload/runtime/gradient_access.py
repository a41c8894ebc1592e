"""Gradients seen and changed from outside the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zerooffload.memory import Lease
from zerooffload.runtime.gradients import GradientPath
from zerooffload.runtime.slot_access import SlotAccess, bits, join_pieces, own_piece
from zerooffload.sharding.collectives import Collectives
from zerooffload.sharding.local_tensors import distributed_like, local_gradient
from zerooffload.sharding.placeholders import OffloadedGradient
from zerooffload.sharding.unit import TrainingStates, Unit, UnitFlat, trainable


class GradientAccess:
    """Shows whole gradients for a while, and takes edits home.

    What is shown has clipping's factor in it and is rounded to the parameter's dtype, which torch demands. So an
    element that the user leaves alone is not written back: to look changes nothing.
    """

    def __init__(
        self,
        slots: SlotAccess,
        collectives: Collectives,
        gradients: GradientPath,
        lease_copies: Callable[[int], Lease],
    ) -> None:
        self._slots = slots
        self._collectives = collectives
        self._gradients = gradients
        self._lease_copies = lease_copies

    @contextmanager
    def shown(self, units: Sequence[Unit], *, writeback: bool) -> Iterator[None]:
        """Inside, `param.grad` of the parameters of `units` is a tensor or None. Collective."""
        flats = [flat for unit in units for flat in trainable(unit)]
        with self._lease_copies(sum(part.flat.layout.nbytes for part, _ in flats)):
            for part, training in flats:
                self._show(part, training)
            try:
                yield
                if writeback:
                    for part, training in flats:
                        self._take(part, training)
            finally:
                for part, training in flats:
                    for param, held in zip(part.flat.params, training.held, strict=True):
                        param.grad = OffloadedGradient(param) if held else None

    def _show(self, part: UnitFlat, training: TrainingStates) -> None:
        for index, param in enumerate(part.flat.params):
            if param.grad is None and training.held[index]:
                # The user let go of it.
                self._gradients.discard(part, index)
            if training.held[index]:
                piece = {"grad": self._clipped(part, training, index).to(param.dtype)}
                whole = join_pieces(self._collectives, part, index, piece)["grad"]
                param.grad = distributed_like(param, whole.to(param.device))

    def _take(self, part: UnitFlat, training: TrainingStates) -> None:
        mine = [self._is_edited(part, training, index) for index in range(len(part.flat.params))]
        # Where one rank applies a factor to its piece, all do.
        edited = [any(of_ranks) for of_ranks in zip(*self._collectives.gather_objects(mine), strict=True)]
        for index, param in enumerate(part.flat.params):
            if not edited[index]:
                continue
            if param.grad is not None:
                self._write(part, training, index, local_gradient(param, param.grad))
            training.held[index] = param.grad is not None
            training.grad_factors[index] = 1.0
        if any(edited):
            self._gradients.changed(part)

    def _is_edited(self, part: UnitFlat, training: TrainingStates, index: int) -> bool:
        param = part.flat.params[index]
        if param.grad is None or not training.held[index]:
            return training.held[index] != (param.grad is not None)
        grad = local_gradient(param, param.grad)
        shown = self._clipped(part, training, index).to(grad.dtype)
        return not torch.equal(bits(own_piece(part, index, grad).cpu()), bits(shown))

    def _write(self, part: UnitFlat, training: TrainingStates, index: int, grad: torch.Tensor) -> None:
        """Set this rank's piece of a gradient; elements that are as they were shown keep what the home has of them."""
        piece = own_piece(part, index, grad.detach()).cpu()
        if training.held[index]:
            clipped = self._clipped(part, training, index)
            is_as_shown = bits(piece) == bits(clipped.to(piece.dtype))
            piece = torch.where(is_as_shown, clipped, piece.to(clipped.dtype))
        self._slots.write(part, training.gradient, index, {"grad": piece})

    def _clipped(self, part: UnitFlat, training: TrainingStates, index: int) -> torch.Tensor:
        """A gradient as clipping left it: this rank's piece, 1D, on the host, in the dtype of its home."""
        return self._slots.read(part, training.gradient, index)["grad"].mul_(training.grad_factors[index])
