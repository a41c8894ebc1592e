"""One committed step as bytes. Pure.

header, 64 bytes, little-endian: magic "ZOCOMMIT", format version u32, header bytes u32, run id 16 bytes,
    sequence u64, step u64, payload bytes u64, XXH3-64 of everything else up to the end of the payload u64
payload: number of kept chunks u64; their slots u8 each, padded with zeros to 8 bytes; their checksums u64 each;
    the state of the run as JSON, UTF-8
zeros up to the end of the file
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from zerooffload.errors import CheckpointError
from zerooffload.formats import round_up
from zerooffload.tiers import SlotState

MAGIC = b"ZOCOMMIT"
FORMAT_VERSION = 1

_HEADER = struct.Struct("<8sII16sQQQQ")
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True)
class StepRecord:
    """A step of one rank.

    Attributes
    ----------
    run_id : bytes
        16 bytes: the same in all files of a run.
    sequence : int
        Commits of the run so far; 0 for the initial states. Decides which of the two files it is in.
    step : int
        Finished calls of `optimizer.step()`.
    chunks : SlotState
    state : Any
        A JSON value.
    """

    run_id: bytes
    sequence: int
    step: int
    chunks: SlotState
    state: Any

    def encode(self) -> bytes:
        """Header and payload."""
        slots = self.chunks.slots.astype("<u1").tobytes()
        payload = b"".join(
            (
                _COUNT.pack(len(slots)),
                slots.ljust(round_up(len(slots), 8), b"\0"),
                self.chunks.checksums.astype("<u8").tobytes(),
                json.dumps(self.state, separators=(",", ":"), allow_nan=False).encode(),
            )
        )
        header = self._header(len(payload), 0)
        return self._header(len(payload), xxhash.xxh3_64_intdigest(header + payload)) + payload

    def _header(self, payload_nbytes: int, checksum: int) -> bytes:
        return _HEADER.pack(
            MAGIC, FORMAT_VERSION, _HEADER.size, self.run_id, self.sequence, self.step, payload_nbytes, checksum
        )


def fixed_nbytes(num_chunks: int) -> int:
    """Bytes of a record without its JSON."""
    return _HEADER.size + _COUNT.size + round_up(num_chunks, 8) + 8 * num_chunks


def decode(content: bytes, file: str) -> StepRecord:
    """The record that `content`, a whole file, holds.

    Raises
    ------
    CheckpointError
        If it holds none: `file` and what is wrong with it are in the message.
    """
    if len(content) < _HEADER.size:
        raise CheckpointError(f"{file} has {len(content)} bytes: too few for a record")
    magic, version, header_nbytes, run_id, sequence, step, payload_nbytes, checksum = _HEADER.unpack_from(content)
    if magic != MAGIC or header_nbytes != _HEADER.size:
        raise CheckpointError(f"{file} holds no record: it does not begin like one")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format version {version}, this zerooffload reads {FORMAT_VERSION}: use the one that wrote it"
        )
    stop = _HEADER.size + payload_nbytes
    if stop > len(content):
        raise CheckpointError(f"{file} is cut off: its record has {stop} bytes, the file {len(content)}")
    payload = content[_HEADER.size : stop]
    unsigned = content[: _HEADER.size - 8] + bytes(8)
    if xxhash.xxh3_64_intdigest(unsigned + payload) != checksum or any(content[stop:]):
        raise CheckpointError(f"{file} is damaged or was not written to its end: the checksum is wrong")
    return StepRecord(run_id, sequence, step, *_split(payload, file))


def _split(payload: bytes, file: str) -> tuple[SlotState, Any]:
    try:
        (count,) = _COUNT.unpack_from(payload)
        slots_at = _COUNT.size
        checksums_at = slots_at + round_up(count, 8)
        state_at = checksums_at + 8 * count
        if state_at > len(payload):
            raise CheckpointError(f"{file} names {count} chunks, but has no room for them")
        slots = np.frombuffer(payload, "<u1", count, slots_at).astype(np.uint8)
        checksums = np.frombuffer(payload, "<u8", count, checksums_at).astype(np.uint64)
        if (slots > 1).any():
            raise CheckpointError(f"{file} names a slot that no chunk has")
        return SlotState(slots, checksums), json.loads(payload[state_at:])
    except (ValueError, struct.error, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
