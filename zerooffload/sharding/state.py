"""The two independent axes of a unit's state, each with its table of legal transitions.

`ShardState` says where a unit's parameters are; `Phase` says what the model is doing with a module whose boundaries
have hooks. An illegal transition is a bug of ours and raises, with both states and the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from zerooffload.errors import InternalError


class ShardState(Enum):
    """Where a unit's parameters are.

    AT_HOME: this rank's shard in its home, nothing elsewhere. FETCHING: the shard is on its way into the unit's range.
    STAGED: the shard is there. GATHERING: the other ranks' shards are joining it. FULL: the whole unit can be used.
    """

    AT_HOME = "at home"
    FETCHING = "fetching"
    STAGED = "staged"
    GATHERING = "gathering"
    FULL = "full"


class Phase(Enum):
    """What the model is doing with a module."""

    IDLE = "idle"
    FORWARD = "forward"
    PRE_BACKWARD = "pre-backward"
    POST_BACKWARD = "post-backward"


SHARD_TRANSITIONS: Mapping[ShardState, frozenset[ShardState]] = {
    ShardState.AT_HOME: frozenset({ShardState.FETCHING}),
    # A fetch that fails goes back home: nothing of it is used.
    ShardState.FETCHING: frozenset({ShardState.STAGED, ShardState.AT_HOME}),
    ShardState.STAGED: frozenset({ShardState.GATHERING, ShardState.AT_HOME}),
    ShardState.GATHERING: frozenset({ShardState.FULL}),
    ShardState.FULL: frozenset({ShardState.AT_HOME}),
}

PHASE_TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.FORWARD, Phase.PRE_BACKWARD}),
    # Also when the forward raised.
    Phase.FORWARD: frozenset({Phase.IDLE}),
    Phase.PRE_BACKWARD: frozenset({Phase.POST_BACKWARD}),
    # Again into the backward: the module was called several times in the forward.
    Phase.POST_BACKWARD: frozenset({Phase.IDLE, Phase.PRE_BACKWARD}),
}

S = TypeVar("S", bound=Enum)


class StateMachine(Generic[S]):
    """A current state that only moves along its table."""

    def __init__(self, name: str, initial: S, transitions: Mapping[S, frozenset[S]]) -> None:
        self._name = name
        self._transitions = transitions
        self.current = initial

    def to(self, state: S) -> None:
        """Move to `state`.

        Raises
        ------
        InternalError
            If the table has no such move.
        """
        if state not in self._transitions[self.current]:
            raise InternalError(f"{self._name}: illegal transition from {self.current.value} to {state.value}")
        self.current = state
