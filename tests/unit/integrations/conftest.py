from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def tiny_llama() -> dict[str, Any]:
    """The fields of a config.json."""
    return {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
