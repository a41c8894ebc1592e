from __future__ import annotations

from typing import TYPE_CHECKING

from zerooffload.telemetry import Batch, Lane, LastStep, Level, Span, Step, StepReport

if TYPE_CHECKING:
    from collections.abc import Callable


def span(begin: float, end: float, lane: Lane, nbytes: int = 0) -> Span:
    return Span(lane, "x", begin, end, nbytes)


def test_before_a_step_has_ended_there_is_no_picture() -> None:
    last = LastStep()
    assert last.took(Batch([span(0, 1, Lane.STALL)], []))
    assert last.picture() is None


def test_it_is_the_last_step_with_what_is_known_of_it_later(make_report: Callable[..., StepReport]) -> None:
    last = LastStep()
    first = Batch([span(0, 1, Lane.COMPUTE)], [Level(0, "host", 1), Level(1, "host", 2)], Step(make_report(1), 0, 2))
    second = Batch(
        [span(1.5, 2.5, Lane.COMPUTE), span(3, 4, Lane.STALL)],
        [Level(3, "host", 3), Level(3, "nvme", 9)],
        Step(make_report(2), 2, 5),
    )
    rest = Batch([span(4, 9, Lane.NVME_WRITE), span(6, 7, Lane.COMPUTE)], [Level(6, "host", 4)])
    for batch in (first, second, rest):
        assert last.took(batch)
    picture = last.picture()
    assert picture is not None
    assert (picture.step.report.step, picture.seconds) == (2, 3)
    assert [(item.lane, item.begin_seconds, item.end_seconds) for item in picture.spans] == [
        (Lane.COMPUTE, 2, 2.5),
        (Lane.STALL, 3, 4),
        (Lane.NVME_WRITE, 4, 5),
    ]
    assert {name: [level.nbytes for level in levels] for name, levels in picture.levels.items()} == {
        "host": [2, 3],
        "nvme": [9],
    }


def test_the_bound_is_the_lane_that_was_busiest_and_no_stall(make_report: Callable[..., StepReport]) -> None:
    last = LastStep()
    spans = [
        span(-1, 2, Lane.NVME_READ, 9),
        span(0.5, 4, Lane.NVME_READ, 100),
        span(1, 5, Lane.NVME_READ, 100),
        span(0, 4.5, Lane.COMPUTE),
        span(0, 10, Lane.STALL),
    ]
    last.took(Batch(spans, [], Step(make_report(1), 0, 10)))
    picture = last.picture()
    assert picture is not None
    bound = picture.bound()
    assert bound is not None
    assert (bound.lane, bound.busy_seconds, bound.nbytes, bound.bytes_per_second) == (Lane.NVME_READ, 5, 200, 40)
    assert [(use.lane, use.busy_seconds, use.bytes_per_second) for use in picture.uses()] == [
        (Lane.COMPUTE, 4.5, None),
        (Lane.NVME_READ, 5, 40),
    ]


def test_a_long_rest_is_not_kept(make_report: Callable[..., StepReport]) -> None:
    last = LastStep()
    last.took(Batch([], [], Step(make_report(1), 0, 1)))
    many = [span(0.5, 0.6, Lane.STALL)] * 60_000
    for _ in range(3):
        last.took(Batch(many, []))
    picture = last.picture()
    assert picture is not None
    assert (len(picture.spans), picture.num_left_out) == (100_000, 80_000)
