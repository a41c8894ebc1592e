"""Power cuts that hit two ranks: on one machine at one moment, or on two at moments of their own.

[Note: cuts of two machines]
Nothing but messages orders what two machines do. So each may be cut where it likes, as long as no rank has gone on from
a meeting that the other had not come to. Meetings that the design relies on are those of the start, all of which count,
and one for each commit. Others, which happen in every forward and backward, are left out: more is then possible.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.drive_images import Image, Met, systematic_images
from support.durable_training import (
    Reference,
    Scenario,
    in_turns,
    of_rank,
    real_environment,
    recording_environment,
    training,
    watch_to_the_end,
)
from support.power_cuts import Resumptions, check_step, folder_with, resumed_as, tell_finished_steps
from support.rank_turns import TurnCollectives, Turns
from support.recording_engine import Log, recording

from zerooffload.accelerator import default_accelerator
from zerooffload.journal import Journal, Manifest, StepRecord, common_step, read_history
from zerooffload.journal.verification import layout_of
from zerooffload.runtime.build import environment
from zerooffload.sharding.collectives import GroupCollectives
from zerooffload.tiers.checksums import checksum
from zerooffload.tiers.directory import rank_directory
from zerooffload.tiers.nvme import STATES_FILE

WORLD_SIZE = 2


def root_of(folder: Path, rank: int, *, apart: bool) -> Path:
    """Where the drives of a rank are."""
    return folder / f"machine-{rank}" if apart else folder


def recorded_ranks(
    scenario: Scenario, folder: Path, *, apart: bool, committed: int = 0, in_background: bool = False
) -> list[Log]:
    """The log of each machine: of both ranks, or of one each if they are `apart`."""
    turns = Turns(WORLD_SIZE)
    roots = [root_of(folder, rank, apart=apart) for rank in range(WORLD_SIZE)]
    with ExitStack() as stack:
        for root in roots:
            scenario.paths(root)
        share = 1 if apart else WORLD_SIZE
        logs = [stack.enter_context(recording(root, committed=committed, num_ranks=share)) for root in roots[::share]]

        def train(rank: int) -> None:
            log = logs[rank // share]
            collectives = TurnCollectives(turns, rank, log.met)
            env = of_rank(recording_environment(log, in_background=in_background), turns, collectives)
            with training(scenario, roots[rank], env) as run:
                assert run.resume() == committed
                collectives.hears_all = False
                tell_finished_steps(run, log)
                run.finish()

        turns.run(train)
    return logs


class RankResumptions(Resumptions):
    """Resumes on both ranks from images of one machine, or of two that are `apart`."""

    def __init__(self, scenario: Scenario, references: Sequence[Reference], scratch: Path, *, apart: bool) -> None:
        super().__init__(scenario, references[0], scratch)
        self._references = references
        self._apart = apart

    def _resumed(self, folder: Path) -> int:
        to_the_end = self._trains_on

        def resume(rank: int, turns: Turns) -> int:
            root = root_of(folder, rank, apart=self._apart)
            environment = of_rank(real_environment(), turns, TurnCollectives(turns, rank))
            return resumed_as(self._references[rank], self.scenario, root, environment, to_the_end=to_the_end)

        first, *others = in_turns(WORLD_SIZE, resume)
        assert others == [first] * (WORLD_SIZE - 1)
        return first


def of_machines(images: Sequence[Image]) -> Image:
    """A folder that holds what two machines do."""
    return Image(
        {f"machine-{rank}/{name}": of for rank, image in enumerate(images) for name, of in image.files.items()}
    )


@dataclass(frozen=True)
class Held:
    """What is on one machine's drives.

    Attributes
    ----------
    run : str
        The run's id; "" if there is no run.
    steps : tuple
        Pairs of a record's sequence and its step.
    whole : frozenset[int]
        Sequences of which every chunk holds what a run that was never interrupted had committed.
    """

    run: str = ""
    steps: tuple[tuple[int, int], ...] = ()
    whole: frozenset[int] = frozenset()

    @property
    def summary(self) -> tuple[str, dict[int, int]] | None:
        """As ranks tell each other."""
        return (self.run, dict(self.steps)) if self.run else None


Checksums = list[dict[int, list[int]]]
"""By rank and step, of all chunks."""


@contextmanager
def noting_checksums(before: Sequence[dict[int, list[int]]] = ()) -> Iterator[Checksums]:
    """Those of each step that is committed in the block, beside earlier ones."""
    found: Checksums = [dict(of_rank) for of_rank in before] or [{} for _ in range(WORLD_SIZE)]
    write = Journal.write

    def noting(journal: Journal, record: StepRecord) -> None:
        write(journal, record)
        rank = int(journal._directories[0].name.removeprefix("rank-"))
        found[rank][record.step] = record.chunks.checksums.tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "write", noting)
        yield found


def continue_ranks(scenario: Scenario, folder: Path, references: Sequence[Reference]) -> list[Reference]:
    """By rank, a run that is resumed on two machines and not interrupted any more; `references` were those before."""

    def train(rank: int, turns: Turns) -> Reference:
        environment = of_rank(real_environment(), turns, TurnCollectives(turns, rank))
        with training(scenario, root_of(folder, rank, apart=True), environment) as run:
            moments = references[rank].moments[: run.resume() + 1]
            return watch_to_the_end(run, Reference(moments, references[rank].losses[: run.loader.position]))

    return in_turns(WORLD_SIZE, train)


class Holdings:
    """Tells what images of one rank's machine hold, without a run; each image once.

    Attributes
    ----------
    images : dict[Held, Image]
        One for each answer that came.
    """

    def __init__(self, scenario: Scenario, rank: int, expected: dict[int, list[int]], scratch: Path) -> None:
        self.images: dict[Held, Image] = {}
        self._scenario = scenario
        self._rank = rank
        self._expected = expected
        self._scratch = scratch
        self._known: dict[bytes, Held] = {}

    @property
    def num_images(self) -> int:
        """How many different ones there were."""
        return len(self._known)

    def of(self, image: Image) -> Held:
        """What is there."""
        key = image.key
        if key not in self._known:
            with folder_with(image, self._scratch) as folder:
                held = self._known[key] = self._look(folder)
            self.images.setdefault(held, image)
        return self._known[key]

    def _look(self, folder: Path) -> Held:
        directories = [rank_directory(path, self._rank) for path in self._scenario.paths(folder)]
        history = read_history(directories)
        if history.manifest is None:
            return Held()
        files = [(directories[history.order.index(path)] / STATES_FILE) for path in range(len(directories))]
        contents = [file.read_bytes() for file in files]
        records = history.records.values()
        return Held(
            history.manifest.run,
            tuple(sorted((record.sequence, record.step) for record in records)),
            frozenset(record.sequence for record in records if self._is_whole(record, history.manifest, contents)),
        )

    def _is_whole(self, record: StepRecord, manifest: Manifest, contents: Sequence[bytes]) -> bool:
        slots, found = iter(record.chunks.slots.tolist()), []
        for state in manifest.states:
            layout = layout_of(state)
            for number, (path, offsets) in enumerate(state.chunks):
                start = offsets[next(slots)]
                content = bytearray(contents[path][start : start + layout.file_nbytes(number)])
                found.append(checksum(torch.frombuffer(content, dtype=torch.uint8)))
        return found == record.chunks.checksums.tolist() == self._expected[record.step]


@dataclass(frozen=True)
class Moment:
    """A machine that is cut after so many events: what its drive may hold then, and which meetings it knows of."""

    committed: int
    finished: int
    held: frozenset[Held]
    come_to: Counter[str]
    gone_on_from: Counter[str]

    def may_be_with(self, other: Moment) -> bool:
        """Whether another machine can be at that moment while this one is here."""
        return all(
            one.gone_on_from[channel] <= two.come_to[channel]
            for one, two in ((self, other), (other, self))
            for channel in one.gone_on_from
        )


def moments_of(log: Log, holdings: Holdings | None = None) -> list[Moment]:
    """All of a log; without what the drive may hold if there are no `holdings`."""
    found = []
    come_to: Counter[str] = Counter()
    gone_on_from: Counter[str] = Counter()
    for event, drive in zip([None, *log.events], log.drives(), strict=True):
        if isinstance(event, Met):
            (gone_on_from if event.is_over else come_to)[event.channel] += 1
        held = frozenset(map(holdings.of, systematic_images(drive))) if holdings is not None else frozenset[Held]()
        found.append(Moment(drive.committed, drive.finished, held, come_to.copy(), gone_on_from.copy()))
    return found


@dataclass
class Pairs:
    """All pairs of moments of two machines, and all that they may hold then.

    Attributes
    ----------
    num_moments : int
        Pairs of moments.
    steps : dict
        For each pair of what two machines may hold at once, the step that their ranks agree on.
    """

    num_moments: int = 0
    steps: dict[tuple[Held, Held], int] = field(default_factory=dict)

    def check(self, one: Moment, other: Moment) -> None:
        """See that the ranks agree on the newest step that both hold, whole, and that it is new enough."""
        self.num_moments += 1
        committed, finished = min(one.committed, other.committed), max(one.finished, other.finished)
        for pair in itertools.product(one.held, other.held):
            if pair not in self.steps:
                self.steps[pair] = agreed_step(*pair)
            check_step(self.steps[pair], committed, finished)


def agreed_step(one: Held, other: Held) -> int:
    """What two ranks find on their drives; both must have all of it."""
    common = common_step({0: one.summary, 1: other.summary})
    if common is None:
        return 0
    _, sequence, step = common
    assert sequence == max(dict(one.steps).keys() & dict(other.steps).keys())
    assert dict(one.steps)[sequence] == dict(other.steps)[sequence] == step
    assert sequence in one.whole & other.whole
    return step


def all_pairs(logs: Sequence[Log], holdings: Sequence[Holdings]) -> Pairs:
    """Check every pair of moments at which two machines can be cut."""
    pairs = Pairs()
    first, second = (moments_of(log, of) for log, of in zip(logs, holdings, strict=True))
    for one, other in itertools.product(first, second):
        if one.may_be_with(other):
            pairs.check(one, other)
    return pairs


def resume_and_finish(rank: int, world_size: int, scenario: Scenario, folders: Sequence[str]) -> list[dict[str, Any]]:
    """In a process for each rank, from drives of two machines in each of the folders."""
    assert world_size == WORLD_SIZE
    collectives = GroupCollectives(dist.group.WORLD)
    endings = []
    for folder in folders:
        root = root_of(Path(folder), rank, apart=True)
        env = environment(scenario.settings(root), default_accelerator(), collectives)
        with training(scenario, root, env) as run:
            step, losses = run.resume(), run.finish()
            endings.append({"step": step, "losses": losses, "params": run.moment().values["params"]})
    return endings
