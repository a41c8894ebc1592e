"""The finding about what `zerooffload calibrate` has left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from zerooffload.calibration import RememberedMachine, machine_file, remembered_machine
from zerooffload.cli.doctor.finding import Finding, Verdict

_SUBJECT = "machine profile"


def profile_findings(paths: Sequence[Path]) -> Iterator[Finding]:
    """Whether the profile is there, this machine's, of late, and has the drives of `paths`."""
    found = remembered_machine()
    command = " ".join(["zerooffload calibrate", *(f"--path {path}" for path in paths or [Path("FOLDER")])])
    if found is None:
        what = "cannot be read" if machine_file().exists() else "none"
        advice = f"run `{command}`, so that plans know how fast this machine is"
        yield Finding(_SUBJECT, f"{what} ({machine_file()})", Verdict.NOTE, advice)
        return
    value = _described(found)
    if doubt := found.foreign or found.stale:
        yield Finding(_SUBJECT, value, Verdict.NOTE, doubt)
    elif missing := [str(path) for path in paths if path.is_dir() and not _is_known(path, found)]:
        yield Finding(_SUBJECT, value, Verdict.NOTE, f"it lacks {', '.join(missing)}: run `{command}`")
    else:
        yield Finding(_SUBJECT, value)


def _described(found: RememberedMachine) -> str:
    when = "written by hand" if found.profile.measured is None else f"measured {found.profile.measured:%Y-%m-%d}"
    drives = ", ".join(drive.path for drive in found.profile.drives) or "no drives"
    return f"{found.profile.name}, {when}, {drives} ({found.path})"


def _is_known(path: Path, found: RememberedMachine) -> bool:
    known = (Path(drive.path) for drive in found.profile.drives)
    return any(folder.is_dir() and folder.stat().st_dev == path.stat().st_dev for folder in known)
