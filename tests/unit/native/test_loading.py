"""Which native module runs, and what is known if none does."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zerooffload import native

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE_TREE = Path(__file__).parents[3]


def installed_module() -> Path | None:
    """Where the installed distribution says that it has put the native module."""
    files = importlib.metadata.files("zerooffload") or []
    found = [
        Path(str(file.locate())).resolve()
        for file in files
        if file.name.startswith("_native.") and not file.name.endswith(".pyi")
    ]
    return found[0] if found else None


def test_what_runs_is_the_installed_module() -> None:
    expected = installed_module()
    assert native.available == (expected is not None), native.why_unavailable
    if expected is not None:
        path = Path(native.module.__file__ or "").resolve()
        assert path == expected
        assert not path.is_relative_to(SOURCE_TREE / "zerooffload")


def test_available_says_why_not() -> None:
    assert native.available == (native.why_unavailable == "")
    assert native.available == (native.module is not None)


@pytest.fixture
def _reload_afterwards() -> Iterator[None]:
    yield
    importlib.reload(native)


@pytest.mark.usefixtures("_reload_afterwards")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ModuleNotFoundError("No module named 'zerooffload._native'", name="zerooffload._native"),
            "this installation of zerooffload was built without its native module",
        ),
        (
            ImportError("undefined symbol: f"),
            "zerooffload._native failed to import: ImportError: undefined symbol: f",
        ),
        (
            SystemError("broken"),
            "zerooffload._native failed to import: SystemError: broken",
        ),
    ],
)
def test_a_failing_import_is_captured(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        assert name == "zerooffload._native"
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    importlib.reload(native)
    assert native.module is None
    assert not native.available
    assert native.why_unavailable == reason
    monkeypatch.undo()


@pytest.mark.skipif(not native.available, reason="needs the native module")
def test_the_stub_names_what_the_module_has() -> None:
    tree = ast.parse((Path(native.__file__).parent / "_native.pyi").read_text())

    def names(body: list[ast.stmt]) -> set[str]:
        found = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        found |= {
            node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        found |= {  # the members of an enum
            target.id
            for node in body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        return {name for name in found if not name.startswith("_")}

    def public(thing: object) -> set[str]:
        return {name for name in vars(thing) if not name.startswith("_")}

    assert names(tree.body) == public(native.module)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name != "IoFailure":
            assert names(node.body) == public(getattr(native.module, node.name))
