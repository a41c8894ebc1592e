"""Profiles that come with the package, of machines that others have published figures of."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from zerooffload.errors import ConfigError
from zerooffload.planner.profiles.machine import MachineProfile, read_machine

_FOLDER = files("zerooffload.planner.profiles").joinpath("machines")
_SUFFIXES = (".toml", ".json")


def published_machines() -> list[str]:
    """Their names."""
    return sorted(Path(entry.name).stem for entry in _FOLDER.iterdir() if entry.name.endswith(_SUFFIXES))


def find_machine(name: str) -> MachineProfile:
    """The profile in a file, or one that comes with the package.

    Raises
    ------
    ConfigError
        If there is none of that name, or the file is no profile.
    """
    if Path(name).suffix in _SUFFIXES:
        return read_machine(name)
    if name not in published_machines():
        raise ConfigError(
            f"there is no machine profile {name!r}: name a file (.toml, .json), or one of those that come with the"
            f" package: {', '.join(published_machines())}"
        )
    return read_machine(Path(str(_FOLDER.joinpath(f"{name}.toml"))))
