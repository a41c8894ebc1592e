"""The page for people: one file that holds everything, and lets no name become code."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.pages import read_page

from zerooffload import InternalError
from zerooffload.planner.cost import Estimate
from zerooffload.planner.held import Comparison
from zerooffload.telemetry import Lane, Level, Span, Step, StepPicture, StepReport, TierUsage
from zerooffload.train import write_report
from zerooffload.train.html_report import html_report
from zerooffload.train.keeper import HeldRun
from zerooffload.train.loop import StepRecord, TrainingResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerooffload.train.recipe import Recipe

MIB = 1 << 20
EVIL = "</script><img src=x onerror=alert(1)> \"quoted\" 'single' & {{data}} <!--"


def tier(name: str) -> TierUsage:
    return TierUsage(
        name=name, budget_bytes=100 * MIB, planned_bytes=60 * MIB, leased_bytes=50 * MIB, peak_bytes=60 * MIB
    )


def report(step: int) -> StepReport:
    return StepReport(
        step=step,
        seconds=2.0,
        bytes_moved={"nvme_read": 300 * MIB, "nvme_written": 0},
        waits={"state read": 0.5, EVIL: 0.25},
        work={"update kernel": 0.25},
        tiers=(tier("device"), tier("host"), tier("nvme")),
        baseline_bytes=0,
        process_peak_bytes=400 * MIB,
    )


@pytest.fixture
def result(make_recipe: Callable[..., Recipe]) -> TrainingResult:
    steps = [
        StepRecord(step=n, loss=3.0 / n, lr=1e-4, grad_norm=None, seconds=2.0, tokens=64, report=report(n))
        for n in (1, 2, 3)
    ]
    return TrainingResult(
        recipe=make_recipe(), process_peak_bytes=410 * MIB, heldout_before=3.5, heldout_after=2.5, steps=steps
    )


@pytest.fixture
def picture() -> StepPicture:
    """Two seconds from 100 on, in which the drive reads for 1.5."""
    spans = [
        Span(Lane.COMPUTE, "forward layers.0", 100.0, 100.5, thread=""),
        Span(Lane.STALL, EVIL, 100.5, 100.75, thread=""),
        Span(Lane.STALL, "state read", 100.5, 101.0, thread="zerooffload-update"),
        Span(Lane.NVME_READ, "layers.0/float32 optimizer state #0", 100.25, 101.25, 200 * MIB),
        Span(Lane.NVME_READ, "layers.0/float32 parameters #0", 100.5, 101.75, 100 * MIB),
    ]
    levels = {"host": [Level(99.0, "host", 40 * MIB), Level(101.0, "host", 50 * MIB)], "gone": [Level(99.0, "gone", 0)]}
    return StepPicture(Step(report(3), 100.0, 102.0), spans, levels)


def test_it_tells_the_bound_the_bytes_their_rate_and_the_time_by_cause(
    result: TrainingResult, picture: StepPicture
) -> None:
    text = read_page(html_report(result, picture, {})).text
    for words in (
        "The bound was nvme read: busy 75% of the last step", "would take 1.50 s instead of 2.00 s",
        "300 MiB", "0.21 GB/s", "stall: state read", "update kernel", "compute (the model", "3.5000, 2.5000",
        "llama with random weights", "410 MiB",
    ):  # fmt: skip
        assert words in text, words


def test_a_prediction_is_a_section_with_every_figure_and_note(result: TrainingResult, picture: StepPicture) -> None:
    assert "beside its prediction" not in read_page(html_report(result, picture, {})).text
    result.held = HeldRun(
        estimate=Estimate(seconds=0.5, busy={"drive": 0.4}, bytes_moved={}, tokens=64, memory=(), spans=()),
        probe_step=3,
        comparisons=[
            Comparison(name="nvme read", unit="bytes", predicted=0.0, measured=MIB, margin=0.0, cause=EVIL),
            Comparison(name="step", unit="seconds", predicted=0.5, measured=2.0, margin=0.1),
        ],
        notes=[(70, EVIL)],
    )
    html = html_report(result, picture, {})
    text = read_page(html).text
    for words in ("Step 3 beside its prediction", "500.0 ms a step; the bound is drive", "2.00 s", "4.00", "step 70: "):
        assert words in text, words
    assert text.count(EVIL.replace("  ", " ")) >= 2
    assert "<img" not in html
    result.held.comparisons.clear()
    assert "The run ended before a step was compared." in read_page(html_report(result, picture, {})).text


def test_its_data_are_the_lanes_the_memory_and_the_losses(result: TrainingResult, picture: StepPicture) -> None:
    data = read_page(html_report(result, picture, {})).data
    assert [(lane["lane"], len(lane["rows"])) for lane in data["lanes"]] == [
        ("compute", 1),
        ("nvme read", 2),
        ("stall", 1),
        ("stall (update)", 1),
    ]
    (second,) = data["lanes"][1]["rows"][1]
    assert second[:2] == [0.5, 1.25]
    assert (data["names"][second[2]], second[3]) == ("layers.0/float32 parameters #0", 100 * MIB)
    assert len(data["shades"]) == len(data["names"])
    assert data["losses"] == [[1, 3.0], [2, 1.5], [3, 1.0]]
    memory = {level["name"]: level for level in data["memory"]}
    assert set(memory) == {"device", "host", "nvme", "process"}
    assert memory["host"]["budget"] == 100 * MIB
    assert memory["host"]["step"] == [[0.0, 40 * MIB], [1.0, 50 * MIB]]
    assert memory["host"]["run"] == [[1, 50 * MIB], [2, 50 * MIB], [3, 50 * MIB]]
    assert memory["process"]["run"][0] == [1, 400 * MIB]


def test_it_is_one_file_that_fetches_nothing_and_forbids_itself_to(
    result: TrainingResult, picture: StepPicture
) -> None:
    text = html_report(result, picture, {})
    page = read_page(text)
    assert page.fetches == []
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|\bfetch\b|XMLHttpRequest|import\(|innerHTML", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in page.code
    assert set(page.tags).isdisjoint({"link", "img", "iframe", "object", "embed"})


def test_no_name_becomes_markup_or_code(
    result: TrainingResult, picture: StepPicture, make_recipe: Callable[..., Recipe]
) -> None:
    tame = read_page(html_report(result, replace(picture, spans=[]), {}))
    result.recipe = make_recipe(model={"config": {**make_recipe().model.config, "model_type": EVIL}})  # type: ignore[dict-item]
    page = read_page(html_report(result, picture, {"cpu": EVIL}))
    assert EVIL in page.data["names"]
    assert page.text.count(EVIL) >= 3
    # As many scripts and images as without it; the table of lanes has rows now.
    for tag in ("script", "img", "style", "main"):
        assert page.tags.count(tag) == tame.tags.count(tag)
    assert page.code == tame.code


def test_a_page_needs_somebody_who_followed_the_last_step(
    result: TrainingResult, picture: StepPicture, tmp_path: Path
) -> None:
    write_report(tmp_path / "run.HTML", result, picture)
    assert (tmp_path / "run.HTML").read_text().startswith("<!DOCTYPE html>")
    assert [file.name for file in tmp_path.glob("*.HTML*")] == ["run.HTML"]
    with pytest.raises(InternalError, match="nobody followed"):
        write_report(tmp_path / "other.html", result)


def test_lanes_that_are_not_whole_say_so(result: TrainingResult, picture: StepPicture) -> None:
    text = read_page(html_report(result, replace(picture, num_left_out=17), {})).text
    assert "17 spans were too many" in text


def test_a_step_in_which_nothing_was_seen_has_no_bound(result: TrainingResult, picture: StepPicture) -> None:
    text = read_page(html_report(result, replace(picture, spans=[], levels={}), {})).text
    assert "Nothing was seen to be busy." in text
