"""Blocks that live in memory and are also kept on files, so that a run can be resumed."""

from __future__ import annotations

import torch

from zerooffload.telemetry import Waitable
from zerooffload.tiers.api import Block, Space


class MirroredBlock:
    """A block at home in memory, of which every committed step leaves a copy on files; see `Block`.

    Attributes
    ----------
    mirror : Block
        The copy. Who changes a record of this block writes it there too.
    """

    num_places = 1

    def __init__(self, home: Block, mirror: Block) -> None:
        self.name = home.name
        self.layout = home.layout
        self.mirror: Block | None = mirror
        self.needs_device = home.needs_device
        self._home = home

    def view(self, space: Space, chunk: int) -> torch.Tensor | None:
        """The home's."""
        return self._home.view(space, chunk)

    def whole(self, space: Space) -> torch.Tensor | None:
        """The home's."""
        return self._home.whole(space)

    def version(self, chunk: int) -> int | None:
        """The home's."""
        return self._home.version(chunk)

    def read(self, chunk: int, target: torch.Tensor) -> Waitable:
        """From the home."""
        return self._home.read(chunk, target)

    def write(self, chunk: int, source: torch.Tensor) -> Waitable:
        """To the home."""
        return self._home.write(chunk, source)

    def initialize(self, chunk: int, source: torch.Tensor) -> Waitable:
        """To the home."""
        return self._home.initialize(chunk, source)

    def may_write_ahead(self, chunk: int) -> bool:  # noqa: ARG002 - the protocol's
        """The home is changed in place."""
        return False

    def view_ahead(self, chunk: int) -> torch.Tensor:
        """Never asked for."""
        return self._home.view_ahead(chunk)

    def write_ahead(self, chunk: int, source: torch.Tensor) -> Waitable:
        """Never asked for."""
        return self._home.write_ahead(chunk, source)

    def take_ahead(self, chunk: int) -> None:
        """Never asked for."""

    def drop_ahead(self, chunk: int) -> None:
        """Never asked for."""
