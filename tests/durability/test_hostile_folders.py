"""A short run of `fuzz_weights.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.hostile_folders import Net, attack, read, read_gguf, sample_folder, sample_gguf

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("seed", range(4))
def test_only_checkpoint_errors_come_out(seed: int, scratch: Path) -> None:
    outcomes = {attack(seed << 32 | number, scratch, measure=not number % 8) for number in range(300)}
    assert {outcome.rpartition(": ")[2] for outcome in outcomes} == {"read", "refused"}
    refused = {outcome.partition(":")[0] for outcome in outcomes if outcome.endswith("refused")}
    assert len(refused) == 16


@pytest.mark.parametrize("sharded", [False, True])
def test_the_sample_itself_is_read(scratch: Path, *, sharded: bool) -> None:
    sample_folder(scratch / "model", sharded=sharded)
    assert read(scratch / "model").keys() == Net().state_dict().keys()


def test_the_sample_of_gguf_is_read(scratch: Path) -> None:
    (scratch / "model").write_bytes(sample_gguf())
    fields, tensors = read_gguf(scratch / "model")
    assert fields == {
        "general.architecture": "llama",
        "general.alignment": 32,
        "tokens": ["a", "b", "c"],
        "scores": [0.5, 1.0, 2.0],
        "yes": True,
        "large": 1 << 40,
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "one": (3, 4),
        "two": (8,),
        "three": (2, 64),
    }
