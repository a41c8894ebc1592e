"""What a power cut would leave on a drive: directories made from a log of everything that reached it.

At any point of the log, what is certain is what a flush had covered. Everything else may be on the drive or not, or
half of it: a choice for each such operation makes an `Image`, which can be laid out in a folder and resumed from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import xxhash
from support.thoroughness import one_in

from zerooffload.errors import InternalError

SECTOR_BYTES = 512
BLOCK_BYTES = 4096

IGNORED = ("lock", "scratch.bin")
"""Files whose content outlives no run."""


@dataclass(frozen=True)
class FileWrite:
    """Bytes on their way to a file."""

    file: int
    offset: int
    content: bytes


@dataclass(frozen=True)
class Resize:
    """A file cut to a length, or given zeros up to it."""

    file: int
    nbytes: int
    cuts: bool


@dataclass(frozen=True)
class Rename:
    """Entries of folders changed at once: names that get a file (None: a folder), and names that go."""

    given: tuple[tuple[str, int | None], ...]
    gone: tuple[str, ...] = ()


Operation = FileWrite | Resize | Rename


@dataclass(frozen=True)
class Begun:
    """From now on the operation may be on the drive."""

    number: int
    operation: Operation


@dataclass(frozen=True)
class Done:
    """Its caller knows that it is done: the next flush covers it."""

    number: int


@dataclass(frozen=True)
class FlushBegun:
    """Of a file, or of the entries of a folder."""

    number: int
    target: int | str


@dataclass(frozen=True)
class FlushDone:
    """What was done before it began survives."""

    number: int


@dataclass(frozen=True)
class Committed:
    """The journal has said that this step is committed."""

    step: int


@dataclass(frozen=True)
class Finished:
    """The optimizer has returned from this step."""

    step: int


@dataclass(frozen=True)
class Met:
    """The rank has come to a meeting of ranks, or (`is_over`) all of them had."""

    channel: str
    number: int
    is_over: bool


Event = Begun | Done | FlushBegun | FlushDone | Committed | Finished | Met


@dataclass(frozen=True)
class Image:
    """The files of a folder: content by name relative to it; None for a folder."""

    files: Mapping[str, bytes | None]

    @classmethod
    def of(cls, root: Path) -> Image:
        """What is there now."""
        return cls(
            {
                str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
                for path in sorted(root.rglob("*"))
                if path.name not in IGNORED
            }
        )

    @cached_property
    def key(self) -> bytes:
        """Equal for equal images."""
        digest = xxhash.xxh3_128()
        for name, content in sorted(self.files.items()):
            for piece in (name.encode(), b"" if content is None else content):
                digest.update(len(piece).to_bytes(8, "little") + piece)
        return digest.digest()

    def lay_out(self, root: Path) -> None:
        """Make the files, and what an ended process leaves beside them."""
        for name, content in sorted(self.files.items()):
            path = root / name
            if content is None:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.name.startswith("rank-"):
                    (path / "lock").write_text("process 0 on elsewhere\n")
                    (path / "scratch.bin").write_bytes(b"\xff" * BLOCK_BYTES)
            else:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_bytes(content)


KEEP, DROP = True, False
Fate = bool | Callable[[bytes, bytes], bytes]
"""Of an operation that no flush covers: on the drive, not on it, or what of `new` came over `old`."""


def first_bytes(nbytes: int) -> Callable[[bytes, bytes], bytes]:
    """A write of which only the beginning came."""
    return lambda old, new: new[:nbytes] + old[nbytes:]


def every_other(nbytes: int, first: int = 0) -> Callable[[bytes, bytes], bytes]:
    """A write of which every other piece came."""

    def mix(old: bytes, new: bytes) -> bytes:
        pieces = range(0, len(new), nbytes)
        return b"".join((new if index % 2 == first else old)[at : at + nbytes] for index, at in enumerate(pieces))

    return mix


def chosen_pieces(mask: int, nbytes: int) -> Callable[[bytes, bytes], bytes]:
    """A write of which those pieces came whose bit (of 32, again and again) is set."""

    def mix(old: bytes, new: bytes) -> bytes:
        pieces = range(0, len(new), nbytes)
        return b"".join((new if mask >> index % 32 & 1 else old)[at : at + nbytes] for index, at in enumerate(pieces))

    return mix


@dataclass
class Drive:
    """The drive at a point of the log.

    Attributes
    ----------
    files, names : dict
        What is certain: contents, and which entry leads to which (None: to a folder).
    uncertain : dict
        By number, in the order of their begin: operations that no flush has covered.
    committed, finished : int
        The newest step that was said to be committed; that the optimizer returned from.
    """

    files: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, int | None] = field(default_factory=dict)
    uncertain: dict[int, Operation] = field(default_factory=dict)
    committed: int = 0
    finished: int = 0
    _done: set[int] = field(default_factory=set)
    _flushes: dict[int, tuple[int | str, frozenset[int]]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """What the event makes certain or uncertain."""
        match event:
            case Begun():
                self.uncertain[event.number] = event.operation
            case Done():
                self._done.add(event.number)
            case FlushBegun():
                covered = frozenset(
                    number
                    for number, operation in self.uncertain.items()
                    if number in self._done and _is_of(operation, event.target)
                )
                self._flushes[event.number] = (event.target, covered)
            case FlushDone():
                _, covered = self._flushes.pop(event.number)
                for number in sorted(covered & self.uncertain.keys()):
                    _happen(self.uncertain.pop(number), KEEP, self.files, self.names)
            case Committed():
                self.committed = event.step
            case Finished():
                self.finished = max(self.finished, event.step)
            case Met():
                # For who cuts several drives: see `rank_power_cuts`.
                pass

    def image(self, fates: Callable[[int], Fate]) -> Image:
        """What is left if each uncertain operation (by its number) has that fate."""
        files, names = dict(self.files), dict(self.names)
        for number, operation in self.uncertain.items():
            _happen(operation, fates(number), files, names)
        left: dict[str, bytes | None] = {}
        for name, file in names.items():
            if all(parent in names for parent in _parents(name)):
                left[name] = None if file is None else files.get(file, b"")
        return Image(left)


@cache
def _parents(name: str) -> tuple[str, ...]:
    return tuple(str(parent) for parent in Path(name).parents if str(parent) != ".")


def _is_of(operation: Operation, target: int | str) -> bool:
    if isinstance(operation, Rename):
        return any(os.path.dirname(name) == target for name in (*dict(operation.given), *operation.gone))  # noqa: PTH120
    return operation.file == target


def _happen(operation: Operation, fate: Fate, files: dict[int, bytes], names: dict[str, int | None]) -> None:
    if fate is DROP:
        return
    match operation:
        case Rename():
            for name in operation.gone:
                names.pop(name, None)
            names.update(operation.given)
        case Resize():
            content = files.get(operation.file, b"")
            content = content[: operation.nbytes] if operation.cuts else content
            files[operation.file] = content.ljust(operation.nbytes, b"\0")
        case FileWrite():
            start, stop = operation.offset, operation.offset + len(operation.content)
            content = files.get(operation.file, b"").ljust(stop, b"\0")
            new = operation.content if fate is KEEP else _torn(fate, content[start:stop], operation.content)
            files[operation.file] = content[:start] + new + content[stop:]


def _torn(fate: Fate, old: bytes, new: bytes) -> bytes:
    if isinstance(fate, bool):
        raise InternalError("a fate is no tear")
    return fate(old, new)


def tears(number: int, operation: Operation) -> list[Fate]:
    """Ways in which a write may come half, other ones for each write; none for what comes whole or not at all."""
    if not isinstance(operation, FileWrite):
        return []
    num_blocks, num_sectors = len(operation.content) // BLOCK_BYTES, len(operation.content) // SECTOR_BYTES
    first_sectors = first_bytes(SECTOR_BYTES * (1 + number % max(1, num_sectors - 1)))
    if num_blocks < 2:
        return [first_sectors]
    return [
        first_bytes(BLOCK_BYTES * (1 + number % (num_blocks - 1))),
        first_sectors,
        every_other(BLOCK_BYTES, number % 2),
    ]


def systematic_images(drive: Drive, *, thoroughly: bool = True) -> Iterator[Image]:
    """All kept, none kept, each one alone dropped or torn, each one alone kept; thoroughly in more ways of each.

    With ZEROOFFLOAD_TEST_EXHAUSTIVE=1 or thoroughly each write has all its ways at each cut, else some have one of two.
    """
    yield drive.image(lambda _: KEEP)
    yield drive.image(lambda _: DROP)
    for number, operation in drive.uncertain.items():
        torn = tears(number, operation)
        if not thoroughly and torn:
            torn = [torn[number % len(torn)]]
        ways = [(KEEP, [DROP, *torn]), (DROP, [KEEP, *(torn if thoroughly else [])])]
        stride = 1 if thoroughly else one_in(3)
        for others, fates in ways[(number + len(drive.uncertain)) % stride :: stride]:
            for fate in fates:
                yield drive.image(_fates_of(number, fate, others))


def _fates_of(number: int, fate: Fate, others: Fate) -> Callable[[int], Fate]:
    return lambda other: fate if other == number else others
