from __future__ import annotations

import pytest

from zerooffload import ConfigError, native
from zerooffload.aio import choose_engine

needs_native = pytest.mark.skipif(not native.available, reason="no native module")


@pytest.fixture
def _without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(native, "why_unavailable", "left out by the test")


@needs_native
def test_the_native_engine_is_the_first_choice_and_says_why() -> None:
    chosen = choose_engine()
    chosen.engine.close()
    assert (chosen.engine.name, chosen.reason) == ("threads", "the native module is there")


@pytest.mark.parametrize("name", [pytest.param("threads", marks=needs_native), "aiofiles"])
def test_an_engine_can_be_forced(name: str, caplog: pytest.LogCaptureFixture) -> None:
    chosen = choose_engine(name)
    chosen.engine.close()
    assert (chosen.engine.name, chosen.reason) == (name, "forced by name")
    assert caplog.records == []


@pytest.mark.usefixtures("_without_native")
def test_without_the_native_module_the_fallback_knows_its_reason() -> None:
    chosen = choose_engine()
    chosen.engine.close()
    assert chosen.engine.name == "aiofiles"
    assert "left out by the test" in chosen.reason


@pytest.mark.usefixtures("_without_native")
def test_a_forced_engine_never_falls_back() -> None:
    with pytest.raises(ConfigError, match=r"'threads' was forced.*left out by the test"):
        choose_engine("threads")


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'libaio'.*auto, threads or aiofiles"):
        choose_engine("libaio")
