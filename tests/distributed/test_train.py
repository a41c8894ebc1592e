"""`zerooffload train` on several ranks: the losses of one rank with the whole batch, on one machine or two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.folders import leftovers
from support.machines import Machine, in_namespaces, on_loopback
from support.ranks import free_port

Report = dict[str, Any]

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
# The bytes of single steps are compared.
update = "after_backward"

[training]
steps = 3
batch_size = {batch_size}
sequence_length = 16
max_grad_norm = 1.0
evaluation_windows = 2
"""

PYTHON = (sys.executable, "-P", "-W", "ignore")


def write_recipe(folder: Path, batch_size: int) -> Path:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=folder, batch_size=batch_size), encoding="utf-8")
    (folder / "nvme").mkdir()
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 200, encoding="utf-8")
    return recipe


def finish(commands: Sequence[tuple[Sequence[str], dict[str, str]]]) -> list[str]:
    """Run commands at once, each with its environment; all must succeed. Returns what they print."""
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, own in commands
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
        return outputs
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def printed(logs: Path) -> str:
    """What the one rank under a torchrun printed, both streams."""
    streams = sorted(logs.rglob("std*.log"))
    assert [stream.name for stream in streams] == ["stderr.log", "stdout.log"]
    return "".join(stream.read_text(encoding="utf-8") for stream in streams)


def train_command(recipe: Path, report: Path) -> list[str]:
    return ["-c", "from zerooffload.cli import main; main()", "train", str(recipe), "--report", str(report)]


def train(folder: Path, world_size: int, batch_size: int) -> Report:
    """On one machine, started as torchrun starts ranks."""
    folder.mkdir(exist_ok=True)
    report = folder / "report.json"
    together = {
        "XDG_CACHE_HOME": str(folder),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    command = [*PYTHON, *train_command(write_recipe(folder, batch_size), report)]
    outputs = finish(
        [(command, {**together, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world_size)]
    )
    # The first rank speaks for all.
    assert all(not output.strip() for output in outputs[1:])
    assert leftovers(folder / "nvme") == []
    result: Report = json.loads(report.read_text(encoding="utf-8"))
    return result


def train_on_machines(folder: Path, machines: Sequence[Machine], batch_size: int) -> Report:
    """One rank on each, under a torchrun each, with a home, a cache and a drive of each one's own."""
    recipe, report = write_recipe(folder, batch_size), folder / "report.json"
    port = str(free_port())
    commands = []
    for number, machine in enumerate(machines):
        own = folder / f"machine-{number}"
        (own / "nvme").mkdir(parents=True)
        environment = {
            "HOME": str(own),
            "XDG_CACHE_HOME": str(own / "cache"),
            "GLOO_SOCKET_IFNAME": machine.interface,
            # No name server tells the names of hosts here.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
        }
        torchrun = [
            *machine.prefix,
            *(*PYTHON, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(machines)), "--node-rank", str(number), "--nproc-per-node", "1"),
            *("--master-addr", machines[0].address, "--master-port", port, "--no-python"),
            # Apart from what torchrun itself logs, for one when the other machine's torchrun ends before its own.
            *("--redirects", "3", "--log-dir", str(own / "logs")),
        ]
        drive = ["--set", f'offload.nvme_paths=["{own}/nvme"]']
        commands.append(([*torchrun, *PYTHON, *train_command(recipe, report), *drive], environment))
    finish(commands)
    # The first rank speaks for all.
    assert "report written" in printed(folder / "machine-0" / "logs")
    assert not printed(folder / "machine-1" / "logs").strip()
    assert [leftovers(nvme) for nvme in folder.glob("machine-*/nvme")] == [[]] * len(machines)
    assert len(list(folder.glob("machine-*/cache/**/tokens/*"))) == len(machines)
    result: Report = json.loads(report.read_text(encoding="utf-8"))
    return result


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return train(tmp_path_factory.mktemp("two"), 2, 2)


def test_two_ranks_train_like_one_with_the_batches_of_both(two_ranks: Report, tmp_path: Path) -> None:
    one = train(tmp_path, 1, 4)
    losses, expected = torch.tensor(two_ranks["losses"]), torch.tensor(one["losses"])
    # Two means of two instead of one of four, and gradients added in another order: a few roundings of fp32 a step.
    torch.testing.assert_close(losses, expected, rtol=64 * torch.finfo(torch.float32).eps, atol=0.0)
    assert two_ranks["heldout_loss_before"] == one["heldout_loss_before"]


@pytest.mark.parametrize(
    "machines", [in_namespaces, lambda: nullcontext(on_loopback())], ids=["namespaces", "loopback"]
)
def test_two_machines_train_like_one_with_two_ranks(
    machines: Callable[[], AbstractContextManager[list[Machine]]], two_ranks: Report, tmp_path: Path
) -> None:
    with machines() as both:
        report = train_on_machines(tmp_path, both, 2)
    equal = ("steps", "losses", "heldout_loss_before", "heldout_loss_after", "nvme_read_bytes", "nvme_written_bytes")
    for name in (*equal, "planned_bytes", "leased_bytes"):
        assert report[name] == two_ranks[name], name
    norms = [[record["grad_norm"] for record in run["step_records"]] for run in (report, two_ranks)]
    assert norms[0] == norms[1]
