"""Every optimizer, moment format and dtype: the bits of plain PyTorch with the reference, wherever states live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.reference_training import Outcome, Recipe, differences, offload_prepared, train_offloaded
from support.small_models import batch
from support.training_recipes import OPTIMIZER_RECIPES, OPTIONS, optimizer_recipe

import zerooffload as zo
from zerooffload.optim import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOMES = [("host", "host", "host"), ("nvme", "nvme", "nvme"), ("host", "nvme", "device")]


@pytest.mark.parametrize("homes", HOMES, ids="-".join)
@pytest.mark.parametrize("key", OPTIMIZER_RECIPES, ids=lambda key: "-".join(str(part) for part in key))
@pytest.mark.usefixtures("small_chunks")
def test_same_bits_as_the_reference(
    key: tuple[str, str, str | None], homes: tuple[str, str, str], nvme: Path, plain: Callable[[Recipe], Outcome]
) -> None:
    params, optimizer, gradients = homes
    outcome = train_offloaded(
        OPTIMIZER_RECIPES[key], params=params, optimizer=optimizer, gradients=gradients, nvme_paths=[nvme]
    )
    assert differences(plain(OPTIMIZER_RECIPES[key]), outcome) == []


@pytest.mark.parametrize(("moments", "nbytes"), [("fp32", 8.0), ("bf16", 4.0), ("8bit", 2 + 2 / 128)])
def test_moments_in_fewer_bits_take_fewer_bytes(moments: str, nbytes: float, nvme: Path) -> None:
    model = torch.nn.Linear(1024, 1024, bias=False)
    zo.offload(model, zo.OffloadConfig(optimizer="nvme", nvme_paths=nvme, moments=moments, threads=1))
    optimizer = zo.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    leased = zo.step_report(model).tiers[2].leased_bytes
    zo.close(model)
    assert leased == pytest.approx(nbytes * 1024 * 1024, abs=4096)


@pytest.mark.parametrize("algorithm", OPTIONS)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_a_state_dict_continues_with_the_same_bits(algorithm: str, moments: str) -> None:
    def run(*, interrupted: bool) -> dict[str, torch.Tensor]:
        job = optimizer_recipe(algorithm, moments)
        model = offload_prepared(job)
        optimizer = OPTIMIZERS[algorithm](model.parameters(), lr=1e-3, **OPTIONS[algorithm])
        for step in range(4):
            if interrupted and step == 2:
                values, state = model.state_dict(), optimizer.state_dict()
                zo.close(model)
                model = job.build()
                model.load_state_dict(values)
                zo.offload(model, zo.OffloadConfig(algorithm=algorithm, moments=moments, threads=1))
                optimizer = OPTIMIZERS[algorithm](model.parameters(), lr=0.5)
                optimizer.load_state_dict(state)
            job.loss(model, batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        result = {name: value.clone() for name, value in model.state_dict().items()}
        zo.close(model)
        return result

    straight, continued = run(interrupted=False), run(interrupted=True)
    assert all(torch.equal(straight[name], continued[name]) for name in straight)


TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


@pytest.mark.parametrize("algorithm", TORCH)
def test_the_state_of_torchs_optimizer_is_taken_over(algorithm: str) -> None:
    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + 2):
            torch.manual_seed(step)
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    stock = torch.nn.Linear(16, 16)
    theirs = TORCH[algorithm](stock.parameters(), lr=1e-2, **OPTIONS[algorithm])
    steps(stock, theirs, 0)
    ours = torch.nn.Linear(16, 16)
    ours.load_state_dict(stock.state_dict())
    zo.offload(ours, zo.OffloadConfig(algorithm=algorithm, threads=1))
    optimizer = OPTIMIZERS[algorithm](ours.parameters(), lr=1.0)
    optimizer.load_state_dict(theirs.state_dict())
    steps(stock, theirs, 2)
    steps(ours, optimizer, 2)
    # Two steps of lr 1e-2: a lost state would differ by about that; roundings are near 1e-7.
    torch.testing.assert_close(ours.state_dict()["weight"], stock.weight.detach(), rtol=1e-5, atol=1e-6)
    zo.close(ours)


def test_states_laid_out_for_another_optimizer_are_refused() -> None:
    model = torch.nn.Linear(4, 4)
    zo.offload(model, zo.OffloadConfig(threads=1))
    zo.Adam(model.parameters())
    with pytest.raises(zo.ConfigError, match=r'laid out for adamw.*algorithm="sgd"'):
        zo.SGD(model.parameters())
    zo.close(model)


@pytest.mark.parametrize(
    ("algorithm", "wrong"),
    [
        ("adam", {"betas": (0.9, 1.0)}),
        ("adagrad", {"lr_decay": -1.0}),
        ("lion", {"lr": float("nan")}),
        ("sgd", {"nesterov": True}),
        ("sgd", {"momentum": -0.1}),
    ],
)
def test_hyperparameters_out_of_range_are_named(algorithm: str, wrong: dict[str, Any]) -> None:
    model = torch.nn.Linear(4, 4)
    zo.offload(model, zo.OffloadConfig(algorithm=algorithm, threads=1))
    with pytest.raises(zo.ConfigError, match=next(iter(wrong))):
        OPTIMIZERS[algorithm](model.parameters(), **wrong)
    zo.close(model)
