"""Reading a checkpoint: any elements of any saved state, range by range, each compared with its checksum."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

import torch
import xxhash

from zerooffload.checkpoint.manifest import StateEntry, read_manifests
from zerooffload.checkpoint.reshard import Checkpoint, SavedPart, Source, join
from zerooffload.checkpoint.safetensors_file import SafetensorsFile
from zerooffload.checkpoint.shard_files import Range, ShardFile, dtype_of
from zerooffload.errors import CheckpointError


class _Kept(NamedTuple):
    """A range, and the rank and chunk that it is of."""

    where: tuple[int, int]
    content: torch.Tensor


class ShardReader:
    """A checkpoint's folder, open for reading; a context manager.

    Of each state, the ranges that were read last are kept: asked for in the order of the files, each is read once.

    Attributes
    ----------
    path : pathlib.Path
    checkpoint : Checkpoint
    num_kept : int
        Of each state: as many as parts that are read in turn, whose rows together are those of a parameter.

    Raises
    ------
    CheckpointError
        If a file is missing, or is not what the manifests say.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint: Checkpoint = join(read_manifests(path), str(path))
        self._files: dict[tuple[int, str], SafetensorsFile] = {}
        self.num_kept = 1
        # The one that was used last comes last.
        self._kept: dict[str, list[_Kept]] = {}
        self._open = ExitStack()
        try:
            for rank, files in enumerate(self.checkpoint.files):
                self._files |= {(rank, state): self._open_file(file) for state, file in files.items()}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; again is harmless."""
        self._kept.clear()
        self._open.close()

    @property
    def kept_nbytes(self) -> int:
        """Host memory that is held at the most."""
        longest: dict[str, int] = {}
        for files in self.checkpoint.files:
            for state, file in files.items():
                for place in file.ranges.values():
                    longest[state] = max(longest.get(state, 0), place.nbytes)
        return self.num_kept * sum(longest.values())

    def read(self, part: SavedPart, state: StateEntry, start: int, stop: int) -> torch.Tensor:
        """The items of elements `[start, stop)` of a state of a parameter's part, 1D; `start` begins a block.

        Raises
        ------
        CheckpointError
            If bytes are missing or are not what was written.
        """
        dtype, per_item = dtype_of(state, str(self.path)), state.block_numel
        items = torch.empty(-(-(stop - start) // per_item), dtype=dtype)
        for source in part.within(start, stop):
            place = self.checkpoint.files[source.rank][state.name].ranges[source.chunk]
            content = self._range(source, state.name, place)[place.segments[source.segment].offset_bytes :]
            low, high = max(start, source.start), min(stop, source.stop)
            first, last = (low - source.start) // per_item, -(-(high - source.start) // per_item)
            target = items[(low - start) // per_item :][: last - first]
            target.view(torch.uint8).copy_(content[first * dtype.itemsize : last * dtype.itemsize])
        return items

    def _open_file(self, file: ShardFile) -> SafetensorsFile:
        opened = self._open.enter_context(SafetensorsFile(self.path / file.name))
        if opened.header.entries != file.header.entries:
            raise CheckpointError(f"{opened.path} holds other tensors than the manifest says")
        return opened

    def _range(self, source: Source, state: str, place: Range) -> torch.Tensor:
        kept, where = self._kept.setdefault(state, []), (source.rank, source.chunk)
        content = next((item.content for item in kept if item.where == where), None)
        kept[:] = [item for item in kept if item.where != where]
        if content is None:
            content = kept.pop(0).content if len(kept) >= self.num_kept else None
            if content is None or content.numel() != place.nbytes:
                # Not before the other is gone.
                content = None
                content = torch.empty(place.nbytes, dtype=torch.uint8)
            self._read_range(source, state, place, content)
        kept.append(_Kept(where, content))
        return content

    def _read_range(self, source: Source, state: str, place: Range, content: torch.Tensor) -> None:
        file = self._files[source.rank, state]
        file.read_data(place.offset_bytes, content)
        expected = self.checkpoint.manifests[source.rank].chunks[source.chunk].checksums[state]
        if xxhash.xxh3_64_hexdigest(content.numpy().data) != expected:
            raise CheckpointError(
                f"{file.path}: {place.nbytes} bytes from {place.offset_bytes} on are not what was written there"
            )
