"""Builds the C++ tests and runs them: plainly, and under the sanitizers.

By hand: `cmake -S tests/native -B build/tests -DSANITIZERS=thread && cmake --build build/tests &&
build/tests/native_tests [part of a test's name]`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent
CSRC = SOURCE.parents[1] / "csrc"

pytestmark = [
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
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run("cmake", *generator, "-S", SOURCE, "-B", folder, f"-DSANITIZERS={sanitizers}")
    run("cmake", "--build", folder, "--parallel", "2")
    return folder / "native_tests"


def sanitizers_link(sanitizers: str, folder: Path) -> bool:
    """Whether the compiler has the sanitizers' run-time libraries (they are often packages of their own)."""
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    compiler = os.environ.get("CXX") or next(name for name in ("c++", "g++", "clang++") if shutil.which(name))
    command = [compiler, f"-fsanitize={sanitizers}", source.name, "-o", "probe"]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("sanitizers", ["", "address,undefined", "thread"])
def test_native(sanitizers: str, tmp_path: Path) -> None:
    if sanitizers and not sanitizers_link(sanitizers, tmp_path):
        pytest.skip(f"the compiler cannot link with -fsanitize={sanitizers}")
    output = run(
        build(tmp_path / "build", sanitizers),
        ASAN_OPTIONS="detect_leaks=1",
        TSAN_OPTIONS="halt_on_error=1",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
    assert output.rstrip().endswith(" 0 failed")


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("build_type", ["Debug", "Release"])
def test_kernel_objects_export_their_table_and_nothing_else(build_type: str, tmp_path: Path) -> None:
    """A function that both objects defined could be linked into both from the one that needs AVX2."""
    run("cmake", "-S", SOURCE, "-B", tmp_path, f"-DCMAKE_BUILD_TYPE={build_type}")
    targets = ["baseline"]
    if "zerooffload_kernels_avx2" in run("cmake", "--build", tmp_path, "--target", "help"):
        targets.append("avx2")
    for target in targets:
        run("cmake", "--build", tmp_path, "--target", f"zerooffload_kernels_{target}")
        [kernels] = tmp_path.rglob(f"zerooffload_kernels_{target}.dir/**/kernels.cpp.o")
        exported = run("nm", "--defined-only", "--extern-only", "--format=posix", "--demangle", kernels)
        assert [line.split()[0] for line in exported.splitlines()] == [
            f"zerooffload::optim::k{target.capitalize()}Kernels"
        ]
        code = run("objdump", "--disassemble", "--no-show-raw-insn", kernels)
        # The registers of AVX2, and whole vectors in the operations that take longest.
        assert ("%ymm" in code) == (target == "avx2")
        if target == "avx2":
            assert "vsqrtps" in code
            assert "vdivps" in code
        assert "fmadd" not in code
