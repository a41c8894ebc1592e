"""The states of offloaded parameters, chunk by chunk, wherever they live."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.environments import cpu_with_simulated_drive, simulated
from support.reference_training import Recipe, current_params, offload_prepared
from support.small_models import batch, half_used
from torch import nn

import zerooffload as zo
from zerooffload.config import TierName
from zerooffload.runtime.build import Environment
from zerooffload.runtime.logical_states import NUM_SLOTS, PARAM, held_params, owned_chunks, state_chunks
from zerooffload.runtime.run import Run
from zerooffload.sharding.registry import residence_of

pytestmark = pytest.mark.usefixtures("small_chunks")

HOMES = [("device", "device"), ("host", "nvme"), ("nvme", "host"), ("nvme", "nvme")]
DEVICES: dict[str, Callable[[], AbstractContextManager[Environment]]] = {
    "cpu": lambda: nullcontext(cpu_with_simulated_drive()),
    "simulated": simulated,
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a parameter lies in several."""
    monkeypatch.setattr("zerooffload.planner.placement.CHUNK_NUMEL", 4096)


def run_of(model: nn.Module) -> Run:
    residence = residence_of(next(model.parameters()))
    assert residence is not None
    run = residence.run
    assert isinstance(run, Run)
    return run


def joined(run: Run, states: set[str] | None = None) -> dict[tuple[str, str], torch.Tensor]:
    """Every logical tensor, put together from its pieces: items, 1D."""
    pieces: dict[tuple[str, str], list[torch.Tensor]] = {}
    chunks = state_chunks(run.units)
    with run.logical_states(chunks, states) as logical:
        for reading in logical.read(chunks):
            chunk, views = reading.chunk, reading.views()
            for piece in chunk.pieces:
                for state, items in chunk.cut(views, piece.place).items():
                    pieces.setdefault((piece.param.name, state), []).append(items.cpu().clone())
    return {key: torch.cat(items) for key, items in pieces.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("homes", HOMES, ids="-".join)
@pytest.mark.parametrize(("dtype", "moments"), [(None, "fp32"), ("bf16", "8bit"), ("fp16", "bf16")])
def test_they_are_read_and_written(
    device: str, homes: tuple[str, str], dtype: str | None, moments: str, nvme: Any
) -> None:
    recipe = Recipe(build=half_used, loss=lambda model, tokens: model(tokens), compute_dtype=dtype, moments=moments)
    fields = dict(zip(("params", "optimizer"), homes, strict=True))
    with DEVICES[device]() as environment:
        model = offload_prepared(recipe, environment, nvme_paths=[nvme], host_memory="16MiB", **fields)
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        model(batch(0, 0).to(run_of(model).device)).backward()
        optimizer.step()
        run = run_of(model)
        found = joined(run)
        for name, values in current_params(model).items():
            assert torch.equal(found[name, PARAM], values.reshape(-1))
        for held in held_params(run.units):
            assert (held.start, held.stop) == (0, held.param.numel)
            for part in held.states:
                assert found[held.param.name, part.name].numel() == part.num_items(held.param.numel)
        steps = {held.param.name: held.num_steps for held in held_params(run.units)}
        assert steps == {name: int(param.grad is not None) for name, param in model.named_parameters()}
        assert sum(part.dtype is torch.uint8 for held in held_params(run.units) for part in held.states) == (
            4 * len(steps) if moments == "8bit" else 0
        )
        assert set(joined(run, {PARAM})) == {(name, PARAM) for name in steps}
        chunks = owned_chunks(run.units)
        # As whoever replaces states does: nothing reads them on its way to the device.
        run.empty_for("a test")
        with run.logical_states(chunks) as logical:
            for chunk in chunks:
                logical.write(chunk, lambda views: [view.zero_() for view in views.values()])
            logical.finish()
        assert all(not items.any() for items in joined(run).values())
        zo.close(model)


def test_what_it_holds_is_leased_and_given_back(nvme: Any) -> None:
    """Two records of parameters and optimizer, whatever the model's size."""
    environment = cpu_with_simulated_drive()
    fields = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [nvme], "host_memory": "16MiB"}
    model = offload_prepared(Recipe(build=half_used), environment, **fields)
    run = run_of(model)
    budget = run._resources.budgets[TierName.HOST]
    chunks = state_chunks(run.units)
    before = budget.leased_bytes
    with run.logical_states(chunks):
        assert budget.leased_bytes - before == NUM_SLOTS * 4096 * (4 + 8)
    assert budget.leased_bytes == before
    zo.close(model)
