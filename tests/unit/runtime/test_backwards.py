"""Which backward is expected to be the last before the update."""

from __future__ import annotations

import pytest

from zerooffload.runtime.backwards import BackwardCount


def step(count: BackwardCount, num_backwards: int) -> list[bool | None]:
    """What is expected in each backward of a step."""
    expected = []
    for _ in range(num_backwards):
        count.begin()
        expected.append(count.is_last_expected())
    count.updated()
    return expected


def step_marked(count: BackwardCount, num_backwards: int) -> list[bool | None]:
    """The same with all but the last inside of `more_follow`."""
    expected = []
    for number in range(num_backwards):
        if number < num_backwards - 1:
            with count.more_follow():
                count.begin()
                expected.append(count.is_last_expected())
        else:
            count.begin()
            expected.append(count.is_last_expected())
    count.updated()
    return expected


def test_before_any_backward_nothing_is_expected() -> None:
    for count in (BackwardCount(), BackwardCount(1)):
        assert count.is_last_expected() is None
        assert count.num_backwards == 0
    with count.more_follow():
        assert count.is_last_expected() is None


@pytest.mark.parametrize(
    ("accumulation_steps", "expected"), [(1, [True]), (2, [False, True]), (4, [False, False, False, True])]
)
def test_the_number_that_was_said_counts_from_the_first_step(
    accumulation_steps: int, expected: list[bool | None]
) -> None:
    count = BackwardCount(accumulation_steps)
    assert [step(count, accumulation_steps) for _ in range(3)] == [expected] * 3


def test_beyond_the_number_that_was_said_nobody_can_tell() -> None:
    assert step(BackwardCount(2), 4) == [False, True, None, None]


def test_a_step_of_fewer_backwards_does_not_shift_the_next() -> None:
    count = BackwardCount(3)
    assert step(count, 2) == [False, False]
    assert step(count, 3) == [False, False, True]


def test_if_nothing_is_said_two_steps_of_one_length_tell() -> None:
    count = BackwardCount()
    assert step(count, 3) == [None, None, None]
    assert step(count, 3) == [None, None, None]
    assert step(count, 3) == [False, False, True]
    # One that is longer, and what follows until two are alike again.
    assert step(count, 4) == [False, False, True, None]
    assert step(count, 2) == [None, None]
    assert step(count, 2) == [None, None]
    assert step(count, 2) == [False, True]


def test_what_is_marked_is_not_the_last_and_what_is_not_is() -> None:
    count = BackwardCount()
    assert step_marked(count, 3) == [False, False, True]
    assert step_marked(count, 1) == [True]
    # Two steps without a mark: only the numbers tell.
    assert step_marked(count, 1) == [None]


@pytest.mark.parametrize("accumulation_steps", [None, 2, 3, 8])
def test_marks_count_more_than_a_number(accumulation_steps: int | None) -> None:
    count = BackwardCount(accumulation_steps)
    assert step_marked(count, 3) == [False, False, True]
    assert step_marked(count, 2) == [False, True]


def test_marks_nest_and_end_with_an_error() -> None:
    count = BackwardCount()
    with count.more_follow():
        with count.more_follow():
            count.begin()
        assert count.expects_more
        assert count.is_last_expected() is False
    assert not count.expects_more
    with pytest.raises(KeyError), count.more_follow():
        raise KeyError
    assert not count.expects_more
    count.begin()
    assert count.is_last_expected() is True


def test_a_step_inside_of_a_mark_leaves_it() -> None:
    count = BackwardCount()
    with count.more_follow():
        assert step(count, 1) == [False]
        assert step(count, 1) == [False]
    assert step(count, 1) == [True]


def test_what_is_discarded_teaches_nothing() -> None:
    count = BackwardCount()
    for _ in range(2):
        step(count, 2)
    count.begin()
    count.discarded()
    assert count.num_backwards == 0
    assert step(count, 2) == [False, True]


def test_forgetting_and_stepping_again_without_a_backward_change_nothing() -> None:
    """Loops clear gradients after each step, and two optimizers step one after the other."""
    count = BackwardCount()
    for _ in range(2):
        step(count, 2)
        count.updated()
        count.discarded()
        count.discarded()
    assert step(count, 2) == [False, True]
