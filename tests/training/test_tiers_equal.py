"""Wherever the states live, losses, norms and parameters have the same bits as in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.environments import COMBINATIONS, TIERS, Homes, least_memory
from support.folders import leftovers
from support.reference_training import Outcome, Recipe, differences, offload_prepared, train_offloaded
from support.small_models import MODELS, batch

import zerooffload as zo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IN_FP32 = {name: Recipe(build=build) for name, build in MODELS.items()}
IN_BF16 = {name: Recipe(build=build, compute_dtype="bf16", num_steps=8) for name, build in MODELS.items()}


@pytest.mark.parametrize("homes", COMBINATIONS, ids="-".join)
@pytest.mark.usefixtures("small_chunks")
def test_llama_in_fp32(homes: Homes, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    assert_equal(IN_FP32["llama"], homes, nvme, plain)


@pytest.mark.parametrize("homes", COMBINATIONS, ids="-".join)
def test_gpt2_in_fp32(homes: Homes, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    assert_equal(IN_FP32["gpt2"], homes, nvme, plain)


@pytest.mark.parametrize("homes", COMBINATIONS, ids="-".join)
@pytest.mark.usefixtures("small_chunks")
def test_llama_in_bf16(homes: Homes, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    assert_equal(IN_BF16["llama"], homes, nvme, plain)


@pytest.mark.parametrize("homes", [(tier,) * 3 for tier in TIERS], ids="-".join)
def test_gpt2_in_bf16(homes: Homes, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    assert_equal(IN_BF16["gpt2"], homes, nvme, plain)


@pytest.mark.parametrize("gradients", TIERS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.usefixtures("small_chunks")
def test_the_least_window(dtype: str, gradients: str, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    """Units are evicted and read again many times: in forward and in backward of every micro-step."""
    recipe = (IN_FP32 if dtype == "fp32" else IN_BF16)["llama"]
    config = {"params": "nvme", "optimizer": "host", "gradients": gradients, "nvme_paths": [nvme]}
    least = least_memory(recipe, None, "device_memory", **config)
    outcome = train_offloaded(recipe, device_memory=least, **config)
    assert differences(plain(recipe), outcome) == []
    report = outcome.report
    assert report is not None
    nvme_bytes = report.tiers[2].leased_bytes
    param_bytes = nvme_bytes / 2 if gradients == "nvme" else nvme_bytes
    # All units but those still there from the pass before, in each of the four passes: from files, or from where the
    # update has left them in memory.
    assert report.bytes_moved["nvme_read"] + report.bytes_moved["copy_in"] > 3.5 * param_bytes


@pytest.mark.usefixtures("small_chunks")
def test_what_is_away_reads_as_nan(nvme: Path) -> None:
    """So that whoever reads a parameter past the hooks finds out."""
    recipe = IN_FP32["llama"]
    config = {"params": "nvme", "optimizer": "host", "gradients": "host", "nvme_paths": [nvme]}
    least = least_memory(recipe, None, "device_memory", **config)
    model = offload_prepared(recipe, device_memory=least, **config)
    optimizer = zo.AdamW(model.parameters())
    for step in range(2):
        loss = recipe.loss(model, batch(step, 0))
        away = [param for param in model.parameters() if shows_nan(param)]
        assert 0 < len(away) < len(list(model.parameters()))
        loss.backward()
        optimizer.step()
        assert all(map(shows_nan, model.parameters()))
    zo.close(model)


def shows_nan(param: torch.Tensor) -> bool:
    """Asked as those ask who are not told that nobody uses the parameter: autograd, and code in C++."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(param.isnan().all())


def test_mixed_homes(nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    recipe = IN_FP32["llama"]
    outcome = train_offloaded(
        recipe,
        params={"model.layers.0": "nvme", "model.embed*": "device", "*": "host"},
        optimizer={"model.layers.*": "nvme", "*": "device"},
        gradients={"model.layers.1": "nvme", "*": "host"},
        nvme_paths=[nvme],
    )
    assert differences(plain(recipe), outcome) == []


@pytest.mark.usefixtures("small_chunks")
def test_two_paths(tmp_path: Path, plain: Callable[[Recipe], Outcome]) -> None:
    recipe = IN_FP32["llama"]
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
    outcome = train_offloaded(recipe, params="nvme", optimizer="nvme", gradients="nvme", nvme_paths=paths)
    assert differences(plain(recipe), outcome) == []
    assert [leftovers(path) for path in paths] == [[], []]


@pytest.mark.parametrize("engine", ["threads", "aiofiles"])
@pytest.mark.usefixtures("small_chunks")
def test_each_engine(engine: str, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    recipe = IN_FP32["llama"]
    everywhere = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}
    outcome = train_offloaded(recipe, io_engine=engine, nvme_paths=[nvme], **everywhere)
    assert differences(plain(recipe), outcome) == []


def assert_equal(recipe: Recipe, homes: Homes, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    params, optimizer, gradients = homes
    outcome = train_offloaded(recipe, params=params, optimizer=optimizer, gradients=gradients, nvme_paths=[nvme])
    assert differences(plain(recipe), outcome) == []
