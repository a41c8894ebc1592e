from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.stored_weights import assert_same_states, states_of

import zerooffload as zo
from zerooffload import CheckpointError, ConfigError
from zerooffload.integrations.huggingface.gguf_llama import IN_BLOCK, convert_llama, hub_name, row_order

hf = pytest.importorskip("transformers")


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As the tools that write GGUF do it."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.mark.parametrize(("rows", "num_heads"), [(8, 1), (8, 2), (24, 3)])
def test_the_row_permutation_is_undone(rows: int, num_heads: int) -> None:
    weight = np.arange(rows * 5).reshape(rows, 5)
    assert np.array_equal(permuted(weight, num_heads)[row_order(rows, num_heads)], weight)


def test_one_head_of_six_rows_by_hand() -> None:
    # GGUF pairs row i with row i + 3, so it holds 0, 3, 1, 4, 2, 5.
    assert row_order(6, 1) == [0, 2, 4, 1, 3, 5]


def test_tensor_names() -> None:
    assert hub_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hub_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_gate_inp"):
        hub_name("blk.0.ffn_gate_inp.weight")


KINDS = {
    "attn_k": "F16",
    "attn_q": "Q4_1",
    "attn_v": "Q8_0",
    "attn_output": "BF16",
    "ffn_gate": "Q5_0",
    "ffn_up": "Q4_0",
    "ffn_down": "Q8_0",
    "token_embd": "Q8_0",
    "output": "Q4_0",
}
HEADS = {"attn_q": 4, "attn_k": 2}


def write_gguf(file: Path, model: Any, **fields: int) -> dict[str, torch.Tensor]:
    """A small Llama, quantized; what its weights are then, by their names in transformers."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(fields.get("blocks", config.num_hidden_layers))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(64)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"token {number}" for number in range(20)])
    stored, weights = {}, model.state_dict()
    names = [f"blk.{number}.{part}" for number in range(config.num_hidden_layers) for part in IN_BLOCK]
    head = [] if config.tie_word_embeddings else ["output"]
    for name in (f"{name}.weight" for name in ("token_embd", *names, "output_norm", *head)):
        values = weights[hub_name(name)].numpy()
        part = name.split(".")[-2]
        kind = gguf.GGMLQuantizationType[KINDS.get(part, "F32")]
        values = permuted(values, HEADS[part]) if part in HEADS else values
        quantized = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, quantized, raw_dtype=kind)
        values = np.array(gguf.quants.dequantize(quantized, kind), np.float32)
        values = values[row_order(len(values), HEADS[part])] if part in HEADS else values
        stored[hub_name(name)] = torch.from_numpy(values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def llama(*, tied: bool) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": HEADS["attn_q"], "num_key_value_heads": HEADS["attn_k"]}
    torch.manual_seed(4)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


@pytest.mark.parametrize("compute_dtype", [None, "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_file_is_loaded_as_its_dequantized_model(
    tmp_path: Path,
    offload: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    compute_dtype: str | None,
    *,
    tied: bool,
) -> None:
    # Pieces that begin and end inside of blocks.
    monkeypatch.setattr("zerooffload.runtime.initial_values._PIECE_NUMEL", 1000)
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)
    monkeypatch.setattr("zerooffload.checkpoint.gguf_file._PIECE_NUMEL", 333)
    model = llama(tied=tied)
    weights = write_gguf(tmp_path / "model.gguf", model)
    assert ("lm_head.weight" in weights) == (not tied)
    model.load_state_dict(weights, strict=not tied)
    expected = states_of(offload(model, compute_dtype=compute_dtype))
    config = zo.OffloadConfig(compute_dtype=compute_dtype, threads=1, host_memory="64MiB")
    assert_same_states(states_of(zo.load_pretrained(tmp_path / "model.gguf", config)), expected)


def test_a_model_and_its_file_agree(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", llama(tied=True), blocks=3)
    with pytest.raises(CheckpointError, match=r"9 weights of the model are missing: model\.layers\.2"):
        zo.load_pretrained(tmp_path / "model.gguf")
    write_gguf(tmp_path / "model.gguf", llama(tied=True), blocks=1 << 31)
    with pytest.raises(CheckpointError, match="2147483648 layers cannot be made of 20 tensors"):
        zo.load_pretrained(tmp_path / "model.gguf")


@pytest.mark.parametrize("content", [b"", b"not a GGUF file at all, but long enough to be one"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        convert_llama(file, tmp_path)
