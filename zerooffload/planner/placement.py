"""Where each state lives and what that takes, decided before anything is allocated. Pure.

[Note: what a run leases]
homes            each flat's parameters, optimizer record and gradient, in the tier that the user chose
parameters in use  a window of device memory, shared by the units whose homes the device cannot use; at least the
                 root's and the largest hook point's, at most all of them; what the budget leaves over makes it larger
gradient collection   device memory where a unit's gradients gather before they leave for a home elsewhere
staging ring     host buffers through which the update streams what the kernel cannot address at home
parameter staging  host buffers through which parameters go from files to a device with memory of its own
gradient staging host buffers for gradients on their way
journal          where steps are committed: a buffer for a record, and its two files
block inputs     what is said of activations (block_inputs.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import TypeAlias

import torch

from zerooffload.accelerator import host_buffer_nbytes, shared_part_nbytes
from zerooffload.config import HomeTier, TierChoice, TierName
from zerooffload.errors import ConfigError
from zerooffload.formats import round_up
from zerooffload.journal import record_capacity
from zerooffload.journal.history import NUM_RECORDS
from zerooffload.optim.record import OptimizerStates
from zerooffload.planner.stages import STAGE_3, Sharding
from zerooffload.sharding.grouping import modules_around
from zerooffload.sharding.layout import FlatLayout
from zerooffload.tiers import FILE_ALIGNMENT_BYTES, Kept, Part, RecordLayout
from zerooffload.tiers.records import CHUNK_ALIGNMENT_NUMEL
from zerooffload.tiers.staging import ring_nbytes

CHUNK_NUMEL = 2 << 20
"""Elements of a chunk: 16 MiB of fp32 moments."""
NUM_STAGING_SLOTS = 4
"""Three chunks being read and stepped, one being written."""
NUM_PARAMETER_SLOTS = 8
"""Chunks being read while the drive is busy with an update's, and one being copied to the device."""
NUM_GRADIENT_SLOTS = 2
NUM_GRADIENT_SLOTS_OF_A_DEVICE = 8
"""One being copied down, one joined with its home, and others being written while the drive is busy with an update."""
JOURNAL_HOLDER = "journal"
_Homes: TypeAlias = tuple[TierName, TierName, TierName]
"""Of parameters, optimizer and gradients."""
_NO_HOMES: _Homes = (TierName.HOST,) * 3
ARRIVALS_HOLDER = "arrival counters"
COUNTER_NBYTES = host_buffer_nbytes(8)
"""Of the counter of each rank; a page, as each leases what is its own."""


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

    def home_nbytes(self, state: StatePlacement) -> int:
        """What a state's home takes from the tier's budget: of one that ranks share, this rank's part."""
        if state.num_sharers > 1:
            return shared_part_nbytes(state.layout.memory_nbytes, state.num_sharers)
        return self.block_nbytes(state.tier, state.layout, state.num_places)

    def block_nbytes(self, tier: TierName, layout: RecordLayout, num_slots: int = 1) -> int:
        """What a block takes from the tier's budget; the tiers themselves say the same."""
        if tier is TierName.NVME:
            return layout.total_file_nbytes * num_slots
        if not layout.memory_nbytes:
            return 0
        rounded = host_buffer_nbytes if tier is TierName.HOST else self.range_nbytes
        return num_slots * rounded(layout.memory_nbytes)


@dataclass(frozen=True)
class StatePlacement:
    """One state of a flat buffer: its home, its records, and what outlives the run.

    Attributes
    ----------
    kept : Kept or None
        Under which name and in how many slots its records outlive the run; None if they do not.
    num_places : int
        Of records that do not: with 2, an update may begin ahead (see [Note: ahead] in tiers/api.py).
    num_sharers : int
        Ranks that have the block in one memory.
    name : str
        Of the flat buffer and the state.
    """

    holder: str
    tier: TierName
    layout: RecordLayout
    kept: Kept | None = None
    name: str = ""
    num_places: int = 1
    num_sharers: int = 1

    @property
    def kept_layout(self) -> RecordLayout:
        """The records that outlive the run."""
        return self.layout if self.kept is None else self.kept.part_of(self.layout)

    @property
    def is_mirrored(self) -> bool:
        """Whether what outlives the run is a copy, because the home is memory."""
        return self.kept is not None and self.tier is not TierName.NVME


