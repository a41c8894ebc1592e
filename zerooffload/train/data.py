"""Text as packed windows of tokens, from a token file that is made once and mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from zerooffload.errors import ConfigError
from zerooffload.integrations.huggingface import Tokenizer

_FORMAT = 1
"""Part of a token file's name: raised when files made before must not be used any more."""
_PIECE_CHARACTERS = 1 << 20

Tokens: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def open_tokens(path: Path, field: str, tokenizer: Tokenizer, cache: Path) -> Tokens:
    """The tokens of a text or JSONL file, mapped from a token file in `cache`, which is made if it is not there.

    Parameters
    ----------
    path : pathlib.Path
        UTF-8 text, or documents as JSON objects, one a line (*.jsonl).
    field : str
        The field of those objects that holds the text.

    Raises
    ------
    ConfigError
        If the file cannot be read, a line is not such an object, or `cache` cannot be written to.
    """
    if not path.is_file():
        raise ConfigError(f"data file {path} does not exist")
    dtype: Any = np.uint16 if tokenizer.vocabulary_numel <= 1 << 16 else np.uint32
    try:
        token_file = cache / f"{_key(path, field, tokenizer)}.{np.dtype(dtype).name}"
        if not token_file.is_file():
            _write_tokens(token_file, path, field, tokenizer, dtype)
    except OSError as error:
        raise ConfigError(f"cannot keep the tokens of {path} in {cache}: {error}") from error
    if not token_file.stat().st_size:
        raise ConfigError(f"data file {path} holds no text")
    return np.memmap(token_file, dtype=dtype, mode="r")


def _key(path: Path, field: str, tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {path.suffix} {field} {tokenizer.fingerprint()}".encode())
    with path.open("rb") as stream:
        digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _write_tokens(token_file: Path, path: Path, field: str, tokenizer: Tokenizer, dtype: Any) -> None:
    token_file.parent.mkdir(parents=True, exist_ok=True)
    part = token_file.with_name(f"{token_file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            for ids in _token_pieces(path, field, tokenizer):
                np.asarray(ids, dtype=dtype).tofile(stream)
        part.replace(token_file)
    finally:
        part.unlink(missing_ok=True)


def _token_pieces(path: Path, field: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    try:
        if path.suffix != ".jsonl":
            yield from map(tokenizer.encode, _text_pieces(path))
            return
        separator = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        for document in _documents(path, field):
            yield tokenizer.encode(document) + separator
    except UnicodeDecodeError as error:
        raise ConfigError(f"data file {path} is not UTF-8 text: {error}") from error


def _text_pieces(path: Path) -> Iterator[str]:
    """The text in pieces that end where a line does and the next begins with a visible character.

    No tokenizer joins tokens there, so the pieces give the tokens of the whole.
    """
    piece = ""
    with path.open(encoding="utf-8", newline="") as stream:
        for line in stream:
            if len(piece) >= _PIECE_CHARACTERS and piece.endswith("\n") and not line[0].isspace():
                yield piece
                piece = ""
            piece += line
    if piece:
        yield piece


def _documents(path: Path, field: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: expected a JSON object: {error}") from None
            text = entry.get(field) if isinstance(entry, dict) else None
            if not isinstance(text, str):
                known = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
                raise ConfigError(f"{path}, line {number}: expected a text in field {field!r}, got {known}")
            yield text


@dataclass(frozen=True)
class Windows:
    """Sequences cut from a run of tokens; the last ones are held out.

    A window is `sequence_length + 1` tokens: each but the last is an input, each but the first is predicted. Training
    windows share a token at their seams; held-out ones share none with them.
    """

    tokens: Tokens
    sequence_length: int
    num_heldout: int

    def __post_init__(self) -> None:
        if self.num_training < 1:
            raise ConfigError(
                f"the data has {len(self.tokens)} tokens: too few for one window of {self.sequence_length} tokens"
                f" beside {self.num_heldout} held out"
            )

    @property
    def _heldout_start(self) -> int:
        return len(self.tokens) - (self.num_heldout * self.sequence_length + 1 if self.num_heldout else 0)

    @property
    def num_training(self) -> int:
        """Windows to train on."""
        return max(0, (self._heldout_start - 1) // self.sequence_length)

    def training(self, indices: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 `[len(indices), sequence_length]`."""
        return self._batch(index * self.sequence_length for index in indices)

    def heldout(self, indices: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 `[len(indices), sequence_length]`."""
        return self._batch(self._heldout_start + index * self.sequence_length for index in indices)

    def _batch(self, starts: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.sequence_length + 1
        rows = np.stack([self.tokens[start : start + length].astype(np.int64) for start in starts])
        batch = torch.from_numpy(rows)
        return batch[:, :-1], batch[:, 1:]


class BatchOrder:
    """Window indices, batch by batch, without end: each epoch goes through all windows in an order of its own.

    Its state is how many batches were drawn.
    """

    def __init__(self, num_windows: int, batch_size: int, seed: int) -> None:
        self._num_windows = num_windows
        self._batch_size = batch_size
        self._seed = seed
        self._num_drawn = 0
        self._epoch = 0
        self._waiting: list[int] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int]:
        while len(self._waiting) < self._batch_size:
            self._waiting += self._epoch_order(self._epoch)
            self._epoch += 1
        drawn, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
        self._num_drawn += 1
        return drawn

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"num_drawn": self._num_drawn}

    def load_state_dict(self, state_dict: dict[str, int], /) -> None:
        """Go on from a position."""
        self._begin(state_dict["num_drawn"])

    def _begin(self, num_drawn: int) -> None:
        self._num_drawn = num_drawn
        self._epoch, first = divmod(num_drawn * self._batch_size, self._num_windows)
        self._waiting = []
        if first:
            self._waiting = self._epoch_order(self._epoch)[first:]
            self._epoch += 1

    def _epoch_order(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(self._num_windows).tolist()
        return order
