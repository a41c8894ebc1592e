"""What ranks wrote is found by any other number of ranks, and contradictions are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerooffload.checkpoint.boxes import Box
from zerooffload.checkpoint.manifest import BoxEntry, ChunkEntry, GroupEntry, Manifest, ParamEntry, RunEntry, StateEntry
from zerooffload.checkpoint.reshard import join, missing_and_unexpected
from zerooffload.checkpoint.shard_files import plan_files
from zerooffload.errors import CheckpointError

PARAM = StateEntry("param", "float32", 1)
TRAINED = GroupEntry(
    "float32", True, (PARAM, StateEntry("exp_avg", "uint8", 1), StateEntry("exp_avg_exponents", "uint8", 128))
)
FROZEN = GroupEntry("float32", False, (PARAM,))


def manifest(params: list[ParamEntry], chunk_numels: list[int], rank: int = 0, num_ranks: int = 1) -> Manifest:
    """With chunks of the group of the parameter that each begins in."""
    chunks, position = [], 0
    for numel in chunk_numels:
        end = 0
        for param in params:
            end += param.stop - param.start
            if position < end:
                group = (TRAINED, FROZEN)[param.group]
                break
        chunks.append(ChunkEntry(numel, {state.name: "0" * 16 for state in group.states}))
        position += numel
    return Manifest(
        save="a",
        rank=rank,
        num_ranks=num_ranks,
        step=1,
        algorithm="adamw",
        moments="8bit",
        groups=(TRAINED, FROZEN),
        params=tuple(params),
        chunks=tuple(chunks),
        run=RunEntry({}, {}, [], {}),
        extra=None,
    )


def param(name: str, numel: int, start: int = 0, stop: int | None = None, group: int = 0) -> ParamEntry:
    return ParamEntry(name, (), (numel,), group, start, numel if stop is None else stop, 3)


@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 4))
def test_every_element_is_found_once_wherever_it_is(seed: int, num_ranks: int) -> None:
    """Parameters in blocks of 128 elements, cut among ranks and chunks anywhere between blocks."""
    draw = random.Random(seed)  # noqa: S311 - the same every time
    numels = {f"p{index}": draw.randint(1, 1500) for index in range(draw.randint(1, 5))}
    cuts = {
        name: sorted(min(numel, 128 * draw.randint(0, 12)) for _ in range(num_ranks - 1))
        for name, numel in numels.items()
    }
    manifests = []
    for rank in range(num_ranks):
        params, chunks = [], []
        for name, numel in numels.items():
            edges = [0, *cuts[name], numel]
            start, stop = edges[rank], edges[rank + 1]
            if start == stop:
                continue
            params.append(param(name, numel, start, stop))
            while start < stop:
                chunks.append(min(stop - start, 128 * draw.randint(1, 6)))
                start += chunks[-1]
        manifests.append(manifest(params, chunks, rank, num_ranks))
    checkpoint = join(manifests, "here")
    for name, numel in numels.items():
        start = draw.randint(0, numel - 1)
        stop = draw.randint(start + 1, numel)
        found = []
        (part,) = checkpoint.params[name].parts
        for source in part.within(start, stop):
            assert source.start < stop
            assert source.stop > start
            for state in TRAINED.states:
                segment = checkpoint.files[source.rank][state.name].ranges[source.chunk].segments[source.segment]
                of_rank = checkpoint.manifests[source.rank].params
                assert (of_rank[segment.param].name, segment.start, segment.stop) == (name, source.start, source.stop)
            found += list(range(max(start, source.start), min(stop, source.stop)))
        assert found == list(range(start, stop))


SHAPE = (6, 7)
CUTS: dict[str, list[Box]] = {
    "whole": [Box(SHAPE, (0, 0), SHAPE)],
    "rows": [Box(SHAPE, (0, 0), (4, 7)), Box(SHAPE, (4, 0), (2, 7)), Box(SHAPE, (6, 0), (0, 7))],
    "columns": [Box(SHAPE, (0, 0), (6, 3)), Box(SHAPE, (0, 3), (6, 3)), Box(SHAPE, (0, 6), (6, 1))],
}


def part_of(box: Box, rank: int, num_ranks: int) -> Manifest:
    entry = ParamEntry("a", (), SHAPE, 1, 0, box.numel, 3, BoxEntry(box.offsets, box.sizes))
    return manifest([entry], [box.numel] if box.numel else [], rank, num_ranks)


def parts(boxes: list[Box]) -> list[Manifest]:
    return [part_of(box, rank, len(boxes)) for rank, box in enumerate(boxes)]


@pytest.mark.parametrize("wanted", CUTS)
@pytest.mark.parametrize("saved", CUTS)
def test_elements_are_found_however_a_parameter_was_cut_and_is(saved: str, wanted: str) -> None:
    param = join(parts(CUTS[saved]), "here").params["a"]
    numbers = torch.arange(42).view(SHAPE)

    def elements(box: Box) -> list[int]:
        edges = zip(box.offsets, box.sizes, strict=True)
        return numbers[tuple(slice(first, first + size) for first, size in edges)].flatten().tolist()

    for box in CUTS[wanted]:
        for start, stop in combinations(range(box.numel + 1), 2):
            runs = list(param.runs(box, start, stop))
            found = [number for run in runs for number in elements(run.part.box)[run.first : run.stop]]
            assert found == elements(box)[start:stop]
            assert saved != wanted or len(runs) == 1


def test_the_ranges_of_a_file_fill_it() -> None:
    planned = plan_files(manifest([param("a", 300), param("b", 1000)], [256, 44, 1000]), "here")
    for file in planned.values():
        ends = [(place.offset_bytes, place.offset_bytes + place.nbytes) for place in file.ranges.values()]
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
        assert ends[-1][1] == file.header.data_nbytes
    assert planned["exp_avg_exponents"].header.entries["a"].shape == (3,)
    assert planned["param"].header.entries["a"].shape == (300,)


def test_a_tied_weight_is_found_by_any_name() -> None:
    tied = replace(param("embed", 10), aliases=("head",))
    checkpoint = join([manifest([tied], [10])], "here")
    assert missing_and_unexpected(checkpoint, [("head",)]) == ([], [])
    assert missing_and_unexpected(checkpoint, [("embed",), ("head",)]) == ([], [])
    assert missing_and_unexpected(checkpoint, [("other", "another")]) == (["other"], ["embed"])


HALVES = [manifest([param("a", 256, 0, 128)], [128], 0, 2), manifest([param("a", 256, 128, 256)], [128], 1, 2)]
WRONG: dict[str, Callable[[], list[Manifest]]] = {
    "elements of a are missing (from 128 on)": lambda: [HALVES[0]],
    "elements of a are missing (at 128)": lambda: [HALVES[1]],
    "elements of a are there twice": lambda: [HALVES[0], *HALVES],
    "say different things of a": lambda: [HALVES[0], manifest([param("a", 300, 128, 256)], [128], 1, 2)],
    "is there twice": lambda: [manifest([param("a", 4), param("a", 4)], [8])],
    "the name of two parameters": lambda: [
        manifest([replace(param("a", 4), aliases=("b",))], [4], 0, 2),
        manifest([param("b", 4)], [4], 1, 2),
    ],
    "the entry of a is impossible": lambda: [manifest([param("a", 4, 0, 5)], [5])],
    "a chunk cuts a block of exp_avg_exponents": lambda: [manifest([param("a", 300)], [100, 200])],
    "chunk 0 has more elements": lambda: [manifest([param("a", 4)], [5])],
    "elements of a are in no chunk": lambda: [manifest([param("a", 256)], [128])],
    "holds parameters of several groups": lambda: [manifest([param("a", 4), param("b", 4, group=1)], [8])],
    "longer than any": lambda: [manifest([param("a", 1 << 30)], [1 << 30])],
    "has not the checksums": lambda: [replace(HALVES[0], chunks=(ChunkEntry(128, {}),))],
    "has the dtype float99": lambda: [
        replace(HALVES[0], groups=(replace(TRAINED, states=(replace(PARAM, dtype="float99"),)),))
    ],
    "elements of a are there twice, in two parts": lambda: parts(
        [Box(SHAPE, (0, 0), (4, 7)), Box(SHAPE, (3, 0), (2, 7))]
    ),
    "elements of a are missing, in parts that nobody wrote": lambda: parts(CUTS["columns"][:2]),
    "the entry of a is impossible, or": lambda: parts([Box(SHAPE, (4, 0), (3, 7))]),
    "more than any mesh makes": lambda: [
        manifest([ParamEntry("a", (), (1025,), 1, 0, 1, 3, BoxEntry((rank,), (1,)))], [1], rank, 1025)
        for rank in range(1025)
    ],
    "has no states": lambda: [replace(HALVES[0], groups=(replace(TRAINED, states=()),))],
}


@pytest.mark.parametrize("message", WRONG)
def test_what_contradicts_itself_is_refused(message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        join(WRONG[message](), "here")
    assert message in str(refused.value)
    assert str(refused.value).startswith("here")
