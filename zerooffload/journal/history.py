"""What a directory remembers of earlier runs, and which step all ranks can go on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.journal.manifest import MANIFEST_FILE, Manifest, read_manifest
from zerooffload.journal.record import StepRecord, decode

NUM_RECORDS = 2


def record_path(directory: Path, sequence: int) -> Path:
    """The file that the record of a commit is in."""
    return directory / f"record-{sequence % NUM_RECORDS}.bin"


@dataclass(frozen=True)
class History:
    """What one rank's directories hold.

    Attributes
    ----------
    manifest : Manifest or None
        None if no run got as far as its first record.
    records : Mapping[int, StepRecord]
        Whole records by their sequence.
    problems : tuple[str, ...]
        Record files that hold none, and why.
    order : tuple[int, ...]
        For each of the given directories, which path of the run it is.
    """

    manifest: Manifest | None = None
    records: Mapping[int, StepRecord] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def summary(self) -> tuple[str, dict[int, int]] | None:
        """The run's id, and the step of each sequence that is here; what ranks tell each other."""
        if self.manifest is None:
            return None
        return self.manifest.run, {record.sequence: record.step for record in self.records.values()}


def read_history(directories: Sequence[Path], *, all_paths: bool = True) -> History:
    """Read the manifests and records of a rank's directories.

    Parameters
    ----------
    all_paths : bool
        Demand that every path of the run is there, and is told once.

    Raises
    ------
    CheckpointError
        If files of a run are missing or damaged, so that no step of it can be continued.
    """
    found = [(directory, directory / MANIFEST_FILE) for directory in directories]
    there = [manifest for _, manifest in found if manifest.exists()]
    if len(there) < len(found) and _was_never_begun(directories, there):
        return History()
    for directory, manifest in found:
        if not manifest.exists():
            others = ", ".join(str(path.parent) for path in there)
            raise CheckpointError(
                f"{directory} has no files of the run that is in {others}: name the paths of that run"
            )
    manifests = [read_manifest(manifest) for _, manifest in found]
    first = manifests[0]
    if any(manifest.run != first.run for manifest in manifests):
        raise CheckpointError(f"{', '.join(map(str, directories))} hold files of different runs")
    order = tuple(manifest.path for manifest in manifests)
    if not all_paths and 0 not in order:
        return History(first, order=order)
    if all_paths and sorted(order) != list(range(first.num_paths)):
        raise CheckpointError(
            f"the run in {', '.join(map(str, directories))} has {first.num_paths} paths: name each of them once"
        )
    records, problems = _read_records(directories[order.index(0)], first)
    if not records:
        raise CheckpointError("no step of the run can be read: " + "; ".join(problems))
    return History(first, records, tuple(problems), order)


def _was_never_begun(directories: Sequence[Path], manifests: Sequence[Path]) -> bool:
    """Whether a run that finished no step ended while its manifests were written, or while it was forgotten.

    Raises
    ------
    CheckpointError
        If a run that did has lost its manifests.
    """
    records = [(path, record) for directory in directories for path, record in _whole_records(directory)]
    for path, record in records:
        if record.step and not manifests:
            raise CheckpointError(
                f"{path} holds step {record.step} of a run, but {path.with_name(MANIFEST_FILE)} is not there: bring it"
                " back, or lose the run with OffloadConfig(overwrite=True)"
            )
    if any(record.step for _, record in records):
        return False
    return not manifests or any(
        all(read_manifest(path).run_id == record.run_id for path in manifests) for _, record in records
    )


def _whole_records(directory: Path) -> Iterator[tuple[Path, StepRecord]]:
    for turn in range(NUM_RECORDS):
        path = record_path(directory, turn)
        with suppress(OSError, CheckpointError):
            yield path, decode(path.read_bytes(), str(path))


def _read_records(directory: Path, manifest: Manifest) -> tuple[dict[int, StepRecord], list[str]]:
    records: dict[int, StepRecord] = {}
    problems = []
    for turn in range(NUM_RECORDS):
        path = record_path(directory, turn)
        try:
            content = path.read_bytes()
            if content and not any(content):
                # Reserved and never used, or given up.
                continue
            record = decode(content, str(path))
            _check_belongs(record, manifest, turn, path)
        except OSError as error:
            problems.append(f"cannot read {path}: {error.strerror}")
        except CheckpointError as error:
            problems.append(str(error))
        else:
            records[record.sequence] = record
    return records, problems


def _check_belongs(record: StepRecord, manifest: Manifest, turn: int, path: Path) -> None:
    if record.run_id != manifest.run_id or record.sequence % NUM_RECORDS != turn:
        raise CheckpointError(f"{path} belongs to another run")
    num_chunks = sum(len(state.chunks) for state in manifest.states)
    if len(record.chunks.slots) != num_chunks:
        raise CheckpointError(f"{path} names {len(record.chunks.slots)} chunks, the manifest {num_chunks}")


def common_step(ranks: Mapping[int, tuple[str, dict[int, int]] | None]) -> tuple[str, int, int] | None:
    """The newest commit that every rank holds: run id, sequence, step. None if there is nothing to go on from. Pure.

    Parameters
    ----------
    ranks : Mapping[int, tuple or None]
        `History.summary` by rank.

    Raises
    ------
    ConfigError
        If only some ranks hold a run with finished steps, or they hold different ones.
    CheckpointError
        If they hold the same run, but no step of it in common.
    """
    held = {rank: summary for rank, summary in ranks.items() if summary is not None}
    finished = {rank: summary for rank, summary in held.items() if max(summary[1].values(), default=0) > 0}
    if not finished:
        return None
    first, (run, _) = next(iter(finished.items()))
    for rank in ranks:
        if rank not in held:
            # Who ends before its first commit forgets the run; others may have written theirs by then. Not all have.
            if all(0 in commits for _, commits in held.values()):
                return None
            raise ConfigError(f"rank {first} holds the files of a run, rank {rank} does not: where are they?")
        if held[rank][0] != run:
            raise ConfigError(f"ranks {first} and {rank} hold the files of different runs")
    common = set.intersection(*(set(commits) for _, commits in held.values()))
    if not common:
        held_by = "; ".join(f"rank {rank}: step {sorted(commits.values())}" for rank, (_, commits) in held.items())
        raise CheckpointError(f"the ranks hold no step in common ({held_by})")
    sequence = max(common)
    step = finished[first][1][sequence]
    return (run, sequence, step) if step else None
