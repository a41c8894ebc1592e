"""What a step asks of each link, unit by unit, from where its states live. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import NamedTuple

from zerooffload.config import TierName
from zerooffload.formats import round_up
from zerooffload.planner.placement import FlatPlacement, Placement, Reach, StatePlacement, UnitPlacement
from zerooffload.tiers import FILE_ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Bytes that move for something, on one rank.

    Attributes
    ----------
    nvme_read, nvme_written, copy_in, copy_out, gathered, reduced : float
        As `zo.step_report(model).bytes_moved` counts them.
    host_traffic : float
        Read and written of host memory by the CPU: copies and drives not counted.
    """

    nvme_read: float = 0.0
    nvme_written: float = 0.0
    copy_in: float = 0.0
    copy_out: float = 0.0
    gathered: float = 0.0
    reduced: float = 0.0
    host_traffic: float = 0.0

    def __add__(self, other: Demand) -> Demand:
        return Demand(
            nvme_read=self.nvme_read + other.nvme_read,
            nvme_written=self.nvme_written + other.nvme_written,
            copy_in=self.copy_in + other.copy_in,
            copy_out=self.copy_out + other.copy_out,
            gathered=self.gathered + other.gathered,
            reduced=self.reduced + other.reduced,
            host_traffic=self.host_traffic + other.host_traffic,
        )

    def mean_with(self, other: Demand) -> Demand:
        """Half of both."""
        both = self + other
        return Demand(**{item.name: getattr(both, item.name) / 2 for item in fields(Demand)})

    def moved(self) -> Mapping[str, float]:
        """By link, as step reports name them."""
        return {item.name: getattr(self, item.name) for item in fields(Demand) if item.name != "host_traffic"}


class InputTraffic(NamedTuple):
    """Bytes of a block's input on its way to its home, and as many on its way back: between host and device, and files.

    Those on the drive are whole blocks of the file.
    """

    copied: int
    on_drive: int


def input_traffic(home: TierName | None, nbytes: int, reach: Reach) -> InputTraffic:
    """Of an input that is kept there; nothing of one that stays on the device, or that is not kept."""
    if home is None or reach.by_device(home):
        return InputTraffic(0, 0)
    on_drive = round_up(nbytes, FILE_ALIGNMENT_BYTES) if home is TierName.NVME else 0
    return InputTraffic(0 if reach.device_shares_host else nbytes, on_drive)


def total(demands: list[Demand]) -> Demand:
    """All of them."""
    return reduce(add, demands, Demand())


@dataclass(frozen=True, kw_only=True)
class UnitDemand:
    """What a unit asks for.

    Attributes
    ----------
    range_nbytes : int
        In the window of parameters in use; 0 for one that is always there.
    arrival, first_arrival : Demand
        Its parameters come to the window: for any use, and for the first after an update.
    leaving, first_leaving : Demand
        Its gradients of a backward go home: where some are held there already, and where they are the first.
    gradient_at_home : float
        Bytes of gradients that the thread that trains adds in place, because the device computes there.
    update : Demand
    num_updated : int
        Elements that this rank updates.
    on_device : bool
        Whether the device updates them.
    goes_ahead : bool
        Whether the update can begin before `optimizer.step()`: what it changes has a second place.
    device_traffic : float
        Then: bytes of its memory that this reads and writes.
    lent_nbytes : float
        Of parameters on nvme that the device computes on in place: what it copies of those that stayed in host memory.
    staged_nbytes : float
        What the update reads from nvme of states that it changes: what stays in host memory need not be read.
    checked_nbytes : float
        Of what the update writes, what gets a checksum.
    chunk_numels : Sequence[int]
        Elements of each chunk in which the update goes, in forward's order.
    """

    range_nbytes: int
    arrival: Demand
    first_arrival: Demand
    leaving: Demand
    first_leaving: Demand
    gradient_at_home: float
    update: Demand
    num_updated: int
    on_device: bool
    goes_ahead: bool
    device_traffic: float
    lent_nbytes: float
    staged_nbytes: float
    checked_nbytes: float
    chunk_numels: Sequence[int]


