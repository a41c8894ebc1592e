from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerooffload.tiers import FILE_ALIGNMENT_BYTES, Part, RecordLayout

PARTS = {
    "fp32 parameter": (Part("param", torch.float32),),
    "bf16 gradient": (Part("grad", torch.bfloat16),),
    "fp32 optimizer": (Part("exp_avg", torch.float32), Part("exp_avg_sq", torch.float32)),
    "bf16 optimizer": (
        Part("remainder", torch.int16),
        Part("exp_avg", torch.float32),
        Part("exp_avg_sq", torch.float32),
    ),
}

layouts = st.builds(
    RecordLayout,
    st.sampled_from(list(PARTS.values())),
    st.integers(0, 40_000),
    st.integers(1, 3).map(lambda n: n * 4096),
    st.builds(lambda first, num: range(first, first + num), st.integers(0, 3), st.integers(1, 3)),
)


@given(layouts)
def test_chunks_cover_the_shards_once_and_in_order(layout: RecordLayout) -> None:
    position = layout.shards.start * layout.shard_numel
    for chunk in layout.chunks:
        start, stop = layout.chunk_range(chunk)
        assert start == position < stop
        assert stop - start <= layout.chunk_numel
        # None reaches from one shard into the next.
        assert start // layout.shard_numel == (stop - 1) // layout.shard_numel
        position = stop
    assert position == layout.shards.stop * layout.shard_numel
    assert layout.numel == len(layout.shards) * layout.shard_numel


@given(layouts)
def test_a_chunk_has_the_same_number_in_a_block_of_all_shards(layout: RecordLayout) -> None:
    whole = replace(layout, shards=range(6))
    assert whole.chunks_of(layout.shards) == layout.chunks
    for chunk in layout.chunks:
        assert whole.chunk_range(chunk) == layout.chunk_range(chunk)
        assert whole.record_nbytes(chunk) == layout.record_nbytes(chunk)


@given(layouts)
def test_records_lie_one_behind_the_other_in_memory_and_padded_on_file(layout: RecordLayout) -> None:
    offset = 0
    for chunk in layout.chunks:
        assert layout.record_offset(chunk) == offset
        offset += layout.record_nbytes(chunk)
        assert layout.file_nbytes(chunk) % FILE_ALIGNMENT_BYTES == 0
        assert 0 <= layout.file_nbytes(chunk) - layout.record_nbytes(chunk) < FILE_ALIGNMENT_BYTES
        assert layout.file_nbytes(chunk) <= layout.largest_file_nbytes
    assert layout.memory_nbytes == offset
    assert layout.total_file_nbytes == sum(layout.file_nbytes(chunk) for chunk in layout.chunks)


@given(layouts)
def test_the_parts_of_a_record_are_aligned_disjoint_and_all_of_the_chunk(layout: RecordLayout) -> None:
    for chunk in layout.chunks:
        record = torch.zeros(layout.file_nbytes(chunk), dtype=torch.uint8)
        views = layout.split(chunk, record)
        start, stop = layout.chunk_range(chunk)
        assert list(views) == [part.name for part in layout.parts]
        for part in layout.parts:
            view = views[part.name]
            assert (view.dtype, view.shape) == (part.dtype, (stop - start,))
            assert (view.data_ptr() - record.data_ptr()) % 64 == 0
            view.view(torch.uint8).add_(1)
        # An overlap would have been counted twice; the rest is padding.
        payload = (stop - start) * sum(part.dtype.itemsize for part in layout.parts)
        assert int(record.sum()) == payload
        assert int(record.max()) == 1


@pytest.mark.parametrize("kind", ["fp32 parameter", "bf16 gradient"])
def test_full_chunks_of_one_part_need_no_padding(kind: str) -> None:
    layout = RecordLayout(PARTS[kind], 3 * 4096, 4096)
    assert layout.total_file_nbytes == layout.memory_nbytes == 3 * 4096 * PARTS[kind][0].dtype.itemsize


def test_an_empty_shard_has_no_chunks_and_takes_nothing() -> None:
    layout = RecordLayout(PARTS["bf16 optimizer"], 0, 4096)
    assert (layout.num_chunks, layout.memory_nbytes, layout.total_file_nbytes, layout.largest_file_nbytes) == (0,) * 4
