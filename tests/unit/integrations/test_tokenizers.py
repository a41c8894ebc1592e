from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zerooffload import ConfigError
from zerooffload.integrations.huggingface import ByteTokenizer, load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def test_bytes_are_their_own_tokens() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("aü") == [97, 195, 188]
    assert max(*tokenizer.encode("\U0010ffff"), tokenizer.end_of_text or 0) < tokenizer.vocabulary_numel


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"model\.gguf is not read"):
        load_tokenizer(str(tmp_path / "model.gguf"))
