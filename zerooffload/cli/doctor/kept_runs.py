"""Findings about runs that were left on nvme paths: whether everything that they committed is as it was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from zerooffload.aio import choose_engine
from zerooffload.cli.doctor.finding import Finding, Verdict
from zerooffload.errors import ConfigError
from zerooffload.formats import format_bytes
from zerooffload.journal.verification import Verified, verify
from zerooffload.tiers import RunDirectory
from zerooffload.tiers.directory import rank_directories


def kept_run_findings(paths: Sequence[Path]) -> Iterator[Finding]:
    """One for each rank; `paths` are all the nvme paths of the run."""
    ranks = sorted({rank for path in paths for rank in rank_directories(path)})
    where = ", ".join(str(path) for path in paths)
    if not ranks:
        yield Finding(f"run in {where}", "none", Verdict.NOTE, "name the nvme_paths that the run was given")
    for rank in ranks:
        subject = f"run in {where}, rank {rank}"
        try:
            yield from _findings(subject, _verified(paths, rank))
        except ConfigError as error:
            yield Finding(subject, str(error), Verdict.PROBLEM, "end the run that uses it, then verify again")


def _verified(paths: Sequence[Path], rank: int) -> Verified:
    engine = choose_engine().engine
    try:
        with ExitStack() as locked:
            directories = []
            for path in paths:
                directory = RunDirectory(path, rank)
                locked.callback(directory.close)
                directories.append(directory.path)
            return verify(directories, engine)
    finally:
        engine.close()


def _findings(subject: str, found: Verified) -> Iterator[Finding]:
    for problem in found.problems:
        yield Finding(subject, problem, Verdict.PROBLEM, "restore the file from a copy, or resume from a checkpoint")
    if found.step is None:
        if not found.problems:
            yield Finding(subject, "nothing was committed", Verdict.NOTE)
        return
    value = f"step {found.step}: {found.num_chunks} chunks, {format_bytes(found.nbytes)} compared"
    yield Finding(subject, value, Verdict.PROBLEM if found.problems else Verdict.OK)
