"""The turns of a tuning that was left, so that it can be gone on with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from zerooffload.errors import ConfigError
from zerooffload.machine import write_whole

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A trial of a configuration.

    Attributes
    ----------
    key : str
        The configuration's.
    seconds : float, optional
        Of a step, the median; None if it could not run.
    took_seconds : float
        In all, beginning and end included.
    refusal : str
        Why it could not run.
    """

    key: str
    seconds: float | None
    took_seconds: float
    refusal: str = ""


class Journal:
    """Keeps the turns of one tuning in a file, and plays those that it finds there again in their order.

    Parameters
    ----------
    subject : object
        What is tuned, on what, by what: plain values. Turns of another subject are forgotten.

    Raises
    ------
    ConfigError
        If another process is at it.
    """

    def __init__(self, path: Path, subject: object) -> None:
        self.path = path
        self.digest = hashlib.sha256(json.dumps(subject, sort_keys=True, default=str).encode()).hexdigest()
        found = _read(path)
        owner = found.get("owner")
        if owner and owner != _this_process() and owner == _process(owner[0]):
            raise ConfigError(f"process {owner[0]} is tuning this recipe: let it end, or name another --output")
        is_same = (found.get("format"), found.get("subject")) == (_FORMAT, self.digest)
        self._played: list[Turn] = [Turn(**turn) for turn in found["turns"]] if is_same else []
        self.num_found = len(self._played)
        self._turns: list[Turn] = []

    def turn(self, key: str, take: Callable[[], Turn]) -> Turn:
        """The next turn: the one that was taken before, or a new one, which is written down."""
        if self._played and self._played[0].key == key:
            self._turns.append(self._played.pop(0))
        else:
            self._played.clear()
            self._turns.append(take())
            self._write(_this_process())
        return self._turns[-1]

    def release(self) -> None:
        """Nobody is at it any more; what was written stays."""
        if self._turns:
            self._write(None)

    def remove(self) -> None:
        """The tuning is done."""
        self.path.unlink(missing_ok=True)

    def _write(self, owner: list[Any] | None) -> None:
        values = {
            "format": _FORMAT,
            "subject": self.digest,
            "owner": owner,
            "turns": [asdict(turn) for turn in (*self._turns, *self._played)],
        }
        try:
            write_whole(self.path, json.dumps(values, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _this_process() -> list[Any]:
    return _process(os.getpid())


def _process(number: int) -> list[Any]:
    """Its number and when it began: the number alone may be another's by now."""
    try:
        return [number, psutil.Process(number).create_time()]
    except psutil.NoSuchProcess:
        return []
