"""Tokenizers: a model's own, or bytes."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol

from zerooffload.errors import ConfigError
from zerooffload.integrations.huggingface.models import is_gguf, resolve_folder, transformers_errors

BYTES = "bytes"
"""The name of the tokenizer that needs no files."""


class Tokenizer(Protocol):
    """Text to token ids.

    Attributes
    ----------
    vocabulary_numel : int
        Ids are below this.
    end_of_text : int, optional
        Id that separates documents, if there is one.
    """

    vocabulary_numel: int
    end_of_text: int | None

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without special tokens around it."""

    def fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 between documents. For models with random weights."""

    vocabulary_numel = 257
    end_of_text: int | None = 256

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(text.encode())

    def fingerprint(self) -> str:
        """See `Tokenizer`."""
        return BYTES


class HubTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocabulary_numel = len(tokenizer)
        self.end_of_text: int | None = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def fingerprint(self) -> str:
        """See `Tokenizer`."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else json.dumps(sorted(self._tokenizer.get_vocab().items()))
        return hashlib.sha256(f"{type(self._tokenizer).__name__} {text}".encode()).hexdigest()


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model folder or hub name, or "bytes".

    Raises
    ------
    ConfigError
        If there is none.
    """
    if name == BYTES:
        return ByteTokenizer()
    if is_gguf(name):
        raise ConfigError(f"the tokenizer in {name} is not read: name a folder, or {BYTES!r}, as [model] tokenizer")
    return HubTokenizer(original_tokenizer(name, trust_remote_code=trust_remote_code))


def original_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder or hub name, as transformers has it.

    Raises
    ------
    ConfigError
        If there is none.
    """
    folder = resolve_folder(name, trust_remote_code=trust_remote_code)
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise ConfigError(f"{folder} holds no tokenizer: name one, or {BYTES!r}, as the tokenizer of [model]")
    with transformers_errors(f"the tokenizer in {folder} cannot be used"):
        from transformers import AutoTokenizer  # noqa: PLC0415 - an extra

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
