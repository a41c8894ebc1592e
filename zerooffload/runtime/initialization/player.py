"""Playing a tape on real memory: tensors in any order, draws as if they came at their turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map

from zerooffload.runtime.initialization.tape import Operation, Place, Tape, default_dtype, tensors_in

PIECE_NUMEL = 1 << 18
"""Numbers drawn at once to be thrown away: 1 MiB; a multiple of 16, see `draw_in_pieces`."""

_aten = torch.ops.aten
_NORMAL = {_aten.normal_, _aten.randn}
_UNIFORM = {_aten.uniform_, _aten.rand}

Storages = dict[int, torch.UntypedStorage]


class Player:
    """Makes tensors from a tape.

    Parameters
    ----------
    wanted : iterable of Place
        What will be asked for, each once.
    draws_all : bool
        Take from the generator what nobody wants, too.
    """

    def __init__(self, tape: Tape, wanted: Iterable[Place], device: torch.device, *, draws_all: bool = True) -> None:
        self._tape = tape
        self._device = device
        self._num_passed = 0
        self._states: dict[int, torch.Tensor] = {}
        # How often each draw is still wanted.
        self._num_uses: Counter[int] = Counter()
        for place in wanted:
            self._num_uses.update(tape.needed([place.storage]))
        operations = enumerate(tape.operations)
        self._draws = [index for index, each in operations if each.draws and (draws_all or self._num_uses[index])]
        for index in self._draws:
            self._num_uses.update(tape.needed(tape.operations[index].reads, index))

    def tensor(self, place: Place) -> torch.Tensor:
        """A tensor on the device; a storage to which nothing was written is zero."""
        storages = self._play(self._tape.needed([place.storage]))
        if place.storage not in storages:
            return torch.zeros(place.shape, dtype=place.dtype, device=self._device)
        return self._view(place, storages)

    def finish(self) -> None:
        """Draw what nobody wanted."""
        self._pass_draws(len(self._tape.operations))

    def _play(self, indices: Iterable[int]) -> Storages:
        storages: Storages = {}
        for index in indices:
            operation = self._tape.operations[index]
            with self._generator_at(index) if operation.draws else nullcontext():
                self._run(operation, storages)
        return storages

    def _run(self, operation: Operation, storages: Storages) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                return self._view(leaf, storages)
            return self._device if isinstance(leaf, torch.device) else leaf

        args, kwargs = tree_map(real, (operation.args, operation.kwargs))
        with default_dtype(operation.default_dtype):
            result = operation.run(*args, **kwargs)
        for place, made in zip(operation.made, tensors_in(result), strict=True):
            if place is None:
                continue
            lies_alike = (made.dtype, made.stride(), made.storage_offset()) == (place.dtype, place.stride, place.offset)
            if lies_alike and made.untyped_storage().nbytes() == place.storage_nbytes:
                storages[place.storage] = made.untyped_storage()
            else:
                # Some results, such as those of svd, are laid out in another way on meta.
                self._view(place, storages).copy_(made)

    def _view(self, place: Place, storages: Storages) -> torch.Tensor:
        if place.storage not in storages:
            memory = torch.empty(place.storage_nbytes, dtype=torch.uint8, device=self._device)
            storages[place.storage] = memory.untyped_storage()
        empty = torch.empty(0, dtype=place.dtype, device=self._device)
        return empty.set_(storages[place.storage], place.offset, place.shape, place.stride)

    @contextmanager
    def _generator_at(self, index: int) -> Iterator[None]:
        """The generator as the draw found it when the model was built; afterwards, as if it came at its turn."""
        self._pass_draws(index)
        self._num_uses[index] -= 1
        if self._next_draw() == index:
            self._take_turn(index)
            yield
            return
        present = torch.get_rng_state()
        torch.set_rng_state(self._states[index] if self._num_uses[index] else self._states.pop(index))
        try:
            yield
        finally:
            torch.set_rng_state(present)

    def _next_draw(self) -> int | None:
        return self._draws[self._num_passed] if self._num_passed < len(self._draws) else None

    def _take_turn(self, index: int) -> None:
        self._num_passed += 1
        if self._num_uses[index]:
            self._states[index] = torch.get_rng_state()

    def _pass_draws(self, before: int) -> None:
        """Throw away the draws that come before an operation and were not wanted yet."""
        while (index := self._next_draw()) is not None and index < before:
            operation = self._tape.operations[index]
            if draws_one_an_element(operation):
                self._take_turn(index)
                draw_in_pieces(operation, self._device)
                continue
            # What it reads may have been drawn, too: earlier, and so with a state that was kept.
            storages = self._play(self._tape.needed(operation.reads, index))
            self._take_turn(index)
            self._run(operation, storages)


def draws_one_an_element(operation: Operation) -> bool:
    """Whether it fills a tensor and takes from the generator by the number of elements alone."""
    if getattr(operation.run, "overloadpacket", None) not in _NORMAL | _UNIFORM or operation.reads:
        return False
    (place,) = operation.writes
    # torch makes normal numbers in another way where they do not lie in a row.
    return place.is_contiguous and place.dtype.is_floating_point


def draw_in_pieces(operation: Operation, device: torch.device) -> None:
    """Take from the generator what an operation takes, with little memory.

    torch makes normal numbers 16 at a time, and the last 16 again where less are left; fewer than 16 in another way. So
    pieces are multiples of 16 and the last one is not shorter than 16, unless it is the only one.
    """
    (place,) = operation.writes
    rest = place.shape.numel()
    piece = torch.empty(min(rest, PIECE_NUMEL + 15), dtype=place.dtype, device=device)
    is_normal = getattr(operation.run, "overloadpacket", None) in _NORMAL
    while rest:
        numel = rest if rest < PIECE_NUMEL + 16 else PIECE_NUMEL
        (piece[:numel].normal_ if is_normal else piece[:numel].uniform_)()
        rest -= numel
