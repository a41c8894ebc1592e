"""A step as tasks on lanes. Pure; see [Note: lanes of a step] in task_list.py and [Note: fluid lanes] in lanes.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zerooffload.config import UpdateMode
from zerooffload.planner.admission import AnnouncedPlan
from zerooffload.planner.cost.chunks_in_ring import ChunksInRing
from zerooffload.planner.cost.demand import Demand, InputTraffic, input_traffic, may_go_ahead, total, unit_demands
from zerooffload.planner.cost.lanes import Task, Timing, busiest_seconds, run_lanes
from zerooffload.planner.cost.speeds import Speeds
from zerooffload.planner.cost.task_list import RING, Lane, TaskList, pairs_of
from zerooffload.planner.cost.window import Arrival, arrivals
from zerooffload.planner.placement import NUM_STAGING_SLOTS
from zerooffload.planner.profiles import ModelProfile

_ROOT = "(root)"


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """What kind of steps these are.

    Attributes
    ----------
    schedule : UpdateMode
    accumulation : int
        Backwards of a step.
    computed_again : frozenset[str]
        Units whose forward runs again in backward.
    num_slices : int
        Of a block's batch; the model's profile is that of one slice.
    whole : frozenset[str]
        Units that run the whole batch at once nevertheless.
    clips : bool
        Whether the gradients' norm is wanted.
    """

    schedule: UpdateMode
    accumulation: int = 1
    computed_again: frozenset[str] = frozenset()
    num_slices: int = 1
    whole: frozenset[str] = frozenset()
    clips: bool = False

    def num_at_once(self, unit: str) -> int:
        """Slices that a unit's forward takes together."""
        return self.num_slices if unit in self.whole else 1


@dataclass(frozen=True)
class Span:
    """What a lane did from `begin` to `end`, in seconds from the step's start."""

    lane: Lane
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class SimulatedStep:
    """A step among others like it.

    Attributes
    ----------
    seconds : float
    moved : Demand
    busy : Mapping[Lane, float]
        Seconds at full speed.
    spans : Sequence[Span]
        What each lane did.
    """

    seconds: float
    moved: Demand
    busy: Mapping[Lane, float]
    spans: Sequence[Span]


_NUM_STEPS = 5
"""Three to get going, and two that are like all that follow."""
_MOST_PIECES = 4
"""Of a unit's update: enough that reading, stepping and writing overlap."""


def simulate_step(plan: AnnouncedPlan, model: ModelProfile, speeds: Speeds, kind: StepKind) -> SimulatedStep:
    """Run some steps of a plan on paper, and take the mean of the last two.

    Raises
    ------
    ConfigError
        If the machine's profile lacks a rate.
    """
    steps = _Steps(plan, model, speeds, kind)
    ends = [steps.add_step() for _ in range(_NUM_STEPS)]
    timing = _run(steps, speeds)
    begin, middle, end = (timing.ends[number] for number in ends[-3:])
    return SimulatedStep(
        seconds=(end - begin) / 2,
        moved=total(steps.moved_by_step[-2]).mean_with(total(steps.moved_by_step[-1])),
        busy=_busy(steps.tasks[ends[-2] + 1 : ends[-1] + 1]),
        spans=_spans(steps.tasks, timing, middle, end),
    )


def soon_seconds(plan: AnnouncedPlan, model: ModelProfile, speeds: Speeds, kind: StepKind) -> float:
    """What the third step takes, or where updates go there and back the second and third: quicker to tell, and nearly
    what `simulate_step` says.

    Raises
    ------
    ConfigError
        If the machine's profile lacks a rate.
    """
    steps = _Steps(plan, model, speeds, kind)
    ends = [steps.add_step() for _ in range(3)]
    timing = _run(steps, speeds)
    num = 2 if kind.schedule is UpdateMode.AFTER_BACKWARD else 1
    return (timing.ends[ends[-1]] - timing.ends[ends[-1 - num]]) / num


def _run(steps: _Steps, speeds: Speeds) -> Timing:
    return run_lanes(steps.tasks, pairs_of(speeds), {RING: NUM_STAGING_SLOTS - 1})


def floor_seconds(plan: AnnouncedPlan, model: ModelProfile, speeds: Speeds, kind: StepKind) -> float:
    """The least that such a step takes: of each part beside which no other can run, the time of what is busy longest.

    Quicker than running it on paper, and never more. `docs/overlap.md` has the parts in words.

    Raises
    ------
    ConfigError
        If the machine's profile lacks a rate.
    """
    steps = _Steps(plan, model, speeds, kind)
    steps.follow_another()
    steps.add_step()
    pairs = pairs_of(speeds)
    return max(busiest_seconds(steps.last(), pairs), sum(busiest_seconds(part, pairs) for part in steps.parts()))


