"""Which parts of a home that ranks share each of them writes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerooffload.sharding.unit import UnitFlat
from zerooffload.tiers import Part, RecordLayout

WORLD_SIZE, NUM_CHUNKS = 5, 3
LAYOUT = RecordLayout((Part("param", torch.float32),), 3 * 1024, 1024, range(WORLD_SIZE))


def flat_of(rank: int, sharers: Sequence[int], *, is_trained: bool = True) -> UnitFlat:
    own = SimpleNamespace(optimizer=SimpleNamespace(layout=SimpleNamespace(shards=range(rank, rank + 1))))
    home: Any = SimpleNamespace(layout=LAYOUT)
    training: Any = own if is_trained else None
    nothing: Any = None
    return UnitFlat(nothing, home, training, None, None, rank=rank, sharers=tuple(sharers))


@pytest.mark.parametrize("sharers", [(0, 1, 2, 3, 4), (1, 3), (2,)])
@pytest.mark.parametrize("is_trained", [True, False])
def test_first_values_are_written_once(sharers: Sequence[int], *, is_trained: bool) -> None:
    written = [chunk for rank in sharers for chunk in flat_of(rank, sharers, is_trained=is_trained).first_chunks]
    assert sorted(written) == list(LAYOUT.chunks)
    assert list(flat_of(2, (), is_trained=is_trained).first_chunks) == list(LAYOUT.chunks)


@pytest.mark.parametrize(("sharers", "elsewhere"), [((0, 1, 2, 3, 4), []), ((1, 3), [0, 2, 4]), ((2,), [0, 1, 3, 4])])
def test_what_is_updated_elsewhere_is_taken_home(sharers: Sequence[int], elsewhere: Sequence[int]) -> None:
    expected = [chunk for shard in elsewhere for chunk in LAYOUT.chunks_of(range(shard, shard + 1))]
    for rank in sharers:
        assert flat_of(rank, sharers).copied_chunks == expected
        assert flat_of(rank, sharers, is_trained=False).copied_chunks == []
    own = LAYOUT.chunks_of(range(3, 4))
    assert flat_of(3, ()).copied_chunks == [chunk for chunk in LAYOUT.chunks if chunk not in own]


@pytest.mark.parametrize("sharers", [(1, 3), (0, 2, 4), (2,), ()])
@pytest.mark.parametrize("nbytes", [2, 64, 66, 1000, 4096, 12_290])
def test_each_takes_a_part(sharers: Sequence[int], nbytes: int) -> None:
    """In their order, without gaps, and none much longer than others."""
    ranks = sharers or (3,)
    parts = [flat_of(rank, sharers).part_to_take_home(nbytes) for rank in ranks]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == nbytes
    assert all(part.stop - part.start < nbytes / len(ranks) + 64 for part in parts)
