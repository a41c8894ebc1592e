from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerooffload.runtime.access_order import AccessOrder, Pass

POINTS = ["embed", "layers.0", "layers.1", "head", "(root)"]


@pytest.fixture
def order() -> AccessOrder:
    return AccessOrder(POINTS)


def walk(order: AccessOrder, kind: Pass, names: list[str]) -> None:
    order.begin(kind)
    for name in names:
        order.use(name)
    order.end()


def test_the_first_guess_is_the_models_order_and_its_reverse(order: AccessOrder) -> None:
    order.begin(Pass.TRAIN_FORWARD)
    assert order.upcoming() == POINTS + POINTS[::-1]
    order.use("embed")
    assert order.upcoming() == POINTS[1:] + POINTS[::-1]
    order.begin(Pass.BACKWARD)
    assert order.upcoming() == POINTS[::-1]
    order.begin(Pass.EVALUATION)
    assert order.upcoming() == POINTS + POINTS


def test_a_finished_pass_is_the_next_guess(order: AccessOrder) -> None:
    walk(order, Pass.TRAIN_FORWARD, ["(root)", "embed", "head"])
    order.begin(Pass.TRAIN_FORWARD)
    order.use("(root)")
    assert order.upcoming()[:2] == ["embed", "head"]


def test_passes_learn_apart(order: AccessOrder) -> None:
    walk(order, Pass.EVALUATION, ["layers.1"])
    order.begin(Pass.TRAIN_FORWARD)
    assert order.upcoming() == POINTS + POINTS[::-1]
    order.begin(Pass.EVALUATION)
    assert order.upcoming() == ["layers.1", "layers.1"]


def test_a_pass_that_did_not_end_teaches_nothing(order: AccessOrder) -> None:
    order.begin(Pass.TRAIN_FORWARD)
    order.use("head")
    order.begin(Pass.TRAIN_FORWARD)
    assert order.upcoming() == POINTS + POINTS[::-1]


def test_an_empty_pass_teaches_nothing(order: AccessOrder) -> None:
    walk(order, Pass.EVALUATION, [])
    order.begin(Pass.EVALUATION)
    assert order.upcoming() == POINTS + POINTS


def test_a_skipped_point_moves_the_position_ahead(order: AccessOrder) -> None:
    order.begin(Pass.EVALUATION)
    order.use("embed")
    order.use("head")
    assert order.upcoming() == ["(root)", *POINTS]


def test_a_point_used_again_moves_the_position_back(order: AccessOrder) -> None:
    order.begin(Pass.EVALUATION)
    for name in ("embed", "layers.0", "layers.1", "layers.0"):
        order.use(name)
    assert order.upcoming() == ["layers.1", "head", "(root)", *POINTS]


def test_a_stranger_leaves_the_position_alone_and_is_learned(order: AccessOrder) -> None:
    order.begin(Pass.EVALUATION)
    for name in ("embed", "adapter"):
        order.use(name)
    assert order.upcoming() == POINTS[1:] + POINTS
    order.end()
    order.begin(Pass.EVALUATION)
    assert order.upcoming() == 2 * ["embed", "adapter"]


def test_outside_a_pass_nothing_is_known(order: AccessOrder) -> None:
    order.use("embed")
    assert order.current is None
    assert order.upcoming() == []
    order.begin(Pass.BACKWARD)
    assert order.current is Pass.BACKWARD
    order.end()
    assert order.current is None


@given(
    st.lists(st.tuples(st.sampled_from(Pass), st.lists(st.sampled_from([*POINTS, "stranger"]), max_size=9)), max_size=6)
)
def test_no_walk_is_an_error_and_a_repeated_one_is_foreseen(walks: list[tuple[Pass, list[str]]]) -> None:
    order = AccessOrder(POINTS)
    for kind, names in walks:
        walk(order, kind, names)
    for kind, names in walks:
        walk(order, kind, names)
        order.begin(kind)
        if names:
            assert order.upcoming()[: len(names)] == names