def _busy(tasks: Sequence[Task]) -> dict[Lane, float]:
    return {lane: sum(task.seconds for task in tasks if task.lane == lane) for lane in Lane}


def _spans(tasks: Sequence[Task], timing: Timing, begin: float, end: float) -> list[Span]:
    return [
        Span(Lane(task.lane), task.name, max(first, begin) - begin, min(last, end) - begin)
        for task, first, last in zip(tasks, timing.begins, timing.ends, strict=True)
        if last > begin and first < end and task.seconds > 0
    ]


class _Steps:
    """Makes the tasks of one step after the other."""

    def __init__(self, plan: AnnouncedPlan, model: ModelProfile, speeds: Speeds, kind: StepKind) -> None:
        self._add = TaskList(speeds, shares_host=plan.placement.reach.device_shares_host)
        self.moved_by_step: list[list[Demand]] = []
        self._speeds, self._kind = speeds, kind
        self._placement = plan.placement
        self._shares_host = plan.placement.reach.device_shares_host
        self._input_nbytes = {work.name: work.input_nbytes * kind.num_slices for work in model.units}
        seconds_of = speeds.compute_seconds
        self._forward_seconds = {work.name: seconds_of(work.forward) * kind.num_slices for work in model.units}
        self._backward_seconds = {work.name: seconds_of(work.backward) * kind.num_slices for work in model.units}
        self._demands = unit_demands(plan.placement)
        self._needs = {unit.name: unit.needs for unit in plan.placement.units}
        blocks = [work.name for work in model.units if work.name != _ROOT and work.name in self._needs]
        self._forward = [_ROOT, *blocks]
        self._backward = [_ROOT, *reversed(blocks)]
        # Where a unit's gradient is whole.
        self._last_use = {name: visit for visit in self._backward for name in self._needs[visit]}
        self._order = list(dict.fromkeys([name for visit in self._forward for name in self._needs[visit]]))
        self._goes_round = kind.schedule is not UpdateMode.AFTER_BACKWARD
        self._arrivals = self._all_arrivals(plan.window_nbytes)
        self._goes_ahead = kind.schedule is UpdateMode.DURING_BACKWARD and may_go_ahead(plan.placement)
        self._ring = ChunksInRing(
            self._demands,
            plan.num_cached_slots,
            plan.placement.num_staged_chunks,
            goes_round=self._goes_round,
            goes_ahead=self._goes_ahead,
        )
        # Tasks that are waited for: for a unit's new parameters, and for all that the last update did.
        self._renewed: dict[str, list[int]] = {name: [] for name in self._demands}
        self._at_home: dict[str, list[int]] = {name: [] for name in self._demands}
        self._stepped: list[int] = []
        self._committed: list[int] = []
        self._last_compute: list[int] = []
        self._inputs_at_home: dict[str, list[int]] = {}

    @property
    def tasks(self) -> list[Task]:
        """Of all steps."""
        return self._add.tasks

    def add_step(self) -> int:
        """Another step; the position of the last task of the thread that trains."""
        self.moved_by_step.append([])
        self._come: set[str] = set()
        self._present: dict[str, list[int]] = {}
        self._computed: list[int] = []
        self._begin = list(self._last_compute)
        self._left: dict[str, list[int]] = {name: [] for name in self._demands}
        self._departures: list[list[int]] = []
        self._begins = [len(self.tasks)]
        self._is_beside_update = False
        for number in range(self._kind.accumulation):
            self._add_forward()
            self._begins.append(len(self.tasks))
            self._is_beside_update = self._goes_ahead and number == self._kind.accumulation - 1
            self._add_backward(is_first=number == 0)
            self._begins.append(len(self.tasks))
        return self._add_update()

    def follow_another(self) -> None:
        """Let the first step find in host memory what a step before it left there, and no tasks of that one."""
        self.moved_by_step.append([])
        self._ring.leave(self._update_order(), is_backwards=self._is_backwards())

    def _moves(self, demand: Demand) -> None:
        self.moved_by_step[-1].append(demand)

    def last(self) -> list[Task]:
        """The last step's."""
        return self.tasks[self._begins[0] :]

    def parts(self) -> list[list[Task]]:
        """Of the last step, tasks that may overlap: those of two parts cannot. What may overlap with all is in none."""
        *passes, update = [self.tasks[first:last] for first, last in pairwise([*self._begins, len(self.tasks)])]
        beside: list[list[Task]] = []
        if self._goes_round:
            # A backward waits for what is computed: the ring holds what is still to be written.
            writes = [number for number, task in enumerate(update) if task.lane == Lane.WRITE and task.seconds]
            late = set(writes[-NUM_STAGING_SLOTS:])
            update = [task for number, task in enumerate(update) if number not in late]
            beside.append(passes.pop(0))
            if self._goes_ahead:
                beside.append(passes.pop())
        return [[task for part in (*beside, update) for task in part], [task for part in passes for task in part]]

    def _all_arrivals(self, window_nbytes: int) -> dict[int, list[Arrival]]:
        passes = [[self._needs[name] for name in order] for order in (self._forward, self._backward)]
        ranges = {name: demand.range_nbytes for name, demand in self._demands.items()}
        found: dict[int, list[Arrival]] = {}
        for arrival in arrivals(passes * self._kind.accumulation, ranges, window_nbytes):
            found.setdefault(arrival.visit, []).append(arrival)
        return found

    def _is_backwards(self) -> bool:
        """Whether the update goes from the last unit to the first: one that is not hidden goes there and back."""
        return not self._goes_round and len(self.moved_by_step) % 2 == 0

    def _update_order(self) -> list[str]:
        """What is hidden goes as the next forward will; what is not, in the order of the model, there and back."""
        if self._goes_round:
            return self._order
        return list(self._demands)[:: -1 if self._is_backwards() else 1]

    def _add_forward(self) -> None:
        for name in self._forward:
            self._visit(name, 0.0 if name == _ROOT else self._forward_seconds[name], "forward")
            self._keep_input(name)
        self._compute(self._forward_seconds[_ROOT], [], f"{_ROOT} forward")

    def _add_backward(self, *, is_first: bool) -> None:
        for name in self._backward:
            seconds = self._backward_seconds[name]
            if name in self._kind.computed_again:
                seconds += self._forward_seconds[name]
            whole = [unit for unit in self._needs[name] if self._last_use[unit] == name]
            added = sum(self._demands[unit].gradient_at_home for unit in whole)
            seconds += added * (2 if is_first else 3) / self._speeds.host_memory
            # What the first visit waits for is over at the later ones.
            stepped, self._stepped = self._stepped, []
            # A device's host runs ahead of it; a thread that computes waits for what departs at the latest.
            waits = [*stepped, *(self._departures[-2] if len(self._departures) > 1 else ())]
            self._visit(name, seconds, "backward", [*waits, *self._bring_input(name)])
            departed = [task for unit in whole for task in self._leave(unit, is_first=is_first)]
            if departed:
                self._departures.append(departed)

    def _visit(self, name: str, seconds: float, what: str, after: Sequence[int] = ()) -> None:
        for arrival in self._arrivals.get(len(self._computed), ()):
            self._arrive(arrival)
        waits = list(after)
        for unit in self._needs[name]:
            waits += self._present.get(unit, ()) if self._demands[unit].range_nbytes else self._renewed[unit]
        self._computed.append(self._compute(seconds + self._speeds.visit_seconds, waits, f"{name} {what}"))

    def _compute(self, seconds: float, after: Sequence[int], name: str) -> int:
        task = self._add.compute(seconds, [*self._last_compute, *after], name)
        self._last_compute = [task]
        return task

    def _arrive(self, arrival: Arrival) -> None:
        name = arrival.unit
        unit, is_first = self._demands[name], name not in self._come
        demand = unit.first_arrival if is_first else unit.arrival
        held = self._ring.part_for_visit(name, is_first=is_first, is_beside_update=self._is_beside_update)
        # What is in host memory is copied from there; a device gets all of it so.
        if held:
            lent = held * unit.lent_nbytes
            demand = replace(demand, nvme_read=demand.nvme_read * (1 - held), copy_in=demand.copy_in + lent)
        self._come.add(name)
        self._moves(demand)
        # What computes in the thread that trains sends for it between two visits.
        room = self._computed[arrival.room_after : arrival.room_after + 1] if arrival.room_after >= 0 else self._begin
        after = [*(self._last_compute if self._shares_host else room)]
        after += self._renewed[name] if not demand.nvme_read else self._at_home[name]
        after = self._add.read(Lane.PARAMETER_READ, demand.nvme_read, after, name)
        after = self._add.copy(Lane.COPY_IN, demand.copy_in, after, name)
        after = self._add.link(demand.gathered, after, name)
        if demand.copy_out or demand.nvme_written:
            home = self._add.copy(Lane.COPY_OUT, demand.copy_out, after, name)
            self._add.write(demand.nvme_written, home, name)
        self._present[name] = after

    def _leave(self, name: str, *, is_first: bool) -> list[int]:
        """A unit's gradients go home; what must be over before their memory is used again."""
        unit = self._demands[name]
        demand = unit.first_leaving if is_first else unit.leaving
        self._moves(demand)
        after = self._add.link(demand.reduced, self._last_compute, f"{name} gradients")
        after = departed = self._add.copy(Lane.COPY_OUT, demand.copy_out, after, f"{name} gradients")
        after = self._add.read(Lane.STATE_READ, demand.nvme_read, after, f"{name} gradients")
        after = self._add.landing(demand.host_traffic, after, f"{name} gradients")
        if self._shares_host:
            departed = after
        after = self._add.write(demand.nvme_written, after, f"{name} gradients")
        after = self._add.copy(Lane.COPY_IN, demand.copy_in, after, f"{name} gradients")
        self._left[name] = list(after)
        return departed if demand != Demand() else []

    def _add_update(self) -> int:
        """What `optimizer.step()` does, and what it leaves to be done."""
        landed = [task for tasks in self._left.values() for task in tasks]
        # `step()` begins with what the one before has left to be done.
        home = [task for tasks in self._at_home.values() for task in tasks]
        normed = sum(unit.gradient_at_home for unit in self._demands.values()) if self._kind.clips else 0.0
        decided = self._compute(normed / self._speeds.host_memory, [*landed, *home], "step")
        self._stepped, written = [], []
        order = self._update_order()
        for rank, name in enumerate(order):
            unit = self._demands[name]
            if not unit.num_updated:
                continue
            if unit.on_device:
                seconds = unit.device_traffic / self._speeds.machine.device.memory_bandwidth
                self._renewed[name] = [self._compute(seconds, [], f"{name} update")]
                continue
            goes_ahead = self._goes_ahead and unit.goes_ahead
            after = [*self._left[name], *self._at_home[name]] if goes_ahead else [decided]
            written += self._update(name, after, rank)
        self._ring.leave(order, is_backwards=self._is_backwards())
        self._committed = [self._add.commit(written)] if written else []
        return decided if self._goes_round else self._compute(0.0, written, "updated")

    def _update(self, name: str, after: Sequence[int], rank: int) -> list[int]:
        """A unit's update, in some pieces; what must be over for its states to be home."""
        unit = self._demands[name]
        kept = self._ring.part_for_update(name) * unit.staged_nbytes
        demand = replace(unit.update, nvme_read=unit.update.nvme_read - kept) if kept else unit.update
        self._moves(demand)
        num_pieces = max(1, min(_MOST_PIECES, len(unit.chunk_numels)))
        self._renewed[name], self._at_home[name] = [], []
        seconds = demand.host_traffic / self._speeds.kernel + unit.checked_nbytes / self._speeds.checksum
        seconds = self._speeds.corrected("update", seconds) / num_pieces
        holds = demand.nvme_read > 0
        for _ in range(num_pieces):
            ready = self._add.copy(Lane.COPY_OUT, demand.copy_out / num_pieces, list(after), name)
            ready = self._add.read(Lane.STATE_READ, demand.nvme_read / num_pieces, ready, name, rank, takes=holds)
            leaves_ring = holds and not demand.nvme_written
            stepped = self._add.update(seconds, ready, f"{name} update", rank, frees=leaves_ring)
            home = self._add.copy(Lane.COPY_IN, demand.copy_in / num_pieces, [stepped], name)
            home = self._add.write(demand.nvme_written / num_pieces, [*home, *self._committed], name, rank, frees=holds)
            self._stepped.append(stepped)
            self._renewed[name].append(stepped)
            self._at_home[name] += home
        return self._at_home[name]

    def _input_traffic(self, name: str) -> InputTraffic:
        home = self._placement.block_inputs.homes.get(name)
        return input_traffic(home, self._input_nbytes[name], self._placement.reach)

    def _keep_input(self, name: str) -> None:
        out, written = self._input_traffic(name)
        if not out and not written:
            return
        self._moves(Demand(copy_out=out, nvme_written=written))
        after = self._add.copy(Lane.COPY_OUT, out, self._last_compute, f"{name} input")
        self._inputs_at_home[name] = self._add.write(written, after, f"{name} input")

    def _bring_input(self, name: str) -> list[int]:
        into, read = self._input_traffic(name)
        if not into and not read:
            return []
        self._moves(Demand(copy_in=into, nvme_read=read))
        after = [*self._inputs_at_home.pop(name), *self._computed[-2:-1]]
        after = self._add.read(Lane.PARAMETER_READ, read, after, f"{name} input")
        return self._add.copy(Lane.COPY_IN, into, after, f"{name} input")
