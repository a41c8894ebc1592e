"""What a run may leave in a user's folder."""

from __future__ import annotations

from pathlib import Path

COMMITTED = {"manifest.json", "record-0.bin", "record-1.bin", "states.bin"}
"""The files of a run that finished a step."""


def leftovers(folder: Path) -> list[str]:
    """What an ended run has no business to leave: all but a directory that holds a committed run, whole."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    kept: dict[Path, set[str]] = {}
    for path in files:
        if path.name in COMMITTED:
            kept.setdefault(path.parent, set()).add(path.name)
    left = [str(path) for path in files if path.name not in COMMITTED]
    left += [f"{parent} has only {sorted(names)}" for parent, names in kept.items() if not _is_whole(names)]
    used = {folder, *kept, *(parent.parent for parent in kept)}
    return left + [str(path) for path in folder.rglob("*") if path.is_dir() and path not in used]


def _is_whole(names: set[str]) -> bool:
    """The records are on the first path alone."""
    return names in (COMMITTED, {"manifest.json", "states.bin"})