@dataclass(frozen=True)
class FlatPlacement:
    """The states of one flat buffer; the optimizer's and the gradient only if it is trainable."""

    layout: FlatLayout
    param: StatePlacement
    optimizer: StatePlacement | None
    gradient: StatePlacement | None
    moves: bool
    collects: bool

    @property
    def own(self) -> range:
        """The shards that this rank updates; of frozen parameters, those that it holds."""
        return (self.optimizer or self.param).layout.shards

    @property
    def shares_arrivals(self) -> bool:
        """Whether some ranks have one copy of the parameters, and each takes a part home of what others update."""
        return self.optimizer is not None and 1 < self.param.num_sharers < self.layout.world_size

    @property
    def range_length(self) -> int:
        """Bytes of the range or collection buffer: whole file blocks, so that reads may go straight into it."""
        return round_up(self.layout.nbytes, FILE_ALIGNMENT_BYTES)

    def states(self) -> list[StatePlacement]:
        """Each state with its home."""
        return [state for state in (self.param, self.optimizer, self.gradient) if state is not None]

    @property
    def with_second_places(self) -> FlatPlacement:
        """With a second place for what the host updates, where it has all of it."""
        holds_copies = len(self.param.layout.shards) > len(self.own)
        if self.optimizer is None or holds_copies or any(state.tier is TierName.DEVICE for state in self.states()):
            return self
        return replace(self, param=replace(self.param, num_places=2), optimizer=replace(self.optimizer, num_places=2))


@dataclass(frozen=True, eq=False)
class UnitKind:
    """What units that differ in names alone have in common. There is one of each, so that it is told by identity."""

    without_names: object


@lru_cache(maxsize=1 << 12)
def _unit_kind(without_names: object) -> UnitKind:
    """Two that mean the same, because the first was forgotten, are right too: as many kinds of units more."""
    return UnitKind(without_names)


@dataclass(frozen=True)
class UnitPlacement:
    """A unit's flats, and the units that its hook point needs."""

    name: str
    flats: tuple[FlatPlacement, ...]
    needs: tuple[str, ...]

    @cached_property
    def with_second_places(self) -> UnitPlacement:
        """With a second place for what the host updates, where it has all of it."""
        return replace(self, flats=tuple(flat.with_second_places for flat in self.flats))

    @cached_property
    def kind(self) -> UnitKind:
        """The same for units that differ in names alone: they hold as much, and ask for the same in a step."""
        without_names = tuple(
            (
                flat.layout.signature,
                flat.moves,
                flat.collects,
                *(
                    (state.tier, state.layout, state.kept and state.kept.num_slots, state.num_places, state.num_sharers)
                    for state in flat.states()
                ),
            )
            for flat in self.flats
        )
        return _unit_kind(without_names)


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
class BlockInputs:
    """What becomes of the inputs of blocks that are computed again in backward; see block_inputs.py.

    Attributes
    ----------
    homes : Mapping[str, TierName]
        Where a block's input is kept, by unit; a block that keeps its activations has none.
    whole : frozenset[str]
        Those other blocks: they run the whole batch at once.
    claims : tuple[Claim, ...]
        What is leased from the start.
    slot_nbytes : int
        Of the staging ring; 0 where no input leaves the device.
    """

    homes: Mapping[str, TierName] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    claims: tuple[Claim, ...] = ()
    slot_nbytes: int = 0


