"""Builds the C++ tests for the sanitizers, and for another architecture, and runs them.

By hand: `cmake -S tests/native -B build/tests -DSANITIZERS=thread && cmake --build build/tests &&
build/tests/native_tests [part of a test's name]`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.native_build import NEEDS_A_BUILD, SOURCE, build, run

pytestmark = NEEDS_A_BUILD


def sanitizers_link(sanitizers: str, folder: Path) -> bool:
    """Whether the compiler has the sanitizers' run-time libraries (they are often packages of their own)."""
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    compiler = os.environ.get("CXX") or next(name for name in ("c++", "g++", "clang++") if shutil.which(name))
    command = [compiler, f"-fsanitize={sanitizers}", source.name, "-o", "probe"]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers: str, tmp_path: Path) -> None:
    if not sanitizers_link(sanitizers, tmp_path):
        pytest.skip(f"the compiler cannot link with -fsanitize={sanitizers}")
    output = run(
        build(tmp_path / "build", sanitizers) / "native_tests",
        ASAN_OPTIONS="detect_leaks=1",
        TSAN_OPTIONS="halt_on_error=1",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
    assert output.rstrip().endswith(" 0 failed")


def test_on_emulated_aarch64(tmp_path: Path) -> None:
    """Every kernel comes to the bits that x86-64 comes to: test_golden.cpp holds them."""
    script = SOURCE / "run_aarch64.sh"
    done = subprocess.run([script, tmp_path], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(" 0 failed")
