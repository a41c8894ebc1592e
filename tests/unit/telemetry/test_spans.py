from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from zerooffload.telemetry import Lane, Span
from zerooffload.telemetry.spans import Rows, busy_seconds, by_lane, innermost, within


def span(begin: float, end: float, lane: Lane = Lane.COMPUTE, name: str = "x", nbytes: int = 0) -> Span:
    return Span(lane, name, begin, end, nbytes, "")


def times(spans: list[Span]) -> list[tuple[str, float, float]]:
    return sorted((item.name, item.begin_seconds, item.end_seconds) for item in spans)


def nested(depth: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Intervals of which any two are apart or one in the other, as the blocks of a thread are."""

    def build(draw: st.DrawFn, begin: int, end: int, left: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        while left and end - begin >= 2 and draw(st.booleans()):
            inner = draw(st.integers(begin, end - 1))
            inner_end = draw(st.integers(inner + 1, end))
            found += [(inner, inner_end), *build(draw, inner, inner_end, left - 1)]
            begin = inner_end
        return found

    return st.composite(lambda draw: build(draw, 0, 60, depth))()


def test_the_time_of_a_span_without_those_inside_it_is_its_own() -> None:
    outer = span(0, 10, name="backward", nbytes=7)
    work, wait = span(2, 8, Lane.CPU_UPDATE, "accumulate"), span(3, 5, Lane.STALL, "wait")
    assert times(innermost([wait, work, outer])) == [
        ("accumulate", 2, 3),
        ("accumulate", 5, 8),
        ("backward", 0, 2),
        ("backward", 8, 10),
        ("wait", 3, 5),
    ]
    assert [piece.nbytes for piece in innermost([wait, work, outer]) if piece.name == "backward"] == [7, 0]


def test_spans_that_touch_stay_as_they_are() -> None:
    spans = [span(0, 1, name="a"), span(1, 2, name="b"), span(2, 2.5, name="c")]
    assert times(innermost(spans)) == times(spans)


@given(nested(3))
def test_each_moment_is_that_of_one_piece_and_none_is_lost(intervals: list[tuple[int, int]]) -> None:
    spans = [span(begin, end, name=str(number)) for number, (begin, end) in enumerate(intervals)]
    pieces = innermost(spans)
    covered = [sum(piece.begin_seconds <= t < piece.end_seconds for piece in pieces) for t in range(60)]
    inside = [any(item.begin_seconds <= t < item.end_seconds for item in spans) for t in range(60)]
    assert covered == [int(is_inside) for is_inside in inside]
    assert busy_seconds(pieces) == busy_seconds(spans)


def test_busy_is_the_time_in_which_at_least_one_took_place() -> None:
    assert busy_seconds([]) == 0
    assert busy_seconds([span(5, 6), span(0, 2), span(1, 3), span(1, 1.5)]) == 4


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=30), st.integers(1, 30))
def test_rows_hold_spans_that_are_apart_also_those_that_come_late(drawn: list[tuple[int, int]], batch: int) -> None:
    spans = [span(begin, begin + length) for begin, length in drawn]
    rows = Rows()
    placed: dict[int, list[Span]] = {}
    for first in range(0, len(spans), batch):
        for row, item in rows.place(spans[first : first + batch]):
            placed.setdefault(row, []).append(item)
    assert sum(len(row) for row in placed.values()) == len(spans)
    for row in placed.values():
        for one, other in itertools.pairwise(row):
            assert one.end_seconds <= other.begin_seconds


def test_what_is_apart_shares_a_row() -> None:
    assert {row for row, _ in Rows().place([span(4, 5), span(0, 1), span(1, 3)])} == {0}


def test_spans_are_cut_at_the_ends_of_a_step() -> None:
    spans = [span(0, 4), span(4, 6), span(5, 9), span(9, 10)]
    assert times(list(within(spans, 3, 8))) == [("x", 3, 4), ("x", 4, 6), ("x", 5, 8)]


def test_lanes_come_in_their_order() -> None:
    spans = [span(0, 1, Lane.STALL), span(0, 1, Lane.NVME_READ), span(2, 3, Lane.STALL)]
    assert [(lane, len(found)) for lane, found in by_lane(spans).items()] == [(Lane.NVME_READ, 1), (Lane.STALL, 2)]
