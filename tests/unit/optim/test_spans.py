from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zerooffload.optim.spans import Span, cut, make_spans
from zerooffload.sharding.layout import ParamSpec, Slot

Settings = list[str | None]


@st.composite
def slots_and_settings(draw: st.DrawFn) -> tuple[list[Slot], Settings]:
    slots, position = [], 0
    for number, (gap, numel) in enumerate(draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=8))):
        slots.append(Slot(ParamSpec(f"p{number}", (numel,)), position + gap))
        position += gap + numel
    settings = draw(st.lists(st.sampled_from(["a", "b", None]), min_size=len(slots), max_size=len(slots)))
    return slots, settings


def by_element(spans: list[Span[str]]) -> dict[int, str]:
    elements: dict[int, str] = {}
    for span in spans:
        for element in range(span.start, span.stop):
            assert element not in elements
            elements[element] = span.settings
    return elements


@given(slots_and_settings())
def test_spans_update_exactly_the_elements_of_parameters_with_settings(given_: tuple[list[Slot], Settings]) -> None:
    slots, settings = given_
    expected = {
        element: setting
        for slot, setting in zip(slots, settings, strict=True)
        if setting is not None
        for element in range(slot.start, slot.stop)
    }
    assert by_element(make_spans(slots, settings)) == expected


@given(slots_and_settings())
def test_spans_are_as_few_as_possible(given_: tuple[list[Slot], Settings]) -> None:
    spans = make_spans(*given_)
    assert all(span.start < span.stop for span in spans)
    for left, right in pairwise(spans):
        assert left.stop < right.start or (left.stop == right.start and left.settings != right.settings)


@given(slots_and_settings(), st.integers(1, 11))
def test_cutting_by_chunks_loses_and_doubles_nothing(given_: tuple[list[Slot], Settings], chunk_numel: int) -> None:
    spans = make_spans(*given_)
    end = max((span.stop for span in spans), default=0)
    found: dict[int, str] = {}
    for start in range(0, end, chunk_numel):
        inside = cut(spans, start, start + chunk_numel)
        assert all(0 <= span.start < span.stop <= chunk_numel for span in inside)
        found |= {start + element: setting for element, setting in by_element(inside).items()}
    assert found == by_element(spans)