@dataclass(frozen=True)
class Placement:
    """All that the run will lease, but for what the windows get beyond their least.

    Attributes
    ----------
    slot_nbytes, param_slot_nbytes, gradient_slot_nbytes : int
        Length of a staging slot of the update, of parameters on their way to the device, and of gradients; 0 where
        nothing is staged.
    window, collection : WindowNeed
        Of parameters in use, and of gradients being collected.
    commits_steps : bool
        Whether all that is trained outlives the run, so that its steps can be committed and resumed.
    block_inputs : BlockInputs
    """

    units: tuple[UnitPlacement, ...]
    reach: Reach
    slot_nbytes: int
    param_slot_nbytes: int
    gradient_slot_nbytes: int
    window: WindowNeed
    collection: WindowNeed
    commits_steps: bool = False
    block_inputs: BlockInputs = field(default_factory=BlockInputs)

    @cached_property
    def kinds(self) -> tuple[tuple[UnitPlacement, int], ...]:
        """Of each kind of units one, and how many there are."""
        numbers = Counter(unit.kind for unit in self.units)
        first = {unit.kind: unit for unit in reversed(self.units)}
        return tuple((first[kind], number) for kind, number in numbers.items())

    @property
    def num_gradient_slots(self) -> int:
        """Slots of the gradients' staging ring."""
        return NUM_GRADIENT_SLOTS if self.reach.device_shares_host else NUM_GRADIENT_SLOTS_OF_A_DEVICE

    @property
    def num_staged_chunks(self) -> int:
        """Chunks that an update brings to host memory from files."""
        return sum(
            num_alike * flat.optimizer.layout.num_chunks
            for unit, num_alike in self.kinds
            for flat in unit.flats
            if flat.optimizer is not None and TierName.NVME in (flat.param.tier, flat.optimizer.tier)
        )

    @property
    def update_uses_other_resources(self) -> bool:
        """Whether the update uses what compute does not: a drive, or, beside a device, the host."""
        return not self.reach.device_shares_host or self.num_staged_chunks > 0

    @property
    def reduces_in_order(self) -> bool:
        """Whether several ranks reduce gradients, which they do in one order."""
        return any(flat.collects and flat.layout.world_size > 1 for unit in self.units for flat in unit.flats)

    @property
    def num_kept_chunks(self) -> int:
        """Chunks of this rank that a committed step names."""
        states = (state for unit in self.units for flat in unit.flats for state in flat.states())
        return sum(state.kept_layout.num_chunks for state in states if state.kept is not None)

    @property
    def shared_nbytes(self) -> int:
        """Host memory that several ranks map."""
        states = [state for unit in self.units for flat in unit.flats for state in flat.states()]
        homes = sum(host_buffer_nbytes(state.layout.memory_nbytes) for state in states if state.num_sharers > 1)
        return homes + self.num_arrival_counters * COUNTER_NBYTES

    @property
    def num_arrival_counters(self) -> int:
        """One for each rank that has one copy of parameters with this one, where each takes a part of them home."""
        flats = (flat for unit in self.units for flat in unit.flats)
        return max((flat.param.num_sharers for flat in flats if flat.shares_arrivals), default=0)

    def home_claims(self) -> list[Claim]:
        """What states take at home, and their copies."""
        totals: dict[tuple[TierName, str], int] = {}
        for unit, num_alike in self.kinds:
            for state in (state for flat in unit.flats for state in flat.states()):
                for tier, holder, nbytes in self._blocks(state):
                    totals[tier, holder] = totals.get((tier, holder), 0) + num_alike * nbytes
        return [Claim(tier, holder, nbytes) for (tier, holder), nbytes in totals.items() if nbytes]

    def fixed_claims(self) -> list[Claim]:
        """Homes and staging rings: what does not depend on the budgets."""
        claims = [
            *self.home_claims(),
            Claim(TierName.HOST, "staging ring", ring_nbytes(NUM_STAGING_SLOTS, self.slot_nbytes)),
            Claim(TierName.HOST, "parameter staging", ring_nbytes(NUM_PARAMETER_SLOTS, self.param_slot_nbytes)),
            Claim(TierName.HOST, "gradient staging", ring_nbytes(self.num_gradient_slots, self.gradient_slot_nbytes)),
            Claim(TierName.HOST, ARRIVALS_HOLDER, COUNTER_NBYTES if self.num_arrival_counters else 0),
        ]
        if self.commits_steps:
            record_nbytes = record_capacity(self.num_kept_chunks)
            claims.append(Claim(TierName.HOST, JOURNAL_HOLDER, record_nbytes))
            claims.append(Claim(TierName.NVME, JOURNAL_HOLDER, NUM_RECORDS * record_nbytes))
        return [*(claim for claim in claims if claim.nbytes), *self.block_inputs.claims]

    def _blocks(self, state: StatePlacement) -> list[tuple[TierName, str, int]]:
        blocks = [(state.tier, state.holder, self.reach.home_nbytes(state))]
        if state.kept is not None:
            # At home in files they have one slot already.
            holder = mirror_holder(state.holder) if state.is_mirrored else state.holder
            num_more = state.kept.num_slots - (not state.is_mirrored)
            blocks.append((TierName.NVME, holder, self.reach.block_nbytes(TierName.NVME, state.kept_layout, num_more)))
        return blocks


