from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zerooffload as zo
from zerooffload import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

    Make = Callable[..., nn.Module]


@contextmanager
def offloaded(model: nn.Module, nvme: Path, algorithm: str = "adamw", **fields: Any) -> Iterator[tuple[Any, Any]]:
    homes = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [nvme], "overwrite": True, "host_memory": "32MiB"}
    zo.offload(model, zo.OffloadConfig(**homes, algorithm=algorithm, **fields))
    kind = {"adamw": zo.AdamW, "sgd": zo.SGD, "lion": zo.Lion, "adagrad": zo.Adagrad}[algorithm]
    options = {"momentum": 0.9} if algorithm == "sgd" else {}
    try:
        yield model, kind(model.parameters(), lr=0.01, **options)
    finally:
        zo.close(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, num_steps: int = 2) -> None:
    for _ in range(num_steps):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


KINDS = [
    {"algorithm": algorithm, **fields}
    for algorithm in ("adamw", "sgd", "lion", "adagrad")
    for fields in ({"compute_dtype": "bf16"}, {"moments": "bf16"}, {"moments": "8bit"})
]


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: "-".join(fields.values()))
def test_a_run_comes_back_from_its_own_checkpoint(
    fields: dict[str, Any], make_net: Make, tokens: torch.Tensor, nvme: Path, tmp_path: Path
) -> None:
    """Moments in fewer bits are fp32 there, and the same bits again here."""
    with offloaded(make_net(tied=True), nvme, **fields) as (model, optimizer):
        train(model, optimizer, tokens)
        zo.save_dcp(tmp_path / "out", model, optimizer)
        train(model, optimizer, tokens)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with offloaded(make_net(tied=True, seed=1), nvme, **fields) as (model, optimizer):
        train(model, optimizer, tokens, 1)
        zo.load_dcp(tmp_path / "out", model, optimizer)
        train(model, optimizer, tokens)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_parameters_alone_leave_the_optimizer_afresh(
    make_net: Make, tokens: torch.Tensor, nvme: Path, tmp_path: Path
) -> None:
    with offloaded(make_net(), nvme) as (model, optimizer):
        train(model, optimizer, tokens)
        zo.save_dcp(tmp_path / "out", model)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with offloaded(make_net(seed=1), nvme) as (model, optimizer):
        train(model, optimizer, tokens)
        with pytest.raises(CheckpointError, match="holds no exp_avg and exp_avg_sq"):
            zo.load_dcp(tmp_path / "out", model, optimizer)
        zo.load_dcp(tmp_path / "out", model)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        assert optimizer.state_dict()["state"] == {}


def test_another_model_is_refused_and_nothing_changes(
    make_net: Make, tokens: torch.Tensor, nvme: Path, tmp_path: Path
) -> None:
    with offloaded(make_net(8), nvme) as (model, optimizer):
        zo.save_dcp(tmp_path / "small", model, optimizer)
    with offloaded(torch.nn.Linear(3, 3), nvme) as (model, optimizer):
        zo.save_dcp(tmp_path / "other", model, optimizer)
    with offloaded(make_net(), nvme) as (model, optimizer):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"embed\.weight has the shape \[32, 16\].*\[32, 8\]"):
            zo.load_dcp(tmp_path / "small", model, optimizer)
        with pytest.raises(CheckpointError, match=r"holds no parameter|the model lacks|the checkpoint lacks"):
            zo.load_dcp(tmp_path / "other", model, optimizer)
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            zo.load_dcp(tmp_path, model, optimizer)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        train(model, optimizer, tokens, 1)


def test_a_folder_with_files_and_a_model_in_use_are_refused(make_net: Make, nvme: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not offloaded"):
        zo.save_dcp(tmp_path / "out", make_net())
    with offloaded(make_net(), nvme) as (model, optimizer):
        with pytest.raises(ConfigError, match="holds files"):
            zo.save_dcp(tmp_path, model, optimizer)
        with zo.full_params(model):
            for call in (zo.save_dcp, zo.load_dcp):
                with pytest.raises(ConfigError, match="in use"):
                    call(tmp_path / "out", model, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "nvme"]
