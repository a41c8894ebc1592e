"""`zerooffload promote`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import zerooffload as zo
from zerooffload.cli import app

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., tuple[int, str, str]]


def model_on(paths: list[Path]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    homes = {"params": "nvme", "optimizer": "nvme", "nvme_paths": paths} if paths else {}
    model = zo.offload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), zo.OffloadConfig(threads=1, **homes))
    return model, zo.AdamW(model.parameters())


def test_it_makes_a_checkpoint_and_says_where(run: Run, nvme: Path, tmp_path: Path) -> None:
    paths = [nvme, tmp_path / "other"]
    paths[1].mkdir()
    model, optimizer = model_on(paths)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with zo.full_params(model):
        expected = [param.detach().clone() for param in model.parameters()]
    zo.close(model)
    made = tmp_path / "checkpoints" / "save-00000001-step-00000001"
    assert run("promote", nvme, tmp_path / "checkpoints", "--path", paths[1]) == (0, f"checkpoint made: {made}\n", "")
    model, optimizer = model_on([])
    assert zo.load(tmp_path / "checkpoints", model, optimizer) is None
    with zo.full_params(model):
        assert all(torch.equal(param, value) for param, value in zip(model.parameters(), expected, strict=True))
    zo.close(model)
    code, _, err = run("promote", nvme, tmp_path / "checkpoints")
    assert code == app.EXIT_USER_ERROR
    assert "2 paths: name each of them once" in err


def test_where_nothing_was_committed(run: Run, nvme: Path, tmp_path: Path) -> None:
    code, out, err = run("promote", nvme, tmp_path / "checkpoints")
    assert (code, out) == (app.EXIT_USER_ERROR, "")
    assert err == f"error: {nvme}: no run that finished a step; name the nvme_paths that the run was given\n"
    assert not (tmp_path / "checkpoints").exists()
