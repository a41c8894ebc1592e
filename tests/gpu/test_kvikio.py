"""Parameters that kvikio reads into a GPU: the bits of plain training on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.environments import COMBINATIONS, Homes
from support.reference_training import Outcome, Recipe, differences, train_offloaded

from zerooffload.accelerator import default_accelerator
from zerooffload.aio import choose_engine
from zerooffload.aio.device_reads import find_kvikio

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KVIKIO = find_kvikio()
LLAMA = Recipe(num_steps=4)

pytestmark = pytest.mark.skipif(isinstance(KVIKIO, str), reason=str(KVIKIO))


def test_it_reads_what_was_written(nvme: Path) -> None:
    chosen = choose_engine("kvikio", nvme, device=default_accelerator())
    chosen.engine.close()
    assert chosen.engine.name == "kvikio"
    assert "through kvikio" in chosen.reason


@pytest.mark.parametrize("homes", [homes for homes in COMBINATIONS if homes[0] == "nvme"], ids="-".join)
def test_the_same_bits(homes: Homes, nvme: Path, plain_on_cuda: Callable[[Recipe], Outcome]) -> None:
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    outcome = train_offloaded(LLAMA, io_engine="kvikio", nvme_paths=[nvme], **config)
    assert differences(plain_on_cuda(LLAMA), outcome) == []
