from __future__ import annotations

import pytest

n = pytest.importorskip("zerooffload._native")


def test_baseline_is_always_supported() -> None:
    assert n.supported_targets()[0] == "baseline"


def test_set_target(target: str) -> None:
    assert n.active_target() == target


def test_an_unknown_target_is_refused_by_name() -> None:
    before = n.active_target()
    with pytest.raises(ValueError, match=r"'avx9' is unknown or not supported.*supported: baseline"):
        n.set_target("avx9")
    assert n.active_target() == before
