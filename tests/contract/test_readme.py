"""What the README promises is what CI runs."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ["pip install '.[hf]' && python examples/quickstart.py", "pip install '.[test]' && pytest"]


@pytest.mark.parametrize("command", COMMANDS)
def test_ci_runs_the_readmes_commands_as_they_stand_there(command: str) -> None:
    assert f"\n    {command}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    ci = ROOT / ".ci" / "run"
    if not ci.exists():
        pytest.skip("a source package has no .ci")
    assert f"\n{command}\n" in ci.read_text(encoding="utf-8")


def test_the_readmes_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [part.split(")")[0] for part in text.split("](")[1:]]
    assert targets
    assert [target for target in targets if "://" not in target and not leads_somewhere(target)] == []


def leads_somewhere(target: str) -> bool:
    """To a file or folder, and to a heading in it if one is named."""
    path, _, heading = target.partition("#")
    if not heading:
        return (ROOT / path).exists()
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return heading in {line.lstrip("#").strip().lower().replace(" ", "-") for line in lines if line.startswith("#")}
