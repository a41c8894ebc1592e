"""Causal language models and tokenizers of the Hugging Face libraries, which the extra `hf` installs."""

from zerooffload.integrations.huggingface.models import (
    ModelSource,
    build_model,
    load_model,
    model_config,
    resolve_folder,
)
from zerooffload.integrations.huggingface.slicing import SLICE_RULES, slice_language_loss
from zerooffload.integrations.huggingface.smollm2 import prepare_smollm2
from zerooffload.integrations.huggingface.tokenizers import ByteTokenizer, HubTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "SLICE_RULES",
    "ByteTokenizer",
    "HubTokenizer",
    "ModelSource",
    "Tokenizer",
    "build_model",
    "load_model",
    "load_tokenizer",
    "model_config",
    "prepare_smollm2",
    "resolve_folder",
    "slice_language_loss",
]
