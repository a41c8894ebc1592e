"""The GGUF file of a Llama: what it is in transformers, and a Hugging Face folder made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from zerooffload.checkpoint.gguf_file import GgufFile
from zerooffload.checkpoint.stored_tensor import Rows, StoredTensor, read_whole
from zerooffload.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of a block, as GGUF and as transformers calls them."""


def convert_llama(gguf_file: Path, folder: Path) -> None:
    """Write config.json, tokenizer files and model.safetensors into `folder`, which exists.

    Raises
    ------
    ConfigError
        If the file is not a Llama with a byte-level BPE tokenizer that this knows.
    CheckpointError
        If it is not a whole GGUF file.
    """
    with GgufFile(gguf_file) as file:
        _write_json(folder / "config.json", llama_config(file) | {"torch_dtype": "bfloat16"})
        build_tokenizer(file.fields).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config(file.fields))
        weights = {name: read_whole(tensor).to(torch.bfloat16) for name, tensor in llama_tensors(file).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def llama_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of the model that the metadata describes.

    Raises
    ------
    ConfigError
        If it is no Llama that this knows.
    """
    fields = file.fields
    if _value(fields, "general.architecture") != "llama":
        raise ConfigError(f"{file.path}: expected a Llama, got {_value(fields, 'general.architecture')!r:.200}")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise ConfigError(f"{file.path}: Llamas with scaled rotary embeddings are not known")

    def get(name: str) -> Any:
        return _value(fields, f"llama.{name}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "max_position_embeddings": get("context_length"),
        "vocab_size": get("vocab_size"),
        # GGUF holds a float32, and 1e-05 was meant.
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        "rope_theta": get("rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in file.names,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def llama_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """The tensors under the names, and with the rows in the order, that they have in transformers.

    Raises
    ------
    ConfigError
        If a Llama has no such tensor.
    CheckpointError
        If they do not lie in the file, or two are one.
    """
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    found: dict[str, StoredTensor] = {}
    for name, tensor in file.tensors().items():
        part = next((part for part in heads if f".{part}." in name), None)
        if hub_name(name) in found:
            raise CheckpointError(f"{file.path}: two tensors are {hub_name(name)}")
        found[hub_name(name)] = tensor if part is None else _in_order(tensor, _value(file.fields, heads[part]), name)
    return found


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """GPT-2's byte-level BPE over the file's tokens and merges, digits split one by one (GGUF's "smollm").

    Raises
    ------
    ConfigError
        If the metadata names another model or pre-tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - an extra

    kind = (_value(fields, "tokenizer.ggml.model"), _value(fields, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConfigError(f"expected a tokenizer of model and pre-tokenizer ('gpt2', 'smollm'), got {kind}")
    tokens: list[str] = _value(fields, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(fields, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = _value(fields, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer_config.json that goes with `build_tokenizer`."""
    tokens: list[str] = _value(fields, "tokenizer.ggml.tokens")

    def token(name: str) -> str:
        index: int = _value(fields, f"tokenizer.ggml.{name}_token_id")
        return tokens[index]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "model_max_length": _value(fields, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": _value(fields, "tokenizer.chat_template"),
    }


def row_order(num_rows: int, num_heads: int) -> list[int]:
    """Where GGUF has the rows of q or k, in the order of Hugging Face.

    GGUF interleaves the halves that rotary embedding pairs: rows of a head are in `[head_dim/2, 2]` order there and in
    `[2, head_dim/2]` order here.
    """
    rows = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    order: list[int] = rows.swapaxes(1, 2).reshape(-1).tolist()
    return order


def hub_name(gguf_name: str) -> str:
    """The Hugging Face name of a tensor.

    Raises
    ------
    ConfigError
        If a Llama has no such tensor.
    """
    parts = gguf_name.removesuffix(".weight").split(".")
    if len(parts) == 1 and parts[0] in _TOP_LEVEL:
        return f"{_TOP_LEVEL[parts[0]]}.weight"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in IN_BLOCK:
        return f"model.layers.{parts[1]}.{IN_BLOCK[parts[2]]}.weight"
    raise ConfigError(f"the GGUF file holds a tensor that a Llama does not have: {gguf_name}")


def _in_order(tensor: StoredTensor, num_heads: Any, name: str) -> StoredTensor:
    if type(num_heads) is not int or num_heads < 1 or not tensor.shape or tensor.shape[0] % (2 * num_heads):
        raise ConfigError(f"the rows of {name}, of shape {tensor.shape}, are not those of {num_heads!r:.200} heads")
    return Rows(tensor, row_order(tensor.shape[0], num_heads))


def _value(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise ConfigError(f"the GGUF file lacks {name}")
    return fields[name]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
