from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from zerooffload import ConfigError
from zerooffload.integrations.huggingface.gguf_llama import convert_llama, hub_name, undo_row_permutation

if TYPE_CHECKING:
    from pathlib import Path


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As the tools that write GGUF do it."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.mark.parametrize(("rows", "num_heads"), [(8, 1), (8, 2), (24, 3)])
def test_the_row_permutation_is_undone(rows: int, num_heads: int) -> None:
    weight = np.arange(rows * 5).reshape(rows, 5)
    assert np.array_equal(undo_row_permutation(permuted(weight, num_heads), num_heads), weight)


def test_one_head_of_four_rows_by_hand() -> None:
    # GGUF pairs row i with row i + 2, so it holds 0, 2, 1, 3.
    assert undo_row_permutation(np.array([[0], [2], [1], [3]]), 1).flatten().tolist() == [0, 1, 2, 3]


def test_tensor_names() -> None:
    assert hub_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hub_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_gate_inp"):
        hub_name("blk.0.ffn_gate_inp.weight")


@pytest.mark.parametrize("content", [b"", b"not a GGUF file at all, but long enough to be one"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        convert_llama(file, tmp_path)
