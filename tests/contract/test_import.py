"""Importing is quick and starts nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HEAVY = ["torch", "transformers", "pydantic", "numpy", "aiofiles", "typer", "rich", "psutil", "safetensors"]


def ask(code: str, cwd: Path) -> Any:
    """Run `code` in a new interpreter, with the source tree out of its way; it prints JSON."""
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=120)
    return json.loads(result.stdout.splitlines()[-1])


def test_importing_the_package_imports_nothing_heavy_and_is_quick(tmp_path: Path) -> None:
    code = (
        "import json, sys, time\n"
        "begin = time.perf_counter()\n"
        "import zerooffload\n"
        "seconds = time.perf_counter() - begin\n"
        f"print(json.dumps([seconds, [name for name in {HEAVY} if name in sys.modules], zerooffload.__version__]))\n"
    )
    seconds, imported, version = ask(code, tmp_path)
    assert imported == []
    assert version
    assert seconds < 1.0


def test_errors_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import json, sys, zerooffload as zo\n"
        "zo.ConfigError, zo.TierIOError\n"
        "print(json.dumps('torch' in sys.modules))\n"
    )
    assert ask(code, tmp_path) is False


def test_using_every_name_initialises_no_cuda_and_imports_no_transformers(tmp_path: Path) -> None:
    code = (
        "import json, sys, zerooffload as zo\n"
        "for name in zo.__all__: getattr(zo, name)\n"
        "zo.OffloadConfig()\n"
        "import torch\n"
        "print(json.dumps([torch.cuda.is_initialized(), 'transformers' in sys.modules]))\n"
    )
    assert ask(code, tmp_path) == [False, False]
