"""The host's cache of updated chunks: fewer reads, the same bits, and never more memory than the budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.environments import least_memory, simulated
from support.reference_training import Outcome, Recipe, differences, offload_prepared, train_offloaded

import zerooffload as zo
from zerooffload.runtime.build import Environment
from zerooffload.sharding.registry import residence_of

pytestmark = pytest.mark.usefixtures("small_chunks")

RECIPE = Recipe(num_steps=5)
HOMES: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}
SLOT_BYTES = 4096 * (4 + 8 + 4)
"""Parameters, moments and gradients of a chunk."""
COPIES_BYTES = 40 * 1024
"""For looking at the parameters at the end; less than a slot."""


@pytest.mark.parametrize("update", ["after_backward", "under_next_forward"])
def test_each_cached_chunk_saves_its_reads(update: str, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    """Whether the update goes there and back, or always in the order of the forward."""
    config = {**HOMES, "update": update, "nvme_paths": [nvme], "device_memory": "16MiB"}
    with simulated() as environment:
        least = least_memory(RECIPE, environment, "host_memory", **config) + COPIES_BYTES
        records = sizes_of_records(environment, **config)
    read, written = [], set()
    for num_cached in range(4):
        with simulated() as environment:
            host_memory = least + num_cached * SLOT_BYTES
            outcome = train_offloaded(RECIPE, environment, **config, host_memory=host_memory)
        assert differences(plain(RECIPE), outcome) == []
        assert outcome.report is not None
        read.append(outcome.report.bytes_moved["nvme_read"])
        written.add(outcome.report.bytes_moved["nvme_written"])
    # Of one chunk more each time, parameters for the forward, and parameters and moments for the update: the gradients
    # are new in every step.
    saved = [before - after for before, after in itertools.pairwise(read)]
    if update == "after_backward":
        assert set(saved) <= records
    else:
        # Here a longer ring also keeps what one of its working slots held.
        assert min(saved) >= min(records)
    assert len(written) == 1


def sizes_of_records(environment: Environment, **config: Any) -> set[int]:
    """What need not be read of a chunk that is still in memory: bytes, of every chunk of the model."""
    model = offload_prepared(RECIPE, environment, **config)
    sizes = set()
    for param in model.parameters():
        residence = residence_of(param)
        assert residence is not None
        training = residence.part.training
        assert training is not None
        values, record = residence.part.home.layout, training.optimizer.layout
        sizes |= {2 * values.file_nbytes(chunk) + record.file_nbytes(chunk) for chunk in values.chunks}
    zo.close(model)
    return sizes
