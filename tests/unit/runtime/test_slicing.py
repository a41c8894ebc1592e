"""Which arguments are cut, which are not, and which are refused."""

from __future__ import annotations

import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from zerooffload.errors import ConfigError
from zerooffload.runtime.slicing import Leaf, Rule, check_declared, find_cut, take_apart, take_arguments_apart

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - an untyped one is what users have


@dataclass(frozen=True)
class Shapes:
    first: Any
    others: Any


def forward(hidden: Any, mask: Any = None, *rest: Any, position: Any = None, **more: Any) -> None: ...


def leaves_of(*args: Any, **kwargs: Any) -> list[Leaf]:
    return take_arguments_apart(forward, args, kwargs)[0]


def rules(*args: Any, size: int = 2, declared: dict[str, Rule] | None = None, **kwargs: Any) -> dict[str, str]:
    leaves = leaves_of(*args, **kwargs)
    cut = find_cut("layers.3", leaves, size, declared or {})
    return {leaf.path: rule.value for leaf, rule in zip(leaves, cut.rules, strict=True)}


HIDDEN = torch.zeros(4, 6, 8)


@pytest.mark.parametrize(
    "value",
    [
        (1, [2, {"a": 3, "b": (4,)}], None),
        Pair(1, Pair(2, 3)),
        Shapes(1, {"k": [2]}),
        BaseModelOutput(last_hidden_state=torch.ones(1), attentions=(torch.ones(2), torch.ones(3))),
        5,
        torch.Size([2, 3]),
    ],
)
def test_what_is_taken_apart_is_put_together(value: Any) -> None:
    leaves, rebuild = take_apart(value, "x")
    again = rebuild(iter([leaf.value for leaf in leaves]))
    assert type(again) is type(value)
    assert again == value
    others = rebuild(iter(range(len(leaves))))
    assert [leaf.value for leaf in take_apart(others, "x")[0]] == list(range(len(leaves)))


@pytest.mark.parametrize(
    "contain", [lambda x: [x], lambda x: {"a": x}, lambda x: Shapes(x, None), lambda x: Pair(x, 1)]
)
def test_what_puts_others_in_their_places_holds_nothing(contain: Any) -> None:
    tensor = torch.ones(1)
    gone = weakref.ref(tensor)
    value = contain(tensor)
    leaves, rebuild = take_apart(value, "x")
    num_leaves = len(leaves)
    del tensor, value, leaves
    assert gone() is None
    assert len(take_apart(rebuild(iter([0] * num_leaves)), "x")[0]) == num_leaves


def test_paths_name_arguments() -> None:
    leaves = leaves_of(1, 2, 3, 4, position=(5, {"a": 6}), other=Shapes(7, 8))
    assert [leaf.path for leaf in leaves] == [
        *("hidden", "mask", "rest[0]", "rest[1]"),
        *("position[0]", "position[1]['a']", "other.first", "other.others"),
    ]
    assert leaves[4].argument == "position"
    assert leaves[6].argument == "other"


def test_the_first_tensor_is_the_batch() -> None:
    cut = find_cut("x", leaves_of(HIDDEN), 1, {})
    assert (cut.batch_size, cut.slice_size, cut.rules) == (4, 1, (Rule.BATCH,))
    assert cut.slices == [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)]


def test_what_is_certain() -> None:
    assert rules(
        HIDDEN,
        torch.zeros(4, 1, 6, 6),
        position=(torch.zeros(1, 6, 4), torch.zeros(6, 4)),
        bias=torch.zeros(1, 2, 6, 6),
        scale=torch.zeros(()),
        use_cache=False,
        name=None,
        kind=torch.float32,
    ) == {
        "hidden": "batch",
        "mask": "batch",
        "position[0]": "shared",
        "position[1]": "shared",
        "bias": "shared",
        "scale": "shared",
        "use_cache": "shared",
        "name": "shared",
        "kind": "shared",
    }


@pytest.mark.parametrize("hidden", [torch.zeros(6, 6, 8), torch.zeros(8, 6, 8)], ids=["sequence", "width"])
def test_where_sizes_coincide_nothing_is_guessed(hidden: torch.Tensor) -> None:
    positions = torch.arange(len(hidden))
    with pytest.raises(ConfigError, match=r'layers\.3.*position.*may be a part of the batch or not.*"position"'):
        rules(hidden, position=positions)
    assert rules(hidden, position=positions, declared={"position": Rule.SHARED})["position"] == "shared"
    assert rules(hidden, position=positions, declared={"position": Rule.BATCH})["position"] == "batch"


def test_one_slice_needs_no_rules() -> None:
    assert rules(torch.zeros(6, 6, 8), position=torch.arange(6), size=6)["position"] == "shared"
    assert find_cut("x", leaves_of(torch.zeros(6, 6)), None, {}).slices == [slice(0, 6)]
    assert rules(torch.zeros(1, 6, 8), position=torch.arange(1), cu_seqlens=torch.arange(1), size=1)


def test_a_rule_for_some_units() -> None:
    declared = {"encoder.*:position": Rule.BATCH, "layers.?:position": Rule.SHARED, "position": Rule.BATCH}
    assert rules(HIDDEN, position=torch.arange(4), declared=declared)["position"] == "shared"
    check_declared(declared, ["encoder.0", "layers.3"])
    with pytest.raises(ConfigError, match=r"encoder\.\*:position.*no such unit.*layers\.3"):
        check_declared(declared, ["layers.3"])


def test_of_a_declared_batch_one_row_is_for_all() -> None:
    declared = {"position": Rule.BATCH}
    assert rules(HIDDEN, position=torch.zeros(1, 6), declared=declared)["position"] == "shared"
    with pytest.raises(ConfigError, match=r"position of shape \(3, 6\).*neither 4 samples.*nor 1"):
        rules(HIDDEN, position=torch.zeros(3, 6), declared=declared)


def test_the_batch_may_come_later() -> None:
    found = rules(torch.zeros(9, 9), HIDDEN, declared={"hidden": Rule.SHARED})
    assert found == {"hidden": "shared", "mask": "batch"}


@pytest.mark.parametrize("size", [3, 8])
def test_a_batch_that_does_not_divide_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"layers\.3.*hidden has 4 samples.*micro_batch_size={size}"):
        rules(HIDDEN, size=size)


def test_an_unknown_kind_is_refused_unless_declared() -> None:
    with pytest.raises(ConfigError, match=r"argument position is a object.*use_cache=False.*slice_rules"):
        rules(HIDDEN, position=object())
    assert rules(HIDDEN, position=object(), declared={"position": Rule.SHARED})["position"] == "shared"


def test_packed_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match="cu_seqlens_q tells where packed sequences end"):
        rules(HIDDEN, cu_seqlens_q=torch.arange(3))


def test_a_call_without_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="no argument is a batch"):
        rules(3, mask=torch.zeros(()))
