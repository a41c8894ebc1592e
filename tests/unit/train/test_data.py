from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest

from zerooffload import ConfigError
from zerooffload.integrations.huggingface import ByteTokenizer
from zerooffload.train import data
from zerooffload.train.data import BatchOrder, Windows, open_tokens

if TYPE_CHECKING:
    from pathlib import Path


class CountingTokenizer(ByteTokenizer):
    """Bytes, and how often it was asked."""

    def __init__(self) -> None:
        self.num_texts = 0

    def encode(self, text: str) -> list[int]:
        self.num_texts += 1
        return super().encode(text)


def test_text_becomes_its_tokens_once(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("Zürich\r\n".encode())
    tokenizer = CountingTokenizer()
    for _ in range(2):
        tokens = open_tokens(file, "text", tokenizer, cache)
        assert isinstance(tokens, np.memmap)
        assert bytes(tokens.tolist()) == "Zürich\r\n".encode()
    assert tokenizer.num_texts == 1
    assert len(list(cache.iterdir())) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cache", "text.txt"]


def test_other_text_gets_other_tokens(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "text.txt"
    for text in ("one", "two"):
        file.write_text(text)
        assert bytes(open_tokens(file, "text", ByteTokenizer(), cache).tolist()) == text.encode()


def test_pieces_give_the_tokens_of_the_whole(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {n}\n{'  indented' if n % 3 else ''}\n" for n in range(50))
    file = tmp_path / "text.txt"
    file.write_text(text)
    monkeypatch.setattr(data, "_PIECE_CHARACTERS", 64)
    tokenizer = CountingTokenizer()
    assert bytes(open_tokens(file, "text", tokenizer, cache).tolist()) == text.encode()
    assert tokenizer.num_texts > 3
    for piece in list(data._text_pieces(file))[1:]:
        assert not piece[0].isspace()


def test_documents_of_a_jsonl_file_are_separated(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"body": "ab", "id": 1}\n\n{"body": "c"}\n')
    assert open_tokens(file, "body", ByteTokenizer(), cache).tolist() == [97, 98, 256, 99, 256]


@pytest.mark.parametrize(
    ("line", "words"),
    [("{,}", "line 2: expected a JSON object"), ('{"a": "b"}', "field 'text', got a"), ("[1]", "got list")],
)
def test_a_wrong_line_is_named_and_nothing_is_kept(tmp_path: Path, cache: Path, line: str, words: str) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=words):
        open_tokens(file, "text", ByteTokenizer(), cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"), [(None, "does not exist"), (b"", "no text"), (b"\xff\xfe\n", "not UTF-8")]
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, cache: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        open_tokens(file, "text", ByteTokenizer(), cache)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("x")
    with pytest.raises(ConfigError, match="cannot keep the tokens"):
        open_tokens(file, "text", ByteTokenizer(), file)


def test_large_vocabularies_get_wider_tokens(tmp_path: Path, cache: Path) -> None:
    class Wide(ByteTokenizer):
        vocabulary_numel = (1 << 16) + 1

        def encode(self, text: str) -> list[int]:  # noqa: ARG002
            return [1 << 16]

    file = tmp_path / "text.txt"
    file.write_text("x")
    assert open_tokens(file, "text", Wide(), cache).tolist() == [1 << 16]


def test_windows_predict_the_next_token() -> None:
    windows = Windows(np.arange(100, dtype=np.uint16), sequence_length=8, num_heldout=2)
    inputs, targets = windows.training([0, 3])
    assert inputs.tolist() == [list(range(8)), list(range(24, 32))]
    assert (targets - inputs).unique().tolist() == [1]


@pytest.mark.parametrize("num_tokens", [18, 26, 27, 33, 34, 35, 100])
@pytest.mark.parametrize("num_heldout", [0, 1])
def test_held_out_tokens_are_never_trained_on(num_tokens: int, num_heldout: int) -> None:
    windows = Windows(np.arange(num_tokens, dtype=np.uint16), 8, num_heldout)
    trained = {int(token) for batch in windows.training(range(windows.num_training)) for token in batch.flatten()}
    held_out: set[int] = set()
    if num_heldout:
        held_out = {int(token) for batch in windows.heldout(range(num_heldout)) for token in batch.flatten()}
        assert max(held_out) == num_tokens - 1
    assert not trained & held_out
    # Nothing that a window would fit into is left.
    assert num_tokens - len(trained) - len(held_out) <= 8


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="20 tokens: too few"):
        Windows(np.arange(20, dtype=np.uint16), 8, 2)


def test_an_epoch_has_each_window_once_in_an_order_of_its_own() -> None:
    drawn = [index for batch in islice(BatchOrder(7, 2, seed=1), 14) for index in batch]
    epochs = [drawn[start : start + 7] for start in range(0, 28, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_follows_the_seed() -> None:
    first, again, other = (list(islice(BatchOrder(20, 4, seed), 10)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize(("num_windows", "batch_size"), [(7, 2), (6, 2), (3, 5), (1, 4)])
def test_an_order_goes_on_from_any_position(num_windows: int, batch_size: int) -> None:
    whole = list(islice(BatchOrder(num_windows, batch_size, seed=1), 30))
    for num_drawn in range(25):
        before, after = (BatchOrder(num_windows, batch_size, seed=1) for _ in range(2))
        for _ in range(num_drawn):
            next(before)
        after.load_state_dict(before.state_dict())
        assert list(islice(after, 5)) == whole[num_drawn : num_drawn + 5]