def mirror_holder(holder: str) -> str:
    """Who leases the copies on the nvme tier of a state that lives in memory."""
    return f"copies of {holder}"


@dataclass(frozen=True)
class UnitHomes:
    """A home for each unit, by its name."""

    tiers: Mapping[str, TierName]


@dataclass(frozen=True)
class TierChoices:
    """Home tiers of the three states: as the user names them, or as a plan found them."""

    params: TierChoice | UnitHomes
    optimizer: TierChoice | UnitHomes
    gradients: TierChoice | UnitHomes


@dataclass(frozen=True)
class Durability:
    """What the user wants to outlive the run.

    Attributes
    ----------
    atomic_steps : bool
        Commit whole steps, if all that is trained lives on nvme; takes two slots a chunk.
    durable : bool
        Also if it does not: keep copies there.
    """

    atomic_steps: bool = True
    durable: bool = False


@dataclass(frozen=True)
class UnitLayout:
    """A unit before its states have homes."""

    name: str
    flats: tuple[FlatLayout, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True)
class _PlacedUnit:
    """A unit in its homes, what it takes of the windows, and of the slots of staging rings."""

    unit: UnitPlacement
    range_nbytes: int
    collect_nbytes: int
    slot_nbytes: int
    param_slot_nbytes: int
    gradient_slot_nbytes: int


