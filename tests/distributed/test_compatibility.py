"""Kinds of models on two ranks, each with batches of its own: equal to the ranks' sums in one process, or refused."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.compatibility import RANK_PLACES
from support.compatible_models import MODELS
from support.rank_compatibility import emulate, train_models
from support.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

WORLD_SIZE = 2


@cache
def in_one_process(name: str) -> Mapping[str, Any]:
    return emulate(name, WORLD_SIZE)


@pytest.fixture(scope="module", params=RANK_PLACES)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Any]]:
    """Of each rank; all models in one pair of processes, which is quick."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    return run_ranks(train_models, WORLD_SIZE, folder, RANK_PLACES[request.param], list(MODELS), limit_seconds=60)


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, results: list[Mapping[str, Any]]) -> None:
    refused = MODELS[name].refused_on_ranks
    for result in results:
        if refused:
            assert refused in result[name]["refused"]
            continue
        expected = in_one_process(name)
        assert result[name].get("refused") is None
        assert result[name]["norms"] == expected["norms"]
        for key, value in expected["params"].items():
            assert torch.equal(result[name]["params"][key], value), key
