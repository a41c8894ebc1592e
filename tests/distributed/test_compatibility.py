"""Kinds of models on two ranks in each stage: equal to the ranks' sums in one process, or refused."""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.compatibility import PLACES, RANK_PLACES, STAGES
from support.compatible_models import MODELS
from support.rank_compatibility import Case, emulate, train_models
from support.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

WORLD_SIZE = 2
_LIMIT_SECONDS = 120

# All ranks run in the first test's fixture.
pytestmark = pytest.mark.timeout(_LIMIT_SECONDS)


@cache
def in_one_process(name: str) -> Mapping[str, Any]:
    return emulate(name, WORLD_SIZE)


@pytest.fixture(scope="module", params=RANK_PLACES)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Mapping[Case, Mapping[str, Any]]]:
    """Of each rank; all models in all stages in one pair of processes, which is quick."""
    folder, homes = str(tmp_path_factory.mktemp("ranks")), PLACES[request.param].homes
    cases = list(itertools.product(STAGES, MODELS))
    return run_ranks(train_models, WORLD_SIZE, folder, homes, cases, limit_seconds=_LIMIT_SECONDS)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, stage: int, results: list[Mapping[Case, Mapping[str, Any]]]) -> None:
    refused = MODELS[name].refused_on_ranks.get(stage, "")
    for of_rank in results:
        result = of_rank[stage, name]
        if refused:
            assert refused in result["refused"]
            continue
        expected = in_one_process(name)
        assert result.get("refused") is None
        assert result["norms"] == expected["norms"]
        for key, value in expected["params"].items():
            assert torch.equal(result["params"][key], value), key
