from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from zerooffload.tiers import MirroredBlock, Part, RecordLayout, Space


@dataclass
class TracedBlock:
    """Remembers what it was asked; answers with its name."""

    name: str
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    mirror: None = None
    layout: RecordLayout = field(default_factory=lambda: RecordLayout((Part("param", torch.float32),), 100, 4096))

    def __getattr__(self, call: str) -> Any:
        if call.startswith("__"):
            raise AttributeError(call)

        def traced(*args: Any) -> str:
            self.calls.append((call, *args))
            return f"{self.name}.{call}"

        return traced


@pytest.fixture
def home() -> TracedBlock:
    return TracedBlock("home")


@pytest.fixture
def copies() -> TracedBlock:
    return TracedBlock("copies")


def test_everything_is_asked_of_the_home_and_nothing_of_the_copy(home: Any, copies: Any) -> None:
    block = MirroredBlock(home, copies)
    record = torch.zeros(4096, dtype=torch.uint8)
    assert block.layout is home.layout
    assert block.mirror is copies
    asked = [
        ("view", Space.HOST, 0),
        ("whole", Space.DEVICE),
        ("read", 1, record),
        ("write", 2, record),
        ("initialize", 3, record),
    ]
    for call, *args in asked:
        assert getattr(block, call)(*args) == f"home.{call}"
    assert home.calls == asked
    assert copies.calls == []
