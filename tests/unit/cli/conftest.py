from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zerooffload.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RECIPE = """
[model.config]
model_type = "llama"
vocab_size = 257
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1

[data]
path = "{text}"

[offload]
params = "nvme"
optimizer = "nvme"
nvme_paths = ["{nvme}"]
host_memory = "64MiB"
threads = 1

[training]
steps = 2
batch_size = 2
sequence_length = 16
evaluation_windows = 2
"""


@pytest.fixture
def recipe_file(tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that trains a tiny model on the nvme tier."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    file = tmp_path / "run.toml"
    file.write_text(RECIPE.format(text=text, nvme=nvme))
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process: its exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call
