"""Models and tokenizers of the Hugging Face libraries, which the extra `hf` installs."""

from zerooffload.integrations.huggingface.losses import next_token_loss
from zerooffload.integrations.huggingface.models import (
    ModelSource,
    build_model,
    model_config,
    random_model,
    resolve_folder,
    source_config,
)
from zerooffload.integrations.huggingface.pretrained import load_pretrained, opened_model
from zerooffload.integrations.huggingface.profiling import LanguageModelProfiles, profile_language_model
from zerooffload.integrations.huggingface.slicing import SLICE_RULES, slice_language_loss
from zerooffload.integrations.huggingface.smollm2 import prepare_smollm2
from zerooffload.integrations.huggingface.tokenizers import (
    ByteTokenizer,
    HubTokenizer,
    Tokenizer,
    load_tokenizer,
    original_tokenizer,
)

__all__ = [
    "SLICE_RULES",
    "ByteTokenizer",
    "HubTokenizer",
    "LanguageModelProfiles",
    "ModelSource",
    "Tokenizer",
    "build_model",
    "load_pretrained",
    "load_tokenizer",
    "model_config",
    "next_token_loss",
    "opened_model",
    "original_tokenizer",
    "prepare_smollm2",
    "profile_language_model",
    "random_model",
    "resolve_folder",
    "slice_language_loss",
    "source_config",
]
