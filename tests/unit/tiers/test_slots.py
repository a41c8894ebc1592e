from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerooffload.tiers import SlotState, SlotTable

NUM_CHUNKS = 4


@pytest.fixture
def table() -> SlotTable:
    """A block of three chunks with two slots, and one of a single chunk and slot."""
    table = SlotTable()
    assert table.add(3, 2) == 0
    assert table.add(1, 1) == 3
    return table


def write(table: SlotTable, index: int, checksum: int) -> int:
    slot = table.begin_write(index)
    table.wrote(index, slot, checksum)
    return slot


def slots_of(state: SlotState) -> list[int]:
    return state.slots.tolist()


def test_a_write_goes_to_the_slot_that_is_not_committed(table: SlotTable) -> None:
    assert len(table) == NUM_CHUNKS
    assert write(table, 1, 11) == 1
    assert write(table, 1, 12) == 1
    assert (table.current(1), table.checksum(1)) == (1, 12)
    assert slots_of(table.state()) == [0, 1, 0, 0]
    table.commit(table.state())
    assert write(table, 1, 13) == 0
    assert write(table, 0, 14) == 1
    assert table.state().checksums.tolist() == [14, 13, 0, 0]


def test_what_has_one_slot_stays_in_it(table: SlotTable) -> None:
    assert write(table, 3, 5) == 0
    table.commit(table.state())
    assert write(table, 3, 6) == 0


def test_every_write_makes_room_first(table: SlotTable) -> None:
    made = []
    table.make_room = lambda: made.append(table.current(0))
    write(table, 0, 1)
    write(table, 0, 2)
    assert made == [0, 1]

    def refuse() -> None:
        raise RuntimeError("no room")

    table.make_room = refuse
    with pytest.raises(RuntimeError, match="no room"):
        write(table, 0, 3)
    assert table.checksum(0) == 2


def test_a_state_is_a_copy_and_can_be_restored(table: SlotTable) -> None:
    before = table.state()
    write(table, 2, 7)
    assert slots_of(before) == [0, 0, 0, 0]
    assert not table.is_committed
    table.restore(before)
    assert table.is_committed
    assert (table.current(2), table.checksum(2)) == (0, 0)
    assert write(table, 2, 8) == 1


def test_checksums_use_all_64_bits(table: SlotTable) -> None:
    write(table, 0, 2**64 - 1)
    state = table.state()
    table.restore(state)
    assert table.checksum(0) == 2**64 - 1


def test_what_is_lost_is_neither_read_nor_committed_until_it_is_written_again(table: SlotTable) -> None:
    write(table, 1, 11)
    table.lost(1, OSError("gone"))
    assert not table.is_committed
    for call in (table.state, lambda: table.current(1)):
        with pytest.raises(OSError, match="gone"):
            call()
    assert table.current(0) == 0
    write(table, 1, 12)
    assert table.current(1) == 1
    assert slots_of(table.state()) == [0, 1, 0, 0]


def test_what_is_lost_comes_back_with_what_was_before(table: SlotTable) -> None:
    before = table.state()
    write(table, 1, 11)
    table.lost(1, OSError("gone"))
    table.restore(before)
    assert table.is_committed


def test_what_is_written_ahead_is_the_newest_when_it_is_taken(table: SlotTable) -> None:
    before = table.state()
    assert table.may_write_ahead(1)
    slot = table.begin_write(1)
    table.wrote_ahead(1, slot, 21)
    assert (table.current(1), table.checksum(1)) == (0, 0)
    assert table.state().slots.tolist() == before.slots.tolist()
    assert table.is_committed
    table.take_ahead(1)
    assert (table.current(1), table.checksum(1)) == (slot, 21)
    assert not table.is_committed


