from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from zerooffload import ConfigError
from zerooffload.config import TierName
from zerooffload.planner.block_inputs import NUM_SLOTS, PAGE_NBYTES, inputs_nbytes, place_block_inputs
from zerooffload.planner.placement import BlockInputs, Reach, UnitLayout
from zerooffload.sharding.layout import ParamSpec, lay_out

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = ["layers.0", "layers.1"]
HEAD = "head"


def unit(name: str, numel: int, needs: Sequence[str], *, trainable: bool = True) -> UnitLayout:
    spec = ParamSpec(f"{name}.weight", (numel,), ())
    flat = lay_out(name, [spec], dtype=torch.bfloat16, trainable=trainable, world_size=1)
    return UnitLayout(name, (flat,), (name, *needs))


def placed(reach: Reach, choice: Any, *, in_slices: bool = True, **memory: int) -> BlockInputs:
    units = [
        unit("embed", 4096, []),
        unit("layers.0", 128, []),
        unit("layers.1", 256, ["layers.0"]),
        unit("frozen", 8192, [], trainable=False),
        unit(HEAD, 64, ["embed", "frozen"]),
    ]
    of_tiers = {TierName(tier): nbytes for tier, nbytes in memory.items()}
    return place_block_inputs(units, BLOCKS, choice, of_tiers, reach, in_slices=[*BLOCKS, HEAD] if in_slices else [])


def claims(inputs: BlockInputs) -> dict[tuple[str, str], int]:
    return {(claim.tier.value, claim.holder): claim.nbytes for claim in inputs.claims}


@pytest.mark.parametrize(
    ("choice", "in_slices", "homes"),
    [
        ("auto", True, {"layers.0": "device", "layers.1": "device"}),
        ("auto", False, {}),
        ("keep", True, {}),
        ("nvme", False, {"layers.0": "nvme", "layers.1": "nvme"}),
        ({"layers.0": "keep"}, True, {"layers.1": "device"}),
        ({"layers.1": "host", "*": "keep"}, True, {"layers.1": "host"}),
        ({"*": "nvme", "layers.1": "host"}, False, {"layers.0": "nvme", "layers.1": "nvme"}),
    ],
)
def test_where_inputs_are_kept(choice: Any, in_slices: bool, homes: dict[str, str], cpu: Reach) -> None:  # noqa: FBT001
    found = placed(cpu, choice, in_slices=in_slices)
    assert found.homes == homes
    assert found.whole == set(BLOCKS) - homes.keys()


def test_a_pattern_without_a_block_is_refused(cpu: Reach) -> None:
    with pytest.raises(ConfigError, match=r"activations for 'embed': no block .* layers\.0, layers\.1"):
        placed(cpu, {"embed": "host"})


def test_sums_are_those_of_the_unit_that_uses_most_trainable_parameters(cpu: Reach) -> None:
    """The tied head's: 64 of its own and the embedding's 4096, in fp32."""
    assert claims(placed(cpu, "auto")) == {("device", "gradient sums"): 4 * (64 + 4096)}
    assert claims(placed(cpu, "host", in_slices=False)) == {}


@pytest.mark.parametrize(("home", "on_cpu", "beside_a_device"), [("host", 0, 1), ("nvme", 1, 1), ("device", 0, 0)])
def test_staging_is_for_what_leaves_the_device(
    home: str, on_cpu: int, beside_a_device: int, cpu: Reach, gpu: Reach
) -> None:
    for reach, slots in ((cpu, on_cpu), (gpu, beside_a_device)):
        inputs = placed(reach, home, in_slices=False)
        assert inputs.slot_nbytes == slots * PAGE_NBYTES
        assert claims(inputs).get(("host", "block input staging"), 0) == slots * NUM_SLOTS * PAGE_NBYTES


def test_what_is_set_aside_is_claimed(cpu: Reach) -> None:
    found = claims(placed(cpu, "nvme", in_slices=False, nvme=1000, device=10))
    assert found["nvme", "block inputs"] == 1000
    assert found["device", "block inputs"] == 10


def test_what_all_inputs_take_is_known_before(cpu: Reach, gpu: Reach) -> None:
    homes = {"a": TierName.DEVICE, "b": TierName.HOST, "c": TierName.NVME}
    nbytes_of = {"a": 1000, "b": PAGE_NBYTES + 1, "c": 3 * PAGE_NBYTES, "head": 7}
    # What is away goes through two buffers on the device, each for the largest.
    assert inputs_nbytes(homes, nbytes_of, gpu) == {
        TierName.DEVICE: 1000 + 2 * 3 * PAGE_NBYTES,
        TierName.HOST: 2 * PAGE_NBYTES,
        TierName.NVME: 3 * PAGE_NBYTES,
    }
    # A CPU uses in place what is in its memory.
    assert inputs_nbytes(homes, nbytes_of, cpu) == {
        TierName.DEVICE: 1000 + 2 * 3 * PAGE_NBYTES,
        TierName.HOST: PAGE_NBYTES + 1,
        TierName.NVME: 3 * PAGE_NBYTES,
    }
    assert inputs_nbytes({"a": TierName.DEVICE}, nbytes_of, gpu) == {TierName.DEVICE: 1000}
    assert inputs_nbytes({}, nbytes_of, gpu) == {}
