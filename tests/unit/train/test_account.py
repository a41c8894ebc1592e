from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from zerooffload import ConfigError
from zerooffload.planner.activations import ActivationForecast
from zerooffload.planner.cost import Estimate
from zerooffload.planner.held import Comparison
from zerooffload.telemetry import StepReport, TierUsage
from zerooffload.train import write_report
from zerooffload.train.keeper import HeldRun
from zerooffload.train.loop import StepRecord, TrainingResult
from zerooffload.train.progress import ProgressBar
from zerooffload.train.report import run_report
from zerooffload.train.summary import memory_account, print_summary, seconds_by_cause, settled_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerooffload.train.recipe import Recipe

MIB = 1 << 20


def tier(name: str, planned_mib: int) -> TierUsage:
    planned = planned_mib * MIB
    return TierUsage(
        name=name, budget_bytes=1000 * MIB, planned_bytes=planned, leased_bytes=planned, peak_bytes=planned
    )


def step(number: int, seconds: float) -> StepRecord:
    report = StepReport(
        step=number,
        seconds=seconds,
        bytes_moved={"nvme_read": 3 * MIB, "nvme_written": 2 * MIB, "copy_in": 0, "copy_out": 0},
        waits={"state read": 0.5},
        work={"update kernel": 0.25},
        tiers=(tier("device", 10), tier("host", 100), tier("nvme", 400)),
        baseline_bytes=200 * MIB,
        process_peak_bytes=350 * MIB,
    )
    return StepRecord(step=number, loss=3.0 - number, lr=1e-4, grad_norm=None, seconds=2.0, tokens=64, report=report)


@pytest.fixture
def result(make_recipe: Callable[..., Recipe]) -> TrainingResult:
    """Three steps; the first report covers ten seconds of evaluation too."""
    return TrainingResult(
        recipe=make_recipe(),
        activations=ActivationForecast(peak_bytes=50 * MIB, saved_bytes=40 * MIB),
        baseline_bytes=200 * MIB,
        process_peak_bytes=353 * MIB,
        heldout_before=3.5,
        heldout_after=3.0,
        steps=[step(1, 12.0), step(2, 2.0), step(3, 2.0)],
    )


def test_the_account_has_three_lines_and_what_it_came_to(result: TrainingResult) -> None:
    account = memory_account(result)
    assert (account.baseline_bytes, account.leased_bytes, account.activations_bytes) == (
        200 * MIB,
        100 * MIB,
        50 * MIB,
    )
    assert (account.expected_growth_bytes, account.growth_bytes) == (150 * MIB, 153 * MIB)


def test_activations_on_a_device_are_not_in_host_memory(result: TrainingResult) -> None:
    result.computes_on_host = False
    assert memory_account(result).activations_bytes == 0


def test_time_is_split_by_cause_and_adds_up(result: TrainingResult) -> None:
    seconds = seconds_by_cause(settled_steps(result.steps))
    assert seconds == {"compute": 2.5, "state read": 1.0, "update kernel": 0.5}
    assert sum(seconds.values()) == 4.0


def test_a_single_step_is_settled_enough(result: TrainingResult) -> None:
    assert settled_steps(result.steps[:1]) == result.steps[:1]


def test_the_report_holds_what_programs_ask_for(result: TrainingResult, tmp_path: Path) -> None:
    write_report(tmp_path / "report.json", result)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [file.name for file in tmp_path.glob("*.json*")] == ["report.json"]
    assert report == json.loads(json.dumps(run_report(result)))
    assert (report["steps"], report["losses"]) == (3, [2.0, 1.0, 0.0])
    assert (report["heldout_loss_before"], report["heldout_loss_after"]) == (3.5, 3.0)
    assert report["tokens_per_second"] == 32.0
    assert report["peak_bytes"] == {
        "device": 10 * MIB, "host": 100 * MIB, "nvme": 400 * MIB, "process": 353 * MIB
    }  # fmt: skip
    assert (report["nvme_read_bytes"], report["nvme_written_bytes"]) == (9 * MIB, 6 * MIB)
    assert report["seconds"] == {"compute": 2.5, "state read": 1.0, "update kernel": 0.5}
    assert report["machine"]["torch"]
    assert report["recipe"]["training"]["steps"] == 3


