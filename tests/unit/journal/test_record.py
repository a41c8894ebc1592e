from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from zerooffload import CheckpointError
from zerooffload.journal.record import StepRecord, decode, fixed_nbytes
from zerooffload.tiers import SlotState

RUN_ID = bytes(range(16))


def record(num_chunks: int = 3, *, step: int = 5, state: object = None) -> StepRecord:
    slots = np.arange(num_chunks, dtype=np.uint8) % 2
    return StepRecord(RUN_ID, 6, step, SlotState(slots, np.arange(num_chunks, dtype=np.uint64) + 2**63), state)


def same(one: StepRecord, other: StepRecord) -> bool:
    return (one.run_id, one.sequence, one.step, one.state) == (
        other.run_id,
        other.sequence,
        other.step,
        other.state,
    ) and all(np.array_equal(getattr(one.chunks, name), getattr(other.chunks, name)) for name in ("slots", "checksums"))


@given(
    st.integers(0, 40),
    st.integers(0, 2**64 - 1),
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    ),
    st.integers(0, 100),
)
def test_what_was_encoded_is_decoded(num_chunks: int, step: int, state: object, num_zeros: int) -> None:
    written = record(num_chunks, step=step, state=state)
    content = written.encode()
    assert len(content) >= fixed_nbytes(num_chunks)
    assert same(decode(content + bytes(num_zeros), "file"), written)


def test_the_layout_is_the_documented_one() -> None:
    """By hand: what is on drives must be read by later versions."""
    content = record(9, state={"a": 1}).encode()
    magic, version, header_nbytes, run_id, sequence, step, payload_nbytes, checksum = struct.unpack_from(
        "<8sII16sQQQQ", content
    )
    assert (magic, version, header_nbytes, run_id, sequence, step) == (b"ZOCOMMIT", 1, 64, RUN_ID, 6, 5)
    assert payload_nbytes == len(content) - 64
    assert checksum == xxhash.xxh3_64_intdigest(content[:56] + bytes(8) + content[64:])
    assert content[64:72] == (9).to_bytes(8, "little")
    assert content[72:88] == bytes([0, 1, 0, 1, 0, 1, 0, 1, 0]) + bytes(7)
    assert struct.unpack_from("<9Q", content, 88) == tuple(2**63 + index for index in range(9))
    assert content[160:] == b'{"a":1}'


def test_any_flipped_bit_is_found() -> None:
    content = record(3, state=[1, 2]).encode() + bytes(16)
    for position in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CheckpointError, match="the file"):
            decode(bytes(damaged), "the file")


def test_any_cut_is_found() -> None:
    content = record(3, state=[1, 2]).encode()
    for length in range(len(content)):
        with pytest.raises(CheckpointError, match="the file"):
            decode(content[:length], "the file")
        with pytest.raises(CheckpointError, match="the file"):
            decode(content[:length].ljust(len(content) + 4096, b"\0"), "the file")


def test_messages_say_what_is_wrong() -> None:
    content = record().encode()
    for damaged, what in (
        (b"", "0 bytes: too few"),
        (b"X" + content[1:], "does not begin like one"),
        (content[:8] + (2).to_bytes(4, "little") + content[12:], "format version 2"),
        (content[:-1], "is cut off"),
        (content + b"x", "is damaged"),
    ):
        with pytest.raises(CheckpointError, match=what):
            decode(damaged, "the file")


def test_a_slot_that_no_chunk_has() -> None:
    written = record()
    written.chunks.slots[1] = 2
    with pytest.raises(CheckpointError, match="names a slot that no chunk has"):
        decode(written.encode(), "the file")
