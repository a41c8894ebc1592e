"""The weights of a model folder as the Hugging Face libraries write them: safetensors files, with an index if several.

Files are told apart from what merely looks like them: an index may name files of its own folder alone, and a link is
followed where it stays in the folder, or leads into the blobs of the hub's cache, whose snapshots are links.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from zerooffload.checkpoint.safetensors_file import SafetensorsFile, parse_json
from zerooffload.checkpoint.stored_tensor import StoredTensor
from zerooffload.errors import CheckpointError
from zerooffload.formats import format_bytes

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"

_MOST_INDEX_BYTES = 100 << 20


class WeightsFolder:
    """All tensors of a folder, open for reading; a context manager.

    Attributes
    ----------
    path : pathlib.Path

    Raises
    ------
    CheckpointError
        If a file is missing, is not whole, or holds other tensors than the index says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, SafetensorsFile] = {}
        self._open = ExitStack()
        try:
            expected = _weight_map(path)
            for name in weight_files(path):
                file = self._open.enter_context(SafetensorsFile(_real_path(path, name)))
                self._take(file, {tensor for tensor, its_file in expected.items() if its_file == name})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; again is harmless."""
        self._open.close()

    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors, which can be read as long as the folder is open."""
        return {name: file.tensor(name) for name, file in self._files.items()}

    def _take(self, file: SafetensorsFile, expected: set[str]) -> None:
        names = set(file.header.entries)
        if expected and names != expected:
            (odd, *_) = sorted(names ^ expected)
            fault = "is not in the index" if odd in names else "is not in it, though the index says so"
            raise CheckpointError(f"{file.path}: tensor {odd[:200]} {fault}")
        self._files |= dict.fromkeys(names, file)


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files that make up a model.

    Raises
    ------
    CheckpointError
        If there are none, or the index names one that is missing or lies elsewhere.
    """
    names = sorted(set(_weight_map(folder).values())) or [WEIGHTS_FILE]
    for name in names:
        _real_path(folder, name)
    return names


def _weight_map(folder: Path) -> Mapping[str, str]:
    """The file of each tensor, as the index says; nothing if all are in one."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / WEIGHTS_FILE).is_file():
            raise CheckpointError(
                f"{folder} holds no safetensors weights ({WEIGHTS_FILE} or {INDEX_FILE}): other formats can run code"
                " when loaded, so convert them to safetensors first"
            )
        return {}
    path = _real_path(folder, INDEX_FILE)
    if path.stat().st_size > _MOST_INDEX_BYTES:
        raise CheckpointError(f"{index} has {format_bytes(path.stat().st_size)}, which no index needs")
    fields = parse_json(path.read_bytes(), index)
    files = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{index}: expected a weight_map that names the file of each tensor")
    return files


def _real_path(folder: Path, name: str) -> Path:
    """Where a file of the folder really is, links followed."""
    path = folder / name
    if Path(name).name == name and "\0" not in name and _is_file(path):
        real, root = path.resolve(), folder.resolve()
        allowed = [root]
        if root.parent.name == "snapshots":
            allowed.append(root.parent.parent / "blobs")
        if any(real.is_relative_to(place) for place in allowed):
            return real
        raise CheckpointError(f"{path} is a link that leaves the folder, to {real}: put the file itself there")
    raise CheckpointError(f"{folder} names {name[:200]}, which is not a file of that folder")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # Of a name that is too long, for one.
        return False