class Placer:
    """Gives states their homes, any number of times; a unit that had the same homes before is not placed again.

    Parameters
    ----------
    sharding : Sharding
        Which states this rank holds a shard of, and which whole.
    accumulates : bool
        Whether several backwards add up before each update: gradients are then held in fp32.
    """

    def __init__(
        self,
        units: Sequence[UnitLayout],
        reach: Reach,
        states: OptimizerStates,
        durability: Durability = Durability(),
        *,
        accumulates: bool = False,
        sharding: Sharding = STAGE_3,
    ) -> None:
        self._units, self._reach, self._states, self._durability = units, reach, states, durability
        self._accumulates, self._sharding = accumulates, sharding
        longest = max((flat.shard_numel for unit in units for flat in unit.flats), default=0)
        self._chunk_numel = min(CHUNK_NUMEL, round_up(max(longest, 1), CHUNK_ALIGNMENT_NUMEL))
        self._placed: dict[tuple[str, _Homes, bool], _PlacedUnit] = {}

    def place(self, choices: TierChoices) -> Placement:
        """Give every state of every unit its home.

        Raises
        ------
        ConfigError
            If trainable parameters have a dtype that cannot be trained, or a pattern of unit names matches none.
        """
        _check_patterns(choices, [unit.name for unit in self._units])
        durability = self._durability
        commits = durability.atomic_steps and (durability.durable or _is_all_on_nvme(self._units, choices))
        placed = [self._unit(unit, choices, commits=commits) for unit in self._units]
        units = tuple(one.unit for one in placed)
        return Placement(
            units=units,
            reach=self._reach,
            slot_nbytes=max((one.slot_nbytes for one in placed), default=0),
            param_slot_nbytes=max((one.param_slot_nbytes for one in placed), default=0),
            gradient_slot_nbytes=max((one.gradient_slot_nbytes for one in placed), default=0),
            window=_window_need(units, {one.unit.name: one.range_nbytes for one in placed}),
            collection=_window_need(units, {one.unit.name: one.collect_nbytes for one in placed}),
            commits_steps=commits,
        )

    def _unit(self, unit: UnitLayout, choices: TierChoices, *, commits: bool) -> _PlacedUnit:
        # One that has no states need not be given homes.
        homes = _homes_of(choices, unit.name) if unit.flats else _NO_HOMES
        key = unit.name, homes, commits
        if key not in self._placed:
            reach, num_sharers = self._reach, self._sharding.num_sharers
            placed = [self._flat(flat, homes, commits=commits) for flat in unit.flats]
            flats = tuple(_with_sharers(flat, reach, num_sharers) for flat in placed)
            self._placed[key] = _PlacedUnit(
                UnitPlacement(unit.name, flats, unit.needs),
                range_nbytes=sum(reach.range_nbytes(flat.range_length) for flat in flats if flat.moves),
                collect_nbytes=sum(reach.range_nbytes(flat.range_length) for flat in flats if flat.collects),
                slot_nbytes=max((_slot_nbytes(flat, reach) for flat in flats), default=0),
                param_slot_nbytes=max((_param_slot_nbytes(flat, reach) for flat in flats), default=0),
                gradient_slot_nbytes=max((_gradient_slot_nbytes(flat, reach) for flat in flats), default=0),
            )
        return self._placed[key]

    def _flat(self, layout: FlatLayout, homes: _Homes, *, commits: bool) -> FlatPlacement:
        reach, sharding, num_shards = self._reach, self._sharding, layout.world_size
        own = sharding.held(num_shards, is_sharded=sharding.optimizer if layout.trainable else sharding.params)
        of_param, of_optimizer, of_gradient = homes

        def state(
            holder: str, tier: TierName, parts: tuple[Part, ...], *, is_sharded: bool, num_slots: int = 0
        ) -> StatePlacement:
            shards = sharding.held(num_shards, is_sharded=is_sharded)
            records = RecordLayout(parts, layout.shard_numel, self._chunk_numel, shards)
            name = f"{layout.name} {holder}"
            kept = Kept(name, num_slots, own) if num_slots else None
            return StatePlacement(holder, tier, records, kept, name)

        # What is frozen is never written again: one slot. In memory it need not be kept: the user's model has it.
        is_kept = commits and (layout.trainable or of_param is TierName.NVME)
        param_slots = (2 if layout.trainable else 1) if is_kept else 0
        part = Part("param", layout.dtype)
        param = state("parameters", of_param, (part,), is_sharded=sharding.params, num_slots=param_slots)
        optimizer = gradient = None
        if layout.trainable:
            record, num_slots = self._states.parts(layout.dtype), 2 if commits else 0
            optimizer = state(
                "optimizer state", of_optimizer, record, is_sharded=sharding.optimizer, num_slots=num_slots
            )
            held = (Part("grad", torch.float32 if self._accumulates else layout.dtype),)
            gradient = state("gradients", of_gradient, held, is_sharded=sharding.gradients)
        several = num_shards > 1
        return FlatPlacement(
            layout=layout,
            param=param,
            optimizer=optimizer,
            gradient=gradient,
            moves=len(param.layout.shards) < num_shards or not reach.by_device(param.tier),
            collects=gradient is not None and (several or not reach.by_device(gradient.tier)),
        )


def with_sharers(placement: Placement, num_sharers: int) -> Placement:
    """The placement for a rank that has one copy with so many, itself included, of what these hold alike on host."""
    units = tuple(
        replace(unit, flats=tuple(_with_sharers(flat, placement.reach, num_sharers) for flat in unit.flats))
        for unit in placement.units
    )
    return replace(placement, units=units)


def _with_sharers(flat: FlatPlacement, reach: Reach, num_sharers: int) -> FlatPlacement:
    is_shared = may_be_shared(flat, reach)
    return replace(flat, param=replace(flat.param, num_sharers=num_sharers)) if is_shared else flat


def with_second_places(placement: Placement) -> Placement:
    """The placement with a second place for what updates change, where the host updates it and no step is committed.

    Steps that are committed have two slots anyway. Where the device computes on host memory, parameters cannot lie
    here and there.
    """
    if placement.reach.device_shares_host or placement.commits_steps:
        return placement
    return replace(placement, units=tuple(unit.with_second_places for unit in placement.units))


def _is_all_on_nvme(units: Sequence[UnitLayout], choices: TierChoices) -> bool:
    """Whether every trained state, but for gradients, has its home there."""
    trained = [unit.name for unit in units for flat in unit.flats if flat.trainable]
    homes = {home_tier(choice, name) for name in trained for choice in (choices.params, choices.optimizer)}
    return homes == {TierName.NVME}


