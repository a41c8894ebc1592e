"""The profile that `zerooffload calibrate` has left, and whether it is still this machine's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from zerooffload.calibration.identity import HARDWARE, identity
from zerooffload.errors import ConfigError
from zerooffload.machine import cache_folder
from zerooffload.planner.profiles import MachineProfile, read_machine

STALE_AFTER = timedelta(days=30)
_ADVICE = "run `zerooffload calibrate`"
_log = logging.getLogger("zerooffload")


@dataclass(frozen=True)
class RememberedMachine:
    """A profile, and what speaks against it.

    Attributes
    ----------
    profile : MachineProfile
    path : pathlib.Path
        Its file.
    foreign : str
        A sentence that says what this machine differs in and what to do; "" if it is the one that was measured.
    stale : str
        The same of its age and of other software; "" if there is nothing to say.
    """

    profile: MachineProfile
    path: Path
    foreign: str = ""
    stale: str = ""


def machine_file() -> Path:
    """Where the profile of this machine is kept."""
    return cache_folder() / "machine.json"


def remembered_machine(path: Path | None = None) -> RememberedMachine | None:
    """The profile in `machine_file()`, or in `path`; None without one. One that cannot be read is warned about.

    A profile that was written by hand has no identity and no date, so that nothing speaks against it.
    """
    path = path or machine_file()
    if not path.exists():
        return None
    try:
        profile = read_machine(path)
    except ConfigError as error:
        _log.warning("%s; %s to make it again", error, _ADVICE)
        return None
    return compared(path, profile, identity(), datetime.now(UTC))


def compared(path: Path, profile: MachineProfile, here: Mapping[str, str], now: datetime) -> RememberedMachine:
    """What speaks against a profile on a machine of that identity, at that time."""
    differences = {key: value for key, value in profile.identity.items() if here.get(key) != value}
    others = [_difference(key, differences[key], here) for key in differences if key in HARDWARE]
    changes = [*_age(profile, now), *(_difference(key, differences[key], here) for key in differences)]
    foreign = f"the machine profile {path} is of another machine ({', '.join(others)}): {_ADVICE} on this one"
    stale = f"the machine profile {path} is out of date ({', '.join(changes)}): {_ADVICE} again"
    return RememberedMachine(profile, path, foreign if others else "", stale if changes and not others else "")


def _difference(key: str, value: str, here: Mapping[str, str]) -> str:
    return f"{key} {value} there, {here.get(key, 'unknown')} here"


def _age(profile: MachineProfile, now: datetime) -> Iterator[str]:
    if profile.measured is not None and (age := now - profile.measured.astimezone(UTC)) > STALE_AFTER:
        yield f"measured {age.days} days ago"
