from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerooffload.sharding.layout import (
    SHARD_ALIGNMENT_BYTES,
    SLOT_ALIGNMENT_BYTES,
    FlatLayout,
    ParamSpec,
    lay_out,
    slot_alignment_numel,
)

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex128])
world_sizes = st.integers(1, 5)


@st.composite
def flat_layouts(draw: st.DrawFn) -> FlatLayout:
    params = [ParamSpec(f"p{number}", shape) for number, shape in enumerate(draw(shapes))]
    return lay_out("unit", params, dtype=draw(dtypes), trainable=True, world_size=draw(world_sizes))


@given(flat_layouts())
def test_every_parameter_has_a_place_of_its_size_on_an_aligned_start(layout: FlatLayout) -> None:
    for slot in layout.slots:
        assert slot.stop - slot.start == slot.param.numel == math.prod(slot.param.shape)
        assert slot.start * layout.dtype.itemsize % SLOT_ALIGNMENT_BYTES == 0
        assert 0 <= slot.start <= slot.stop <= layout.numel


@given(flat_layouts())
def test_slots_and_gaps_tile_the_buffer(layout: FlatLayout) -> None:
    pieces = sorted([(slot.start, slot.stop) for slot in layout.slots if slot.param.numel] + layout.gaps())
    position = 0
    for start, stop in pieces:
        assert start == position
        assert stop > start
        position = stop
    assert position == layout.numel


@given(flat_layouts())
def test_shards_are_of_one_length_and_aligned(layout: FlatLayout) -> None:
    assert layout.shard_numel * layout.world_size == layout.numel
    alignment = SHARD_ALIGNMENT_BYTES if layout.world_size > 1 else SLOT_ALIGNMENT_BYTES
    assert layout.shard_nbytes == layout.shard_numel * layout.dtype.itemsize
    assert layout.shard_nbytes % alignment == 0
    assert layout.nbytes == layout.numel * layout.dtype.itemsize


@given(flat_layouts())
def test_padding_is_less_than_an_alignment_for_each_parameter_and_shard(layout: FlatLayout) -> None:
    used = sum(slot.param.numel for slot in layout.slots)
    shard_alignment = SHARD_ALIGNMENT_BYTES if layout.world_size > 1 else SLOT_ALIGNMENT_BYTES
    most = SLOT_ALIGNMENT_BYTES * len(layout.slots) + shard_alignment * layout.world_size
    assert layout.nbytes - used * layout.dtype.itemsize < most + layout.world_size * layout.dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "numel"), [(torch.float32, 16), (torch.bfloat16, 32), (torch.int8, 64), (torch.float64, 8)]
)
def test_the_alignment_is_64_bytes_in_elements(dtype: torch.dtype, numel: int) -> None:
    assert slot_alignment_numel(dtype) == numel


def test_parameters_lie_in_the_order_given() -> None:
    params = [ParamSpec("b", (3,)), ParamSpec("a", (20,), ("tied",)), ParamSpec("c", ())]
    layout = lay_out("unit", params, dtype=torch.float32, trainable=False)
    assert [(slot.param.name, slot.start) for slot in layout.slots] == [("b", 0), ("a", 16), ("c", 48)]
    assert layout.gaps() == [(3, 16), (36, 48), (49, 64)]
    assert not layout.trainable


def test_a_layout_without_parameters_is_empty() -> None:
    layout = lay_out("unit", [], dtype=torch.float32, trainable=True, world_size=3)
    assert (layout.numel, layout.nbytes, layout.gaps()) == (0, 0, [])
