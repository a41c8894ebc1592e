"""The C++ tests, built with cmake."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "native"
CSRC = SOURCE.parents[1] / "csrc"

NEEDS_A_BUILD = [
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake"),
    pytest.mark.skipif(
        not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="needs a C++ compiler"
    ),
    pytest.mark.skipif(not CSRC.is_dir(), reason="needs the C++ sources"),
]


def run(*command: str | Path, **variables: str) -> str:
    """Return what `command` printed; fail with all of it if it failed."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | variables,
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}", pytrace=False)
    return done.stdout


def build(folder: Path, sanitizers: str) -> Path:
    """Build `native_tests`, with the object files that it is linked from, in a new folder, and return that."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run("cmake", *generator, "-S", SOURCE, "-B", folder, f"-DSANITIZERS={sanitizers}")
    run("cmake", "--build", folder, "--parallel", "2")
    return folder
