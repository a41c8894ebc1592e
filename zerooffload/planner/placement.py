"""Where each state lives and what that takes, decided before anything is allocated. Pure.

[Note: what a run leases]
homes            each flat's parameters, optimizer record and gradient, in the tier that the user chose
parameters in use  a window of device memory, shared by the units whose homes the device cannot use; at least the
                 root's and the largest hook point's, at most all of them; what the budget leaves over makes it larger
gradient collection   device memory where a unit's gradients gather before they leave for a home elsewhere
staging ring     host buffers through which the update streams what the kernel cannot address at home
gradient staging host buffers for gradients on their way
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zerooffload.accelerator import host_buffer_nbytes
from zerooffload.config import HomeTier, TierChoice, TierName
from zerooffload.errors import ConfigError
from zerooffload.formats import round_up
from zerooffload.optim.record import OptimizerStates
from zerooffload.sharding.layout import FlatLayout
from zerooffload.tiers import FILE_ALIGNMENT_BYTES, Part, RecordLayout
from zerooffload.tiers.records import CHUNK_ALIGNMENT_NUMEL
from zerooffload.tiers.staging import ring_nbytes

CHUNK_NUMEL = 2 << 20
"""Elements of a chunk: 16 MiB of fp32 moments."""
NUM_STAGING_SLOTS = 4
"""Two chunks being read and stepped, two being written."""
NUM_GRADIENT_SLOTS = 2


@dataclass(frozen=True)
class Reach:
    """Which homes computing can address, and how the device's memory rounds."""

    device_shares_host: bool
    range_nbytes: Callable[[int], int]

    def by_device(self, tier: TierName) -> bool:
        """Whether the device computes on bytes of that tier in place."""
        return tier is TierName.DEVICE or (tier is TierName.HOST and self.device_shares_host)

    def by_host(self, tier: TierName) -> bool:
        """Whether the host computes on bytes of that tier in place."""
        return tier is TierName.HOST or (tier is TierName.DEVICE and self.device_shares_host)

    def block_nbytes(self, tier: TierName, layout: RecordLayout) -> int:
        """What a block takes from the tier's budget; the tiers themselves say the same."""
        if tier is TierName.NVME:
            return layout.total_file_nbytes
        if not layout.memory_nbytes:
            return 0
        return (
            host_buffer_nbytes(layout.memory_nbytes)
            if tier is TierName.HOST
            else self.range_nbytes(layout.memory_nbytes)
        )


@dataclass(frozen=True)
class FlatPlacement:
    """Home tiers and record layouts of one flat buffer; the optimizer's and the gradient's only if it is trainable."""

    layout: FlatLayout
    param_tier: TierName
    optimizer_tier: TierName
    gradient_tier: TierName
    param: RecordLayout
    optimizer: RecordLayout | None
    gradient: RecordLayout | None
    moves: bool
    collects: bool

    @property
    def range_length(self) -> int:
        """Bytes of the range or collection buffer: whole file blocks, so that reads may go straight into it."""
        return round_up(self.layout.nbytes, FILE_ALIGNMENT_BYTES)

    def states(self) -> list[tuple[str, TierName, RecordLayout]]:
        """Each state with its home."""
        states = [("parameters", self.param_tier, self.param)]
        if self.optimizer is not None and self.gradient is not None:
            states.append(("optimizer state", self.optimizer_tier, self.optimizer))
            states.append(("gradients", self.gradient_tier, self.gradient))
        return states


