from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from zerooffload.train.recipe import Recipe, recipe_from

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """zerooffload's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zerooffload"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 40, encoding="utf-8")
    return file


@pytest.fixture
def values(text_file: Path) -> dict[str, Any]:
    """A recipe's plain values: a tiny Llama over bytes, all states on host."""
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 257,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
            }
        },
        "data": {"path": str(text_file)},
        "offload": {"host_memory": "64MiB", "threads": 1},
        "optimizer": {"lr": 1e-2},
        "training": {"steps": 3, "batch_size": 2, "sequence_length": 16, "evaluation_windows": 3, "seed": 7},
    }


@pytest.fixture
def make_recipe(values: dict[str, Any]) -> Callable[..., Recipe]:
    """`make_recipe(training={"steps": 1})`: the recipe above, with settings replaced."""

    def make(**sections: dict[str, Any]) -> Recipe:
        return recipe_from(
            {name: {**values.get(name, {}), **sections.get(name, {})} for name in {**values, **sections}}
        )

    return make
