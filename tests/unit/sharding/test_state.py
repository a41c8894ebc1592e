from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import product

import pytest

from zerooffload import InternalError
from zerooffload.sharding.state import (
    PHASE_TRANSITIONS,
    SHARD_TRANSITIONS,
    Phase,
    ShardState,
    StateMachine,
)

# Written again, so that a change of the tables is a decision and not an accident.
LEGAL = {
    (ShardState.AT_HOME, ShardState.FETCHING),
    (ShardState.FETCHING, ShardState.STAGED),
    (ShardState.FETCHING, ShardState.AT_HOME),
    (ShardState.STAGED, ShardState.GATHERING),
    (ShardState.STAGED, ShardState.AT_HOME),
    (ShardState.GATHERING, ShardState.FULL),
    (ShardState.FULL, ShardState.AT_HOME),
    (Phase.IDLE, Phase.FORWARD),
    (Phase.IDLE, Phase.PRE_BACKWARD),
    (Phase.FORWARD, Phase.IDLE),
    (Phase.PRE_BACKWARD, Phase.POST_BACKWARD),
    (Phase.POST_BACKWARD, Phase.IDLE),
    (Phase.POST_BACKWARD, Phase.PRE_BACKWARD),
}
ALL = [*product(ShardState, repeat=2), *product(Phase, repeat=2)]


def machine_at(state: Enum) -> StateMachine[Enum]:
    table: Mapping[Enum, frozenset[Enum]] = SHARD_TRANSITIONS if isinstance(state, ShardState) else PHASE_TRANSITIONS
    return StateMachine("unit layers.7", state, table)


def name(move: tuple[Enum, Enum]) -> str:
    return f"{move[0].value} to {move[1].value}"


@pytest.mark.parametrize("move", [move for move in ALL if move in LEGAL], ids=name)
def test_a_legal_transition_is_made(move: tuple[Enum, Enum]) -> None:
    machine = machine_at(move[0])
    machine.to(move[1])
    assert machine.current is move[1]


@pytest.mark.parametrize("move", [move for move in ALL if move not in LEGAL], ids=name)
def test_an_illegal_transition_raises_with_both_states_and_the_name(move: tuple[Enum, Enum]) -> None:
    machine = machine_at(move[0])
    with pytest.raises(InternalError) as caught:
        machine.to(move[1])
    assert str(caught.value) == f"unit layers.7: illegal transition from {move[0].value} to {move[1].value}"
    assert machine.current is move[0]