def unit_demands(placement: Placement) -> dict[str, UnitDemand]:
    """Each unit's demands, by its name."""
    of_kinds = {unit.kind: _unit_demand(unit, placement) for unit, _ in placement.kinds}
    return {unit.name: of_kinds[unit.kind] for unit in placement.units}


def may_go_ahead(placement: Placement) -> bool:
    """Whether updates can begin before `optimizer.step()`: where each state that changes has a second place.

    What the device updates is updated in `step()`.
    """
    return any(_goes_ahead(_trained(unit), placement) for unit in placement.units)


def _unit_demand(unit: UnitPlacement, placement: Placement) -> UnitDemand:
    flats = unit.flats
    moving = [flat for flat in flats if flat.moves]
    trained = _trained(unit)
    on_device = bool(trained) and all(_is_all_on_device(flat, placement) for flat in trained)
    return UnitDemand(
        range_nbytes=sum(placement.reach.range_nbytes(flat.range_length) for flat in moving),
        arrival=total([_arrival(flat, placement) for flat in moving]),
        first_arrival=total([_first_arrival(flat, placement) for flat in moving]),
        leaving=total([_leaving(flat, placement, is_first=False) for flat in trained]),
        first_leaving=total([_leaving(flat, placement, is_first=True) for flat in trained]),
        gradient_at_home=sum(_gradient_nbytes(flat) for flat in trained if not flat.collects),
        update=total([_update(flat, placement) for flat in trained]),
        num_updated=sum(_num_own(flat) for flat in trained),
        on_device=on_device,
        goes_ahead=_goes_ahead(trained, placement),
        device_traffic=sum(_kernel_traffic(flat) for flat in trained) if on_device else 0.0,
        lent_nbytes=sum(
            flat.param.layout.memory_nbytes
            for flat in moving
            if placement.reach.device_shares_host and _is_far(flat.param)
        ),
        staged_nbytes=sum(
            _own_file_nbytes(state, flat) for flat in trained for state in _changed(flat) if _is_far(state)
        ),
        checked_nbytes=sum(_written_nbytes(flat) for flat in trained),
        chunk_numels=[numel for flat in trained if flat.optimizer for numel in flat.optimizer.layout.chunk_numels],
    )


def _is_far(state: StatePlacement) -> bool:
    return state.tier is TierName.NVME


def _is_all_on_device(flat: FlatPlacement, placement: Placement) -> bool:
    return not placement.reach.device_shares_host and all(state.tier is TierName.DEVICE for state in flat.states())


def _trained(unit: UnitPlacement) -> list[FlatPlacement]:
    return [flat for flat in unit.flats if flat.optimizer is not None and flat.gradient is not None]


def _goes_ahead(trained: Sequence[FlatPlacement], placement: Placement) -> bool:
    return bool(trained) and all(_has_second_places(flat, placement) for flat in trained)


def _has_second_places(flat: FlatPlacement, placement: Placement) -> bool:
    return all(
        state.num_places > 1 or (placement.commits_steps and _is_far(state) and not state.is_mirrored)
        for state in _changed(flat)
    )


def _others_part(flat: FlatPlacement) -> float:
    """Of a whole flat, what other ranks have: what a gather brings, and a reduction takes away."""
    world_size = flat.layout.world_size
    return (world_size - 1) / world_size


def _arrival(flat: FlatPlacement, placement: Placement) -> Demand:
    held = flat.param.layout
    is_whole = len(held.shards) == flat.layout.world_size
    return Demand(
        nvme_read=held.total_file_nbytes if _is_far(flat.param) else 0.0,
        copy_in=held.memory_nbytes if _is_copied(flat, placement) else 0.0,
        gathered=0.0 if is_whole else _others_part(flat) * flat.layout.nbytes,
    )


def _first_arrival(flat: FlatPlacement, placement: Placement) -> Demand:
    """Of parameters that ranks hold whole, each has updated its shard: the others' are gathered, and sent home.

    Ranks that share one home have put theirs there already, and each sends its part of the rest.
    """
    held, world_size = flat.param.layout, flat.layout.world_size
    if flat.optimizer is None or len(held.shards) < world_size or world_size == 1:
        return _arrival(flat, placement)
    own, others = 1 / world_size, _others_part(flat)
    to_send = (world_size - flat.param.num_sharers) / world_size / flat.param.num_sharers
    usual = _arrival(flat, placement)
    return Demand(
        nvme_read=usual.nvme_read * own,
        nvme_written=held.total_file_nbytes * others if _is_far(flat.param) else 0.0,
        copy_in=usual.copy_in * own,
        copy_out=held.memory_nbytes * to_send if _is_copied(flat, placement) else 0.0,
        gathered=others * flat.layout.nbytes,
    )


