"""Leased bytes as formulas in shards and chunks, budgets to the byte, and nothing left behind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.environments import COMBINATIONS, Homes, cpu_with_simulated_drive, least_memory, simulated
from support.folders import leftovers
from support.reference_training import Recipe, flat_layouts, train_offloaded
from support.simulated_accelerator import SimulatedAccelerator
from support.small_models import small_llama

import zerooffload as zo
from zerooffload.runtime.build import build_run

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096
RECIPE = Recipe(num_steps=1)
IN_BF16 = Recipe(num_steps=1, compute_dtype="bf16")
ADDED_IN_FP32 = Recipe(num_steps=1, compute_dtype="bf16", accumulation_steps=2)
AMPLE = {"host_memory": "16MiB", "device_memory": "16MiB", "nvme_space": "16MiB"}


def up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@dataclass(frozen=True)
class Widths:
    """Bytes of an element in each state, and of a gradient on its way."""

    param: int = 4
    optimizer: int = 8
    gradient: int = 4
    arriving: int = 4


WIDTHS = [(RECIPE, Widths()), (IN_BF16, Widths(2, 10, 2, 2)), (ADDED_IN_FP32, Widths(2, 10, 4, 2))]


class Formula:
    """What a run of the small Llama leases, from the lengths of its flat buffers."""

    def __init__(self, homes: Homes, chunk_numel: int, widths: Widths, *, on_device: bool) -> None:
        self.params, self.optimizer, self.gradients = homes
        self.on_device = on_device
        self.chunk_numel = chunk_numel
        self.widths = widths
        dtype = torch.float32 if widths.param == 4 else torch.bfloat16
        self.flats = [layout.numel for layout in flat_layouts(small_llama().to(dtype))]
        self.states = [
            (self.params, widths.param),
            (self.optimizer, widths.optimizer),
            (self.gradients, widths.gradient),
        ]

    def chunks(self, numel: int) -> list[int]:
        edges = [*range(0, numel, self.chunk_numel), numel]
        return [stop - start for start, stop in pairwise(edges)]

    def block(self, tier: str, numel: int, width: int) -> int:
        """A state of one flat: on a file each chunk's record is padded to a page; in memory the whole to a block."""
        if tier == "nvme":
            return sum(up(width * length, PAGE) for length in self.chunks(numel))
        return self.range(width * numel) if tier == "device" else up(width * numel, PAGE)

    def range(self, nbytes: int) -> int:
        return up(nbytes, 512) + 512 if self.on_device else up(nbytes, PAGE)

    def homes(self, tier: str) -> int:
        widths = [width for home, width in self.states if home == tier]
        return sum(self.block(tier, numel, width) for width in widths for numel in self.flats)

    @property
    def commits(self) -> bool:
        """Whether all that is trained lives on files, so that steps are committed."""
        return self.params == self.optimizer == "nvme"

    def slots(self) -> int:
        """What the second slots of parameters and optimizer states take."""
        widths = (self.widths.param, self.widths.optimizer)
        return self.commits * sum(self.block("nvme", numel, width) for width in widths for numel in self.flats)

    def second_places(self, tier: str) -> int:
        """Beside a device, what the host updates lies twice where no step is committed."""
        if not self.on_device or self.commits or any(home == "device" for home, _ in self.states):
            return 0
        changed = [width for home, width in self.states[:2] if home == tier]
        return sum(self.block(tier, numel, width) for width in changed for numel in self.flats)

    def record(self) -> int:
        """What one record of the journal takes: 72 bytes, 9 for each chunk, and room for 128 KiB of state."""
        num_chunks = 2 * sum(len(self.chunks(numel)) for numel in self.flats)
        return self.commits * up(72 + up(num_chunks, 8) + 8 * num_chunks + 131_072, PAGE)

    def rings(self) -> int:
        """Four slots and more for what the update cannot address, eight for parameters, two or eight for gradients."""
        full = max(self.chunks(max(self.flats)))
        far = [width for home, width in self.states if home == "nvme" or (self.on_device and home == "device")]
        if all(home == "device" for home, _ in self.states):
            far = []
        slot = sum(up(width * full, PAGE) for width in far)
        num_chunks = sum(len(self.chunks(numel)) for numel in self.flats)
        # With ample memory no chunk has to leave the ring.
        num_slots = max(4, num_chunks) if "nvme" in (self.params, self.optimizer) else 4
        gradient_slot = 0
        if self.gradients == "nvme" or (self.on_device and self.gradients == "host"):
            arriving = self.on_device * up(self.widths.arriving * full, PAGE)
            gradient_slot = arriving + (self.gradients == "nvme") * up(self.widths.gradient * full, PAGE)
        param_slot = up(self.widths.param * full, PAGE) if self.on_device and self.params == "nvme" else 0
        return num_slots * slot + 8 * param_slot + (8 if self.on_device else 2) * gradient_slot

    def windows(self) -> int:
        """All parameters that move, and two of the largest gradient buffers that collect."""
        moves = self.params == "nvme" or (self.on_device and self.params == "host")
        collects = self.gradients == "nvme" or (self.on_device and self.gradients == "host")
        ranges = [self.range(up(self.widths.param * numel, PAGE)) for numel in self.flats]
        root = ranges[-1]
        least = max(ranges) + root
        return moves * sum(ranges) + collects * min(sum(ranges), 2 * least)


