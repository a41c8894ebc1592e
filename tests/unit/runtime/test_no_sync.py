"""Saying that more backwards follow changes no number, and is kept for whoever plans the update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zerooffload as zo
from zerooffload.sharding.registry import residence_of

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]


def run_of(model: nn.Module) -> Any:
    residence = residence_of(next(model.parameters()))
    assert residence is not None
    return residence.run


def test_the_run_knows_inside_and_forgets_after(offload: Offload, make_net: MakeNet) -> None:
    model = offload(make_net(), accumulation_steps=2)
    run = run_of(model)
    assert not run.backwards.expects_more
    with zo.no_sync(model):
        with zo.no_sync(model):
            assert run.backwards.expects_more
        assert run.backwards.expects_more
    assert not run.backwards.expects_more
    with pytest.raises(ZeroDivisionError), zo.no_sync(model):
        _ = 1 / 0
    assert not run.backwards.expects_more


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_it_changes_no_number(offload: Offload, make_net: MakeNet, tokens: torch.Tensor, tier: str) -> None:
    results = []
    for inside in (zo.no_sync, lambda _: nullcontext()):
        model = offload(make_net(), tier, compute_dtype="bf16", accumulation_steps=3)
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            with inside(model):
                for shift in range(2):
                    model(tokens + shift).backward()
            model(tokens + 2).backward()
            zo.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        with zo.full_params(model, writeback=False):
            results.append([param.detach().clone() for param in model.parameters()])
        zo.close(model)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_run_may_end_inside(offload: Offload, make_net: MakeNet) -> None:
    model = offload(make_net())
    with zo.no_sync(model):
        zo.close(model)


def test_a_model_that_is_not_offloaded_is_refused() -> None:
    with pytest.raises(zo.ConfigError, match=r"zo\.offload"), zo.no_sync(nn.Linear(2, 2)):
        pass