@pytest.fixture
def held(result: TrainingResult) -> HeldRun:
    """A prediction of which two figures have been compared, one of them in vain."""
    result.held = HeldRun(
        estimate=Estimate(seconds=0.5, busy={"drive": 0.4}, bytes_moved={}, tokens=64, memory=(), spans=()),
        probe_step=3,
        comparisons=[
            Comparison(name="host, leased", unit="bytes", predicted=MIB, measured=MIB, margin=0),
            Comparison(name="step", unit="seconds", predicted=0.5, measured=2.0, margin=0.1, cause="most is <b>drive"),
        ],
        notes=[(70, "steps take 2.00 s & more")],
    )
    return result.held


def test_a_prediction_stands_beside_what_was_measured(result: TrainingResult, held: HeldRun) -> None:
    text = shown(lambda console: print_summary(console, result))
    assert "Step 3 beside its prediction" in text
    assert "500.0 ms" in text
    assert "4.00" in text
    assert json.loads(json.dumps(run_report(result)))["prediction"] == {
        "step_seconds": 0.5,
        "tokens_per_second": 128.0,
        "bound": "drive",
        "probe_step": 3,
        "figures": [
            {
                "name": "host, leased", "unit": "bytes", "predicted": MIB, "measured": MIB, "margin": 0, "cause": "",
                "is_outside": False,
            },
            {
                "name": "step", "unit": "seconds", "predicted": 0.5, "measured": 2.0, "margin": 0.1,
                "cause": "most is <b>drive", "is_outside": True,
            },
        ],
        "notes": [{"step": 70, "text": "steps take 2.00 s & more"}],
    }  # fmt: skip
    held.comparisons.clear()
    assert "beside its prediction" not in shown(lambda console: print_summary(console, result))


def test_where_nothing_was_predicted_the_report_says_nothing_of_it(result: TrainingResult) -> None:
    assert run_report(result)["prediction"] is None
    assert "beside its prediction" not in shown(lambda console: print_summary(console, result))


def test_a_report_that_cannot_be_written_is_told(result: TrainingResult, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the report"):
        write_report(tmp_path / "nowhere" / "report.json", result)


def shown(draw: Callable[[Console], None], *, terminal: bool = False) -> str:
    stream = io.StringIO()
    draw(Console(file=stream, force_terminal=terminal, width=120, color_system=None))
    return stream.getvalue()


def test_the_tables_show_each_tier_the_account_and_the_time(result: TrainingResult) -> None:
    text = shown(lambda console: print_summary(console, result))
    for words in (
        "nvme", "1000 MiB", "400 MiB", "baseline", "200 MiB", "leased", "100 MiB", "activations", "50.00 MiB", "+2.0%",
        "wait: state read", "update kernel", "compute", "mean of 2",
    ):  # fmt: skip
        assert words in text, words


def test_without_a_terminal_each_step_is_a_line(result: TrainingResult) -> None:
    def draw(console: Console) -> None:
        with ProgressBar(console) as bar:
            bar.announced(result)
            for record in result.steps:
                bar.finished_step(record)

    text = shown(draw)
    assert "step 1/3 | loss 2.0000 | 32 tokens/s | 5.00 MiB moved | 2.00 MiB written a step | 4.00 s left" in text
    assert "step 3/3 | loss 0.0000 | 32 tokens/s | 15.00 MiB moved" in text


def test_on_a_terminal_a_bar_shows_the_same(result: TrainingResult) -> None:
    def draw(console: Console) -> None:
        with ProgressBar(console) as bar:
            bar.announced(result)
            for record in result.steps:
                bar.finished_step(record)
            bar.evaluated("after training", 3.0)

    text = shown(draw, terminal=True)
    for words in ("3/3", "loss 0.0000", "32 tokens/s", "15.00 MiB moved", "held-out loss after training: 3.0000"):
        assert words in text, words
