from __future__ import annotations

import itertools

import pytest
import torch

from zerooffload.checkpoint.boxes import Box, boxes_in, boxes_of

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_range_is_cut_into_few_boxes_that_follow_each_other(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations(range(numbers.numel() + 1), 2):
        boxes = list(boxes_of(shape, start, stop))
        assert all(box.is_inside for box in boxes)
        found = [numbers[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] for box in boxes]
        assert torch.cat([piece.flatten() for piece in found]).tolist() == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_runs_of_a_box_are_its_elements(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    edges = [[(low, high) for low in range(length) for high in range(low + 1, length + 1)] for length in shape]
    for chosen in itertools.product(*edges):
        box = Box(shape, tuple(low for low, _ in chosen), tuple(high - low for low, high in chosen))
        elements = numbers[tuple(slice(low, high) for low, high in chosen)].flatten()
        for start, stop in [(0, numbers.numel()), (1, numbers.numel()), (2, 5)]:
            found = {}
            for first, in_box, numel in box.runs(start, stop):
                found |= {first + step: int(elements[in_box + step]) for step in range(numel)}
            inside = [element for element in elements.tolist() if start <= element < stop]
            assert found == {element: element for element in inside}
            assert list(found) == inside


@pytest.mark.parametrize("shape", SHAPES)
def test_the_elements_of_a_box_have_places(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    edges = [[(low, high) for low in range(length) for high in range(low + 1, length + 1)] for length in shape]
    for chosen in itertools.product(*edges):
        box = Box(shape, tuple(low for low, _ in chosen), tuple(high - low for low, high in chosen))
        elements = numbers[tuple(slice(low, high) for low, high in chosen)].flatten().tolist()
        for start, stop in [(0, len(elements)), (1, len(elements)), (0, 0), (len(elements) // 2, len(elements))]:
            found = [
                (in_box + step, first + step)
                for first, in_box, numel in box.places(start, stop)
                for step in range(numel)
            ]
            assert found == [(number, elements[number]) for number in range(start, stop)]


def test_boxes_in_a_box_are_those_of_the_tensor() -> None:
    numbers = torch.arange(60).view(3, 4, 5)
    outer = Box((3, 4, 5), (1, 0, 2), (2, 4, 3))
    elements = numbers[1:, :, 2:].flatten().tolist()
    for start, stop in itertools.combinations(range(outer.numel + 1), 2):
        boxes = list(boxes_in(outer, start, stop))
        assert all(box.is_inside for box in boxes)
        found = [numbers[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] for box in boxes]
        assert torch.cat([piece.flatten() for piece in found]).tolist() == elements[start:stop]


def test_boxes_overlap_where_they_share_an_element() -> None:
    shape = (3, 4)
    edges = [[(low, high) for low in range(length + 1) for high in range(low, length + 1)] for length in shape]
    boxes = [
        Box(shape, tuple(low for low, _ in chosen), tuple(high - low for low, high in chosen))
        for chosen in itertools.product(*edges)
    ]
    elements = {box: {first + step for first, _, n in box.runs(0, 12) for step in range(n)} for box in boxes}
    for one, other in itertools.product(boxes, boxes):
        assert one.overlaps(other) == bool(elements[one] & elements[other])


def test_an_empty_box_has_no_runs() -> None:
    assert list(Box((3, 4), (3, 0), (0, 4)).runs(0, 12)) == []


@pytest.mark.parametrize(("offsets", "sizes"), [((0,), (3,)), ((2, 0), (2, 4)), ((-1, 0), (1, 4))])
def test_a_box_of_another_tensor_is_told(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    assert not Box((3, 4), offsets, sizes).is_inside
