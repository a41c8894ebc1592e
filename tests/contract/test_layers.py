"""An upper layer may import a lower one, never the reverse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE_TREE = Path(__file__).parents[2]


def test_import_layers_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("importlinter", reason="import-linter is in the extra 'dev'")
    if not (SOURCE_TREE / "zerooffload").is_dir():
        pytest.skip("no source tree here")
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE_TREE), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=SOURCE_TREE, check=False, capture_output=True, text=True, timeout=120, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
