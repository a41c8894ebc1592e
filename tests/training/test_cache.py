"""The host's cache of updated chunks: fewer reads, the same bits, and never more memory than the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.environments import least_memory, simulated
from support.reference_training import Outcome, Recipe, differences, train_offloaded

pytestmark = pytest.mark.usefixtures("small_chunks")

RECIPE = Recipe(num_steps=5)
HOMES: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}
SLOT_BYTES = 4096 * (4 + 8 + 4)
"""Parameters, moments and gradients of a chunk."""


COPIES_BYTES = 40 * 1024
"""For looking at the parameters at the end; less than a slot."""


@pytest.mark.parametrize("num_cached", [0, 1, 2, 3])
def test_each_cached_chunk_saves_its_reads(num_cached: int, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    config = {**HOMES, "nvme_paths": [nvme], "device_memory": "16MiB"}
    with simulated() as environment:
        least = least_memory(RECIPE, environment, "host_memory", **config) + COPIES_BYTES
    moved = []
    for host_memory in (least, least + num_cached * SLOT_BYTES):
        with simulated() as environment:
            outcome = train_offloaded(RECIPE, environment, **config, host_memory=host_memory)
        assert differences(plain(RECIPE), outcome) == []
        assert outcome.report is not None
        moved.append(outcome.report.bytes_moved)
    without, cached = moved
    # Parameters and moments: the gradients are new in every step.
    assert without["nvme_read"] - cached["nvme_read"] == num_cached * 4096 * (4 + 8)
    assert cached["nvme_written"] == without["nvme_written"]
