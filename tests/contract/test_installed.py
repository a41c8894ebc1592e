"""What runs is the package as installed, native module included, and never the source tree by accident."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import zerooffload
from zerooffload import native

SOURCE_TREE = Path(__file__).parents[2]


def is_editable() -> bool:
    """Whether the package was installed with `pip install -e`."""
    direct_url = importlib.metadata.distribution("zerooffload").read_text("direct_url.json")
    return bool(direct_url) and bool(json.loads(direct_url).get("dir_info", {}).get("editable"))


def installed_native() -> Path | None:
    """The native module among the files of the installed distribution."""
    for file in importlib.metadata.files("zerooffload") or []:
        if file.name.startswith("_native.") and file.suffix != ".pyi":
            return Path(str(file.locate())).resolve()
    return None


def test_the_package_that_runs_is_the_installed_one() -> None:
    folder = Path(zerooffload.__file__).resolve().parent
    if is_editable():
        assert folder == SOURCE_TREE / "zerooffload"
        pytest.skip("editable install: Python files are those of the source tree, as asked for")
    assert not folder.is_relative_to(SOURCE_TREE / "zerooffload"), "the source tree shadows the installed package"
    site = Path(str(importlib.metadata.distribution("zerooffload").locate_file("zerooffload"))).resolve()
    assert folder == site


def test_the_native_module_that_runs_is_the_installed_one() -> None:
    expected = installed_native()
    if expected is None:
        assert not native.available
        pytest.skip(f"installed without the native module: {native.why_unavailable}")
    assert native.available, native.why_unavailable
    assert Path(native.module.__file__ or "").resolve() == expected
    assert not expected.is_relative_to(SOURCE_TREE / "zerooffload"), "a native module lies in the source tree"


def test_a_run_elsewhere_finds_the_same_package(tmp_path: Path) -> None:
    code = "import zerooffload; print(zerooffload.__file__)"
    command = [sys.executable, "-P", "-c", code]
    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout
    assert Path(found.strip()).resolve() == Path(zerooffload.__file__).resolve()


def test_the_version_is_the_distributions() -> None:
    assert zerooffload.__version__ == importlib.metadata.version("zerooffload")