@pytest.mark.parametrize(("recipe", "widths"), WIDTHS, ids=["fp32", "bf16", "added in fp32"])
@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "simulated"])
@pytest.mark.parametrize("homes", COMBINATIONS, ids="-".join)
def test_leases_are_the_formula(
    homes: Homes, recipe: Recipe, widths: Widths, nvme: Path, small_chunks: int, *, on_device: bool
) -> None:
    config = dict(zip(("params", "optimizer", "gradients"), homes, strict=True)) | {"nvme_paths": [nvme], **AMPLE}
    accelerated = 0
    if on_device:
        with simulated() as env:
            report = train_offloaded(recipe, env, **config).report
            assert isinstance(env.accelerator, SimulatedAccelerator)
            accelerated = env.accelerator.peak_filled_bytes
    else:
        report = train_offloaded(recipe, **config).report
    assert report is not None
    formula = Formula(homes, small_chunks, widths, on_device=on_device)
    device = formula.homes("device") + formula.windows()
    host = formula.homes("host") + formula.second_places("host") + formula.rings() + formula.record()
    host += 0 if on_device else device
    files = formula.homes("nvme") + formula.second_places("nvme") + formula.slots() + 2 * formula.record()
    for tier, expected in zip(report.tiers, (device, host, files), strict=True):
        assert (tier.name, tier.planned_bytes, tier.leased_bytes) == (tier.name, expected, expected)
    assert report.tiers[0].peak_bytes == device
    assert accelerated <= device


@pytest.mark.parametrize("budget", ["host_memory", "device_memory", "nvme_space"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_byte_less_is_refused_and_exactly_enough_works(budget: str, tier: str, nvme: Path) -> None:
    config: dict[str, Any] = {**dict.fromkeys(("params", "optimizer", "gradients"), tier), **AMPLE}
    config["nvme_paths"] = [nvme]
    if tier == "host" and budget != "host_memory":
        pytest.skip("takes nothing there")
    needed = least_memory(RECIPE, None, budget, **config)
    with pytest.raises(zo.BudgetError) as refused:
        train_offloaded(RECIPE, **{**config, budget: needed - 1})
    message = str(refused.value)
    assert f"needs {needed} bytes" in message
    assert f"the budget is {needed - 1} bytes" in message
    assert f'{budget} = "{needed}B" (1 bytes more)' in message
    holders = {int(number) for number in re.findall(r"  (\d+) bytes$", message, re.MULTILINE)}
    assert holders
    assert sum(holders) <= needed
    model = small_llama()
    settings = zo.OffloadConfig(**{**config, budget: needed})
    run = build_run(model, settings, cpu_with_simulated_drive())
    usage = {"host_memory": 1, "device_memory": 0, "nvme_space": 2}[budget]
    assert run._resources.usage()[usage].leased_bytes == needed
    zo.close(model)


def test_what_a_refusal_advises_works(nvme: Path) -> None:
    config: dict[str, Any] = {"params": "host", "optimizer": "host", "gradients": "host", "nvme_paths": [nvme]}
    needed = least_memory(RECIPE, None, "host_memory", **config)
    with pytest.raises(zo.BudgetError) as refused:
        train_offloaded(RECIPE, host_memory=needed - 1, **config)
    advice = re.findall(r'(params|optimizer|gradients) = "(device|host|nvme)"', str(refused.value))
    assert ("gradients", "nvme") not in advice
    for state, tier in advice:
        model = zo.offload(small_llama(), zo.OffloadConfig(host_memory=needed - 1, **{**config, state: tier}))
        zo.close(model)


def test_closing_gives_everything_back(nvme: Path) -> None:
    settings = zo.OffloadConfig(params="nvme", optimizer="nvme", gradients="nvme", nvme_paths=[nvme], **AMPLE)
    model = small_llama()
    run = build_run(model, settings, cpu_with_simulated_drive())
    assert list(nvme.iterdir()) != []
    budgets = run._resources.budgets.values()
    assert all(budget.leased_bytes for budget in budgets)
    zo.close(model)
    assert not any(budget.leased_bytes for budget in budgets)
    assert leftovers(nvme) == []
