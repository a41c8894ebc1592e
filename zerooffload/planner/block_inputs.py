"""Where the inputs of blocks lie between forward and backward, and what is leased for that from the start. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from zerooffload.config import ActivationChoice, TierName
from zerooffload.errors import ConfigError
from zerooffload.formats import round_up
from zerooffload.planner.placement import BlockInputs, Claim, Reach, UnitLayout
from zerooffload.tiers import FILE_ALIGNMENT_BYTES
from zerooffload.tiers.staging import ring_nbytes

PAGE_NBYTES = 4 << 20
"""Inputs away from the device are cut into pieces of this size."""
NUM_SLOTS = 8
"""Of the staging ring: pages being written, or read while the block behind computes."""
NUM_BUFFERS = 2
"""On the device, for inputs on their way from or to another tier."""
HOLDER = "block inputs"
SUMS_HOLDER = "gradient sums"
STAGING_HOLDER = "block input staging"
_FP32_BYTES = 4


def place_block_inputs(
    units: Sequence[UnitLayout],
    blocks: Sequence[str],
    choice: ActivationChoice,
    memory: Mapping[TierName, int],
    reach: Reach,
    *,
    in_slices: Sequence[str],
) -> BlockInputs:
    """Give the input of each block its home.

    Parameters
    ----------
    blocks : Sequence[str]
        Names of the units that are blocks.
    memory : Mapping[TierName, int]
        Bytes to set aside on each tier.
    in_slices : Sequence[str]
        Names of the units that run in slices, if blocks do: the gradients of one's slices are added up on the device.

    Raises
    ------
    ConfigError
        If a pattern of unit names matches no block.
    """
    for pattern in choice if isinstance(choice, dict) else ():
        if not any(fnmatchcase(name, pattern) for name in blocks):
            raise ConfigError(f"activations for {pattern!r}: no block has such a name; blocks are {', '.join(blocks)}")
    homes = {name: home for name in blocks if (home := _home(choice, name, in_slices=bool(in_slices))) is not None}
    slot_nbytes = PAGE_NBYTES if any(not reach.by_device(home) for home in homes.values()) else 0
    claims = [Claim(tier, HOLDER, nbytes) for tier, nbytes in memory.items()]
    claims.append(Claim(TierName.HOST, STAGING_HOLDER, ring_nbytes(NUM_SLOTS, slot_nbytes)))
    if in_slices:
        claims.append(Claim(TierName.DEVICE, SUMS_HOLDER, _largest_sums(units, in_slices)))
    return BlockInputs(
        homes=homes,
        whole=frozenset(blocks) - homes.keys(),
        claims=tuple(claim for claim in claims if claim.nbytes),
        slot_nbytes=slot_nbytes,
    )


def inputs_nbytes(homes: Mapping[str, TierName], nbytes_of: Mapping[str, int], reach: Reach) -> dict[TierName, int]:
    """What all inputs of a forward take of each tier, and what they go through on the device.

    Parameters
    ----------
    homes : Mapping[str, TierName]
        Of the blocks' inputs.
    nbytes_of : Mapping[str, int]
        Bytes of each for the whole batch.
    """
    found: Counter[TierName] = Counter()
    away = [name for name, home in homes.items() if not reach.by_device(home)]
    for name, home in homes.items():
        found[home] += round_up(nbytes_of[name], PAGE_NBYTES) if name in away else nbytes_of[name]
    if away:
        largest = round_up(max(nbytes_of[name] for name in away), FILE_ALIGNMENT_BYTES)
        found[TierName.DEVICE] += NUM_BUFFERS * reach.range_nbytes(largest)
    return dict(found)


def _home(choice: ActivationChoice, unit: str, *, in_slices: bool) -> TierName | None:
    kind = choice
    if isinstance(choice, dict):
        kind = next((kind for pattern, kind in choice.items() if fnmatchcase(unit, pattern)), "auto")
    if kind == "auto":
        kind = "device" if in_slices else "keep"
    return None if kind == "keep" else TierName(str(kind))


def _largest_sums(units: Sequence[UnitLayout], in_slices: Sequence[str]) -> int:
    """Of the unit that uses most trainable parameters, in fp32."""
    numel = {unit.name: sum(flat.numel for flat in unit.flats if flat.trainable) for unit in units}
    uses = [sum(numel[needed] for needed in unit.needs) for unit in units if unit.name in in_slices]
    return _FP32_BYTES * max(uses, default=0)
