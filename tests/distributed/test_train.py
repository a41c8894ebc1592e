"""`zerooffload train` on several ranks: the losses of one rank with the whole batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from support.ranks import free_port

RECIPE = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
vocab_size = 257

[data]
path = "{folder}/text.txt"

[offload]
params = "nvme"
optimizer = "nvme"
gradients = "nvme"
nvme_paths = ["{folder}/nvme"]
host_memory = "32MiB"
threads = 1

[training]
steps = 3
batch_size = {batch_size}
sequence_length = 16
max_grad_norm = 1.0
evaluation_windows = 2
"""


def train(folder: Path, world_size: int, batch_size: int) -> dict[str, object]:
    recipe, report = folder / f"{world_size}.toml", folder / f"{world_size}.json"
    recipe.write_text(RECIPE.format(folder=folder, batch_size=batch_size), encoding="utf-8")
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-P",
        "-W",
        "ignore",
        "-c",
        "from zerooffload.cli import main; main()",
        "train",
        str(recipe),
    ]
    ranks = [
        subprocess.Popen(
            [*command, "--report", str(report)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, outputs
    # The first rank speaks for all.
    assert all(not output.strip() for output in outputs[1:])
    result: dict[str, object] = json.loads(report.read_text(encoding="utf-8"))
    return result


def test_two_ranks_train_like_one_with_the_batches_of_both(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 200, encoding="utf-8")
    two, one = train(tmp_path, 2, 2), train(tmp_path, 1, 4)
    losses, expected = torch.tensor(two["losses"]), torch.tensor(one["losses"])
    # Two means of two instead of one of four, and gradients added in another order: a few roundings of fp32 a step.
    torch.testing.assert_close(losses, expected, rtol=64 * torch.finfo(torch.float32).eps, atol=0.0)
    assert two["heldout_loss_before"] == one["heldout_loss_before"]
    assert not list((tmp_path / "nvme").iterdir())
