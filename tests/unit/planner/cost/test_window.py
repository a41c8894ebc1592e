"""What comes to the window when, as the run's own residency brings it."""

from __future__ import annotations

from zerooffload.planner.cost.window import Arrival, arrivals

NAMES = ["a", "b", "c"]
FORWARD = [["root"], ["a"], ["b"], ["c"]]
BACKWARD = [["root"], ["c"], ["b"], ["a"]]
SIZES = {"root": 1, "a": 10, "b": 10, "c": 10}


def test_with_room_for_all_each_comes_once_and_ahead_of_need() -> None:
    found = arrivals([FORWARD, BACKWARD], SIZES, 31)
    assert found == [Arrival(name, 0, -1) for name in ("root", *NAMES)]


def test_the_last_of_forward_stay_for_the_first_of_backward() -> None:
    found = arrivals([FORWARD, BACKWARD], SIZES, 21)
    # Visits: root 0, a 1, b 2, c 3; root 4, c 5, b 6, a 7.
    assert found == [
        Arrival("root", 0, -1),
        Arrival("a", 0, -1),
        Arrival("b", 0, -1),
        Arrival("c", 2, 1),
        Arrival("a", 6, 5),
    ]


def test_a_window_of_the_least_size_brings_each_when_it_is_needed() -> None:
    found = arrivals([FORWARD, BACKWARD], SIZES, 11)
    assert [(arrival.unit, arrival.visit) for arrival in found] == [
        ("root", 0),
        ("a", 0),
        ("b", 2),
        ("c", 3),
        ("b", 6),
        ("a", 7),
    ]
    assert [arrival.room_after for arrival in found] == [-1, -1, 1, 2, 5, 6]


def test_what_is_always_there_never_comes() -> None:
    assert arrivals([FORWARD, BACKWARD], dict.fromkeys(SIZES, 0), 0) == []


def test_a_tied_head_needs_the_embedding_again() -> None:
    forward = [["root"], ["a"], ["b"], ["a"]]
    backward = [["root"], ["a"], ["b"], ["a"]]
    sizes = {"root": 0, "a": 10, "b": 10}
    assert [arrival.unit for arrival in arrivals([forward, backward], sizes, 10)] == ["a", "b", "a", "b", "a"]
