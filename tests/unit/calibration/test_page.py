"""The documentation's profile is one."""

from __future__ import annotations

from pathlib import Path

import zerooffload
from zerooffload.planner.profiles import read_machine

PAGE = Path(zerooffload.__file__).parent / "docs" / "calibrating.md"


def test_the_profile_by_hand_can_be_read(tmp_path: Path) -> None:
    (text,) = (part.split("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```toml\n")[1:])
    file = tmp_path / "machine.toml"
    file.write_text(text, encoding="utf-8")
    profile = read_machine(file)
    assert (profile.device.count, len(profile.drives)) == (4, 2)
    assert profile.drives[0].endurance == 1.2e15
    assert (profile.identity, profile.measured) == ({}, None)