def _is_copied(flat: FlatPlacement, placement: Placement) -> bool:
    """Between its home, or a staging slot, and its range; a CPU's files are read to where they are needed."""
    return not (placement.reach.device_shares_host and _is_far(flat.param))


def _gradient_nbytes(flat: FlatPlacement) -> float:
    """Of the shards that this rank holds, as they leave the device: in the parameters' dtype."""
    return flat.gradient.layout.numel * flat.layout.dtype.itemsize if flat.gradient is not None else 0.0


def _leaving(flat: FlatPlacement, placement: Placement, *, is_first: bool) -> Demand:
    """What comes first is stored and normed; what comes later is joined with what is held, and normed."""
    gradient = flat.gradient
    if gradient is None or not flat.collects:
        return Demand()
    coming, held = _gradient_nbytes(flat), gradient.layout.memory_nbytes
    shares_host = placement.reach.device_shares_host
    straight = is_first and not shares_host and coming == held and not _is_far(gradient)
    return Demand(
        nvme_read=gradient.layout.total_file_nbytes if _is_far(gradient) and not is_first else 0.0,
        nvme_written=gradient.layout.total_file_nbytes if _is_far(gradient) else 0.0,
        copy_out=0.0 if shares_host else coming if straight else _staged_nbytes(flat, gradient),
        copy_in=0.0 if shares_host or gradient.tier is not TierName.DEVICE else held,
        reduced=_others_part(flat) * flat.layout.nbytes,
        host_traffic=held if straight else coming + held * (1 if is_first else 2),
    )


def _staged_nbytes(flat: FlatPlacement, gradient: StatePlacement) -> int:
    """Of gradients that come through staging slots: chunk by chunk, in whole file blocks."""
    itemsize = flat.layout.dtype.itemsize
    return gradient.layout.total(lambda numel: round_up(numel * itemsize, FILE_ALIGNMENT_BYTES))


def _num_own(flat: FlatPlacement) -> int:
    return len(flat.own) * flat.layout.shard_numel


def _own_nbytes(state: StatePlacement, flat: FlatPlacement) -> float:
    """Of a state, the bytes in memory of what this rank updates."""
    return state.layout.memory_nbytes * len(flat.own) / max(1, len(state.layout.shards))


def _own_file_nbytes(state: StatePlacement, flat: FlatPlacement) -> float:
    return state.layout.total_file_nbytes * len(flat.own) / max(1, len(state.layout.shards))


def _changed(flat: FlatPlacement) -> list[StatePlacement]:
    return [state for state in (flat.param, flat.optimizer) if state is not None]


def _kernel_traffic(flat: FlatPlacement) -> float:
    """Changed states are read and written, gradients read; a new place beside the old is also read, to be written."""
    changed = sum(_own_nbytes(state, flat) * (3 if state.num_places > 1 else 2) for state in _changed(flat))
    return changed + (_own_nbytes(flat.gradient, flat) if flat.gradient is not None else 0.0)


def _written_nbytes(flat: FlatPlacement) -> float:
    return sum(_own_file_nbytes(state, flat) for state in _changed(flat) if _is_far(state) or state.is_mirrored)


def _update(flat: FlatPlacement, placement: Placement) -> Demand:
    if _is_all_on_device(flat, placement):
        return Demand()
    far = [state for state in flat.states() if _is_far(state)]
    on_device = [
        state for state in flat.states() if state.tier is TierName.DEVICE and not placement.reach.device_shares_host
    ]
    return Demand(
        nvme_read=sum(_own_file_nbytes(state, flat) for state in far),
        nvme_written=_written_nbytes(flat),
        copy_out=sum(_own_nbytes(state, flat) for state in on_device),
        copy_in=sum(_own_nbytes(state, flat) for state in on_device if state is not flat.gradient),
        host_traffic=_kernel_traffic(flat),
    )
