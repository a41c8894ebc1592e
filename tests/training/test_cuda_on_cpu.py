"""The accelerator for CUDA, with tensors of the CPU: whatever lives where, the bits of plain training."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
from support import compatibility
from support.compatibility import Cell, cells, check_cell, plain_recipe, recipe_of
from support.cuda_on_cpu import cuda_on_cpu
from support.environments import COMBINATIONS, PAIRWISE, Homes, cuda_devices, least_memory
from support.reference_training import Outcome, Recipe, differences, train_offloaded, train_plain
from support.simulated_engine import SimulatedEngine
from support.thoroughness import one_in

from zerooffload.optim.kernels import host_kernels
from zerooffload.runtime.build import Environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_chunks")

LLAMA = Recipe(num_steps=3)
LLAMA_BF16 = Recipe(num_steps=3, compute_dtype="bf16", num_micro_steps=2, accumulation_steps=2)


@pytest.mark.parametrize(
    ("homes", "recipe"), [*((homes, LLAMA) for homes in COMBINATIONS), *((homes, LLAMA_BF16) for homes in PAIRWISE)]
)
def test_the_same_bits(homes: Homes, recipe: Recipe, nvme: Path, plain: Callable[[Recipe], Outcome]) -> None:
    """In the least device memory, and with nothing left registered of host memory that is gone."""
    config: dict[str, Any] = dict(zip(("params", "optimizer", "gradients"), homes, strict=True))
    config |= {"nvme_paths": [nvme], "host_memory": "16MiB"}
    with cuda_on_cpu() as (accelerator, driver):
        environment = Environment(
            accelerator=accelerator,
            open_engine=SimulatedEngine,
            path_speeds=lambda paths: [1.0] * len(paths),
            kernels=host_kernels(1),
        )
        config["device_memory"] = least_memory(recipe, environment, "device_memory", **config)
        assert differences(plain(recipe), train_offloaded(recipe, environment, **config)) == []
        gc.collect()
        assert driver.let_go or homes == ("device", "device", "device")


def is_tried(cell: Cell) -> bool:
    """One model in all loops. What is refused is, wherever it is; and its error would hold memory."""
    return (cell.model, cell.place) == ("Llama", "device") and not cell.refused


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("cell", [cell for cell in cells(exhaustive=False) if is_tried(cell)][:: one_in(2)], ids=str)
def test_each_loop(cell: Cell, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/compatibility.md says of simulated devices."""
    monkeypatch.setattr(compatibility, "simulated_devices", cuda_devices)
    recipe = recipe_of(cell.model, cell.loop)
    check_cell(cell, recipe, train_plain(plain_recipe(recipe, cell.kind)), nvme)
