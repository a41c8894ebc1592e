"""The C++ tests as the package is built, and what the compiler made of the kernels: an object file for each CPU target.

[Note: symbols of kernel objects]
A function that two objects define is linked once, into both, from either of them: from the one that needs AVX-512, say.
So a kernel object must export nothing but its table, and define nothing weak.
"""

from __future__ import annotations

import platform
import re
import shutil
from pathlib import Path

import pytest
from support.native_build import NEEDS_A_BUILD, build, run

TABLES = {
    "baseline": "kBaselineKernels",
    "avx2": "kAvx2Kernels",
    "avx512": "kAvx512Kernels",
    "neon": "kNeonKernels",
}
# What a compiler may call on its own account.
RUNTIME = {"memcpy", "memset", "memmove", "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"}

pytestmark = NEEDS_A_BUILD
needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
only_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for instructions of x86-64")


@pytest.fixture(scope="module")
def plain_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests' program, and the object files that it was linked from."""
    return build(tmp_path_factory.mktemp("plain"), "")


@pytest.fixture(scope="module")
def objects(plain_build: Path) -> dict[str, Path]:
    """Each target's object file."""
    found = {}
    for target in TABLES:
        for path in plain_build.rglob(f"zerooffload_kernels_{target}.dir/**/kernels.cpp.o"):
            found[target] = path
    return found


@pytest.fixture(scope="module")
def code(objects: dict[str, Path]) -> dict[str, str]:
    """Each target's instructions."""
    return {target: run("objdump", "-d", "--no-show-raw-insn", path) for target, path in objects.items()}


def test_the_tests_pass(plain_build: Path) -> None:
    assert run(plain_build / "native_tests").rstrip().endswith(" 0 failed")


@needs_nm
def test_nothing_but_the_table_leaves_a_kernel_object(objects: dict[str, Path]) -> None:
    assert "baseline" in objects
    assert len(objects) >= 2
    for target, path in objects.items():
        exported = run("nm", "--defined-only", "--extern-only", "--format=posix", "--demangle", path)
        names = [line.split()[0] for line in exported.splitlines()]
        assert names == [f"zerooffload::optim::{TABLES[target]}"]


@needs_nm
def test_a_kernel_object_defines_nothing_weak_and_calls_no_library(objects: dict[str, Path]) -> None:
    """Mangled names: a weak one (W, V, u) is that of an inline function or of a template's instance."""
    for target, path in objects.items():
        for line in run("nm", "--format=posix", path).splitlines():
            name, kind = line.split()[:2]
            assert kind not in "WwVvuiC", (target, line)
            assert kind != "U" or name in RUNTIME, (target, line)


@only_x86_64
@needs_objdump
def test_each_target_has_its_own_registers_and_no_others(code: dict[str, str]) -> None:
    # The upper 16 registers and masks come with AVX-512, whatever the width.
    of_avx512 = r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b"
    assert not re.search(r"%ymm|" + of_avx512, code["baseline"])
    assert not re.search(r"\sv[a-z0-9]+ ", code["baseline"])
    if "avx2" in code:
        assert "%ymm" in code["avx2"]
        assert not re.search(of_avx512, code["avx2"])
    if "avx512" in code:
        assert "%zmm" in code["avx512"]


@only_x86_64
@needs_objdump
def test_the_operations_that_take_longest_are_whole_vectors(code: dict[str, str]) -> None:
    widest = {"baseline": "xmm", "avx2": "ymm", "avx512": "zmm"}
    for target, text in code.items():
        for operation in ("sqrtps", "divps"):
            assert re.search(rf"\sv?{operation}\s.*%{widest[target]}\d+", text), (target, operation)
    for target in ("avx2", "avx512"):
        if target in code:
            assert "vcvtph2ps" in code[target]


@needs_objdump
def test_no_two_operations_are_fused(code: dict[str, str]) -> None:
    fused = r"\s(vfn?m(add|sub)\w*|fn?m(add|sub)|fml[as])\s"
    for target, text in code.items():
        assert not re.search(fused, text), target
