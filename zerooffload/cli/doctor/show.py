"""The doctor's findings as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerooffload.cli.doctor.finding import Finding, Verdict
from zerooffload.cli.doctor.hardware import hardware_findings
from zerooffload.cli.doctor.kept_runs import kept_run_findings
from zerooffload.cli.doctor.profile import profile_findings
from zerooffload.cli.doctor.software import software_findings
from zerooffload.cli.doctor.storage import storage_findings

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "red"}


def findings(paths: Sequence[Path], kept: Sequence[Path]) -> Iterator[Finding]:
    """All of them; of runs in `kept` nothing else."""
    if kept:
        yield from kept_run_findings(kept)
        return
    yield from software_findings()
    yield from hardware_findings()
    yield from profile_findings(paths)
    for path in paths:
        yield from storage_findings(path)


def print_findings(paths: Sequence[Path], kept: Sequence[Path], *, as_json: bool) -> bool:
    """Print them; whether there is a problem."""
    found = list(findings(paths, kept))
    has_problem = any(finding.verdict is Verdict.PROBLEM for finding in found)
    if as_json:
        print(json.dumps({"ok": not has_problem, "findings": [dataclasses.asdict(item) for item in found]}, indent=1))
        return has_problem
    Console().print(_table(found))
    return has_problem


def _table(found: Iterable[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in found:
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        table.add_row(Text(finding.subject), verdict, Text(finding.value))
        if finding.advice:
            table.add_row("", "", Text(finding.advice, style="italic"))
    return table