def home_tier(choice: TierChoice | UnitHomes, unit_name: str) -> TierName:
    """The home that `choice` gives to a unit; "auto", and a mapping without a matching pattern, mean host."""
    if isinstance(choice, UnitHomes):
        return choice.tiers[unit_name]
    tier: HomeTier
    if isinstance(choice, dict):
        tier = next((home for pattern, home in choice.items() if fnmatchcase(unit_name, pattern)), "auto")
    else:
        tier = choice
    return TierName.HOST if tier == "auto" else TierName(tier)


def _homes_of(choices: TierChoices, unit_name: str) -> _Homes:
    of_states = (choices.params, choices.optimizer, choices.gradients)
    params, optimizer, gradients = (home_tier(choice, unit_name) for choice in of_states)
    return params, optimizer, gradients


def is_auto(choice: TierChoice | UnitHomes, unit_name: str) -> bool:
    """Whether a choice leaves the home of a unit to a plan."""
    if isinstance(choice, dict):
        return next((home for pattern, home in choice.items() if fnmatchcase(unit_name, pattern)), "auto") == "auto"
    return choice == "auto"


def _check_patterns(choices: TierChoices, names: Sequence[str]) -> None:
    for choice in (choices.params, choices.optimizer, choices.gradients):
        for pattern in choice if isinstance(choice, dict) else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"home tier for {pattern!r}: no unit has such a name; units are {', '.join(names)}")


def may_be_shared(flat: FlatPlacement, reach: Reach) -> bool:
    """Whether ranks would hold the same bytes on host, which no user reaches in place."""
    param = flat.param
    is_whole = len(param.layout.shards) > 1 and param.layout.memory_nbytes > 0
    # Where each rank updates all shards, each has bytes of its own.
    is_written_by_all = flat.optimizer is not None and flat.own == param.layout.shards
    return is_whole and not is_written_by_all and param.tier is TierName.HOST and not reach.device_shares_host


def _window_need(units: Sequence[UnitPlacement], nbytes_of: dict[str, int]) -> WindowNeed:
    together = _used_together(tuple((unit.name, unit.needs) for unit in units))
    least = max((sum(nbytes_of[name] for name in used) for used in together), default=0)
    return WindowNeed(least, sum(nbytes_of.values()))


@lru_cache(maxsize=8)
def _used_together(points: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[frozenset[str], ...]:
    """Units that are in use at the same time, for each hook point: its own, those of the points around it, the root's.

    Parameters
    ----------
    points : tuple
        Name of each, and the units that it needs; the root last.
    """
    needs = dict(points)
    together = []
    for name, _ in points:
        around = {*modules_around(name), points[-1][0]}
        together.append(frozenset(unit for point in around for unit in needs.get(point, ())))
    return tuple(together)


def _slot_nbytes(flat: FlatPlacement, reach: Reach) -> int:
    """Room for the parts of a chunk's states that the host cannot address, or that go to files as copies."""
    states = flat.states()
    if flat.optimizer is not None and all(state.tier is TierName.DEVICE for state in states):
        states = [state for state in states if state.is_mirrored]
    needs = [state.layout for state in states if state.is_mirrored or not reach.by_host(state.tier)]
    return sum(layout.largest_file_nbytes for layout in needs)


def _param_slot_nbytes(flat: FlatPlacement, reach: Reach) -> int:
    """Room for a chunk's parameters, where neither the host nor the device can address them at home."""
    is_staged = flat.moves and not reach.device_shares_host and not reach.by_host(flat.param.tier)
    return flat.param.layout.largest_file_nbytes if is_staged else 0


def _gradient_slot_nbytes(flat: FlatPlacement, reach: Reach) -> int:
    """Room for what comes from the device, and for what the home already holds, where the host cannot address them."""
    if not flat.collects or flat.gradient is None:
        return 0
    # A gradient leaves in its parameter's dtype, so a chunk of it is as long as one of the parameters.
    arriving_nbytes = 0 if reach.device_shares_host else flat.param.layout.largest_file_nbytes
    held_nbytes = 0 if reach.by_host(flat.gradient.tier) else flat.gradient.layout.largest_file_nbytes
    return arriving_nbytes + held_nbytes