def test_what_is_dropped_changes_nothing(table: SlotTable) -> None:
    table.wrote_ahead(1, table.begin_write(1), 21)
    for _ in range(2):
        table.drop_ahead(1)
    assert (table.current(1), table.checksum(1)) == (0, 0)
    assert table.is_committed
    with pytest.raises(KeyError):
        table.take_ahead(1)
    table.wrote_ahead(1, table.begin_write(1), 22)
    table.take_ahead(1)
    assert table.checksum(1) == 22


def test_nothing_is_written_ahead_over_what_is_newest(table: SlotTable) -> None:
    write(table, 1, 11)
    assert not table.may_write_ahead(1)
    assert table.may_write_ahead(0)
    table.commit(table.state())
    assert table.may_write_ahead(1)
    table.lost(1, OSError("gone"))
    assert not table.may_write_ahead(1)


def test_what_has_one_slot_is_not_written_ahead_and_makes_no_room(table: SlotTable) -> None:
    def refuse() -> None:
        raise RuntimeError("no room")

    table.make_room = refuse
    assert not table.may_write_ahead(3)
    with pytest.raises(RuntimeError, match="no room"):
        table.may_write_ahead(0)


def test_room_is_made_before_it_is_known_what_is_committed(table: SlotTable) -> None:
    write(table, 0, 1)
    table.make_room = lambda: table.commit(table.state())
    assert table.may_write_ahead(0)


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["write", "ahead", "take", "drop"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["commit", "undo"]), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=80))
def test_what_the_newest_commit_names_is_not_written_to_ahead_either(actions: list[tuple[str, int]]) -> None:
    """Against dictionaries of what lies in each slot, and of what was written ahead and not taken."""
    table = SlotTable()
    table.add(3, 2)
    content = {(index, slot): 0 for index in range(3) for slot in range(2)}
    ahead: dict[int, int] = {}
    named, committed = table.state(), dict.fromkeys(range(3), 0)
    for number, (action, index) in enumerate(actions, start=1):
        if action == "commit":
            named = table.state()
            table.commit(named)
            committed = {chunk: content[chunk, table.current(chunk)] for chunk in range(3)}
            # A commit comes before anything is begun ahead, or after all of it.
            for chunk in list(ahead):
                table.drop_ahead(chunk)
            ahead.clear()
        elif action == "undo":
            table.restore(named)
        elif action == "write" and index not in ahead:
            slot = table.begin_write(index)
            content[index, slot] = number
            table.wrote(index, slot, number)
        elif action == "ahead" and table.may_write_ahead(index):
            slot = table.begin_write(index)
            content[index, slot] = ahead[index] = number
            table.wrote_ahead(index, slot, number)
        elif action == "take" and index in ahead:
            table.take_ahead(index)
            assert table.checksum(index) == ahead.pop(index)
        elif action == "drop":
            table.drop_ahead(index)
            ahead.pop(index, None)
        for chunk in range(3):
            assert content[chunk, named.slots[chunk]] == committed[chunk]
            assert content[chunk, table.current(chunk)] == table.checksum(chunk)


@given(st.lists(st.one_of(st.integers(0, 2), st.sampled_from(["commit", "undo"])), max_size=60))
def test_what_the_newest_commit_names_is_never_written_to(actions: list[int | str]) -> None:
    """Against two dictionaries of what lies in each slot."""
    table = SlotTable()
    table.add(3, 2)
    content = {(index, slot): 0 for index in range(3) for slot in range(2)}
    committed = dict.fromkeys(range(3), 0)
    named = table.state()
    for number, action in enumerate(actions, start=1):
        if action == "commit":
            named = table.state()
            table.commit(named)
            committed = {index: content[index, table.current(index)] for index in range(3)}
        elif action == "undo":
            table.restore(named)
        else:
            index = int(action)
            slot = table.begin_write(index)
            content[index, slot] = number
            table.wrote(index, slot, number)
        for index in range(3):
            assert content[index, named.slots[index]] == committed[index]
            assert content[index, table.current(index)] == table.checksum(index)