@dataclass(frozen=True)
class UnitPlacement:
    """A unit's flats, and the units that its hook point needs."""

    name: str
    flats: tuple[FlatPlacement, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """Bytes that a holder will lease from a tier's budget."""

    tier: TierName
    holder: str
    nbytes: int


@dataclass(frozen=True)
class WindowNeed:
    """Device bytes that a window must have, would like to have, and could ever use."""

    least_nbytes: int
    most_nbytes: int


@dataclass(frozen=True)
class Placement:
    """All that the run will lease, but for what the windows get beyond their least.

    Attributes
    ----------
    slot_nbytes, gradient_slot_nbytes : int
        Length of a staging slot of the update, and of the gradients; 0 where nothing is staged.
    window, collection : WindowNeed
        Of parameters in use, and of gradients being collected.
    """

    units: tuple[UnitPlacement, ...]
    reach: Reach
    slot_nbytes: int
    gradient_slot_nbytes: int
    window: WindowNeed
    collection: WindowNeed

    def fixed_claims(self) -> list[Claim]:
        """Homes and staging rings: what does not depend on the budgets."""
        totals: dict[tuple[TierName, str], int] = {}
        for unit in self.units:
            for flat in unit.flats:
                for state, tier, layout in flat.states():
                    key = (tier, state)
                    totals[key] = totals.get(key, 0) + self.reach.block_nbytes(tier, layout)
        totals[TierName.HOST, "staging ring"] = ring_nbytes(NUM_STAGING_SLOTS, self.slot_nbytes)
        totals[TierName.HOST, "gradient staging"] = ring_nbytes(NUM_GRADIENT_SLOTS, self.gradient_slot_nbytes)
        return [Claim(tier, holder, nbytes) for (tier, holder), nbytes in totals.items() if nbytes]


@dataclass(frozen=True)
class TierChoices:
    """The user's home tiers of the three states."""

    params: TierChoice
    optimizer: TierChoice
    gradients: TierChoice


@dataclass(frozen=True)
class UnitLayout:
    """A unit before its states have homes."""

    name: str
    flats: tuple[FlatLayout, ...]
    needs: tuple[str, ...]


def place(units: Sequence[UnitLayout], choices: TierChoices, reach: Reach, states: OptimizerStates) -> Placement:
    """Give every state of every unit its home.

    Raises
    ------
    ConfigError
        If trainable parameters have a dtype that cannot be trained, or a pattern of unit names matches none.
    """
    _check_patterns(choices, [unit.name for unit in units])
    longest = max((flat.shard_numel for unit in units for flat in unit.flats), default=0)
    chunk_numel = min(CHUNK_NUMEL, round_up(max(longest, 1), CHUNK_ALIGNMENT_NUMEL))
    placed = tuple(
        UnitPlacement(
            unit.name,
            tuple(
                _place_flat(flat, unit.name, choices=choices, reach=reach, states=states, chunk_numel=chunk_numel)
                for flat in unit.flats
            ),
            unit.needs,
        )
        for unit in units
    )
    flats = [flat for unit in placed for flat in unit.flats]
    range_bytes = {unit.name: _ranges(unit, reach, lambda flat: flat.moves) for unit in placed}
    collect_bytes = {unit.name: _ranges(unit, reach, lambda flat: flat.collects) for unit in placed}
    return Placement(
        units=placed,
        reach=reach,
        slot_nbytes=max((_slot_nbytes(flat, reach) for flat in flats), default=0),
        gradient_slot_nbytes=max((_gradient_slot_nbytes(flat, reach) for flat in flats), default=0),
        window=_window_need(placed, range_bytes),
        collection=_window_need(placed, collect_bytes),
    )


def home_tier(choice: TierChoice, unit_name: str) -> TierName:
    """The home that `choice` gives to a unit; "auto", and a mapping without a matching pattern, mean host."""
    tier: HomeTier
    if isinstance(choice, dict):
        tier = next((home for pattern, home in choice.items() if fnmatchcase(unit_name, pattern)), "auto")
    else:
        tier = choice
    return TierName.HOST if tier == "auto" else TierName(tier)


def _check_patterns(choices: TierChoices, names: Sequence[str]) -> None:
    for choice in (choices.params, choices.optimizer, choices.gradients):
        for pattern in choice if isinstance(choice, dict) else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"home tier for {pattern!r}: no unit has such a name; units are {', '.join(names)}")


def _place_flat(
    layout: FlatLayout,
    unit_name: str,
    *,
    choices: TierChoices,
    reach: Reach,
    states: OptimizerStates,
    chunk_numel: int,
) -> FlatPlacement:
    param_tier = home_tier(choices.params, unit_name)
    gradient_tier = home_tier(choices.gradients, unit_name)

    def records(parts: tuple[Part, ...]) -> RecordLayout:
        return RecordLayout(parts, layout.shard_numel, chunk_numel)

    return FlatPlacement(
        layout=layout,
        param_tier=param_tier,
        optimizer_tier=home_tier(choices.optimizer, unit_name),
        gradient_tier=gradient_tier,
        param=records((Part("param", layout.dtype),)),
        optimizer=records(states.parts(layout.dtype)) if layout.trainable else None,
        gradient=records((Part("grad", layout.dtype),)) if layout.trainable else None,
        moves=layout.world_size > 1 or not reach.by_device(param_tier),
        collects=layout.trainable and (layout.world_size > 1 or not reach.by_device(gradient_tier)),
    )


def _ranges(unit: UnitPlacement, reach: Reach, wanted: Callable[[FlatPlacement], bool]) -> int:
    return sum(reach.range_nbytes(flat.range_length) for flat in unit.flats if wanted(flat))


def _window_need(units: Sequence[UnitPlacement], nbytes_of: dict[str, int]) -> WindowNeed:
    """At any time the units of one hook point are in use, and those of the points around it, the root's always."""
    least = 0
    for point in units:
        around = [unit for unit in units if unit is units[-1] or f"{point.name}.".startswith(f"{unit.name}.")]
        used = {name for unit in around for name in unit.needs}
        least = max(least, sum(nbytes_of[name] for name in used))
    return WindowNeed(least, sum(nbytes_of.values()))


def _slot_nbytes(flat: FlatPlacement, reach: Reach) -> int:
    """Room for the parts of a chunk's states that the host cannot address."""
    if flat.optimizer is None:
        needs = [] if reach.by_host(flat.param_tier) else [flat.param]
    elif all(tier is TierName.DEVICE for _, tier, _ in flat.states()):
        needs = []
    else:
        needs = [layout for _, tier, layout in flat.states() if not reach.by_host(tier)]
    return sum(layout.file_nbytes(0) for layout in needs if layout.num_chunks)


def _gradient_slot_nbytes(flat: FlatPlacement, reach: Reach) -> int:
    """Room for what comes from the device, and for what the home already holds, where the host cannot address them."""
    if not flat.collects or flat.gradient is None or not flat.gradient.num_chunks:
        return 0
    num_buffers = (not reach.device_shares_host) + (not reach.by_host(flat.gradient_tier))
    return num_buffers * flat.gradient.file_nbytes(0)
