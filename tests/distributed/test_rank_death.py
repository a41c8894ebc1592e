"""A rank that dies: the others end with an error that names it, and nothing stays locked."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.ranks import free_port

import zerooffload as zo
from zerooffload.tiers.directory import RunDirectory

WORLD_SIZE = 3
TIMEOUT_SECONDS = 20

SCRIPT = """
import json, os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
import zerooffload as zo

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds={timeout}))
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)])
config = zo.OffloadConfig(params="nvme", optimizer="nvme", gradients="nvme", nvme_paths=[{folder!r}],
                          host_memory="32MiB", threads=1)
try:
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters())
    print("training", flush=True)
    while True:
        model(torch.randn(4, 256)).square().mean().backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
except zo.ZeroOffloadError as error:
    print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""


def start(folder: Path) -> list[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
    }
    code = SCRIPT.format(timeout=TIMEOUT_SECONDS, folder=str(folder))
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", code],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]


@pytest.mark.parametrize("victim", [1, 2])
def test_others_name_the_dead_rank_and_the_folder_is_free_again(victim: int, tmp_path: Path) -> None:
    ranks = start(tmp_path)
    try:
        for rank in ranks:
            assert isinstance(rank.stdout, io.TextIOBase)
            assert rank.stdout.readline() == "training\n"
        ranks[victim].send_signal(signal.SIGKILL)
        ranks[victim].wait()
        begin = time.monotonic()
        for number, rank in enumerate(ranks):
            if number == victim:
                continue
            output, _ = rank.communicate(timeout=2 * TIMEOUT_SECONDS)
            kind, message = json.loads(output)
            assert kind == "RankError"
            assert f"rank {victim} is gone" in message
        assert time.monotonic() - begin < 2 * TIMEOUT_SECONDS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()
    # What the killed rank left, the next run there takes over.
    for number in range(WORLD_SIZE):
        RunDirectory(tmp_path, number).close()


def test_world_size_without_a_process_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(zo.ConfigError, match="init_process_group"):
        zo.offload(torch.nn.Linear(2, 2))
