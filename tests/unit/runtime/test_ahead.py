"""What is begun during a backward, and with which expectations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import zerooffload as zo
from zerooffload.optim.rules import StepScalars
from zerooffload.runtime.ahead import AheadUpdates
from zerooffload.runtime.update import FlatUpdate
from zerooffload.sharding.registry import residence_of
from zerooffload.sharding.unit import Unit, UnitFlat
from zerooffload.tiers import Space

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]


@dataclass
class Queue:
    """Notes what it is told."""

    begun: list[tuple[FlatUpdate, int]] = field(default_factory=list)
    num_dropped: int = 0

    def begin_ahead(self, update: FlatUpdate, urgency: int) -> None:
        self.begun.append((update, urgency))

    def drop_ahead(self) -> None:
        self.num_dropped += 1


@dataclass
class Landing:
    """Every flat's gradient has this square sum."""

    square_sum: float = 1.0
    num_asked: int = 0

    def square_sums(self, part: UnitFlat, training: object) -> list[torch.Tensor]:
        del part, training
        self.num_asked += 1
        return [torch.tensor([self.square_sum / 2, self.square_sum / 2])]


@dataclass
class Scene:
    units: Sequence[Unit]
    optimizers: list[torch.optim.Optimizer]
    queue: Queue
    landing: Landing
    ahead: AheadUpdates

    def begin(self) -> None:
        self.ahead.begin(self.units)

    def complete(self, unit: Unit) -> None:
        for part in unit.parts:
            assert part.training is not None
            part.training.held[:] = [True] * len(part.training.held)
            self.ahead.gradient_is_complete(part, part.training)

    def expected(self) -> list[StepScalars | None]:
        return [scalars for update, _ in self.queue.begun for scalars in update.scalars]


def scene_of(model: nn.Module) -> Scene:
    residence = residence_of(next(model.parameters()))
    assert residence is not None
    queue, landing = Queue(), Landing()
    optimizers: list[torch.optim.Optimizer] = [zo.AdamW(model.parameters(), lr=0.5)]
    ahead = AheadUpdates(queue, landing, lambda: optimizers)  # type: ignore[arg-type]
    return Scene(residence.run.units, optimizers, queue, landing, ahead)


@pytest.fixture
def scene(offload: Offload, make_net: MakeNet) -> Scene:
    return scene_of(offload(make_net(), "nvme"))


def test_nothing_begins_before_a_backward_that_is_the_last(scene: Scene) -> None:
    scene.complete(scene.units[0])
    scene.begin()
    scene.ahead.end()
    scene.complete(scene.units[0])
    assert scene.queue.begun == []


def test_what_is_begun_has_its_place_in_the_next_forward(scene: Scene) -> None:
    scene.begin()
    for unit in reversed(scene.units):
        scene.complete(unit)
    assert [urgency for _, urgency in scene.queue.begun] == list(reversed(range(len(scene.queue.begun))))


def test_the_step_that_is_expected(scene: Scene) -> None:
    (optimizer,) = scene.optimizers
    scene.ahead.expected_factor = 0.25
    scene.begin()
    scene.complete(scene.units[0])
    scalars_of = optimizer.scalars_of()  # type: ignore[attr-defined]
    update, _ = scene.queue.begun[0]
    assert list(update.scalars) == [scalars_of(param, 1, 0.25) for param in update.part.flat.params]
    assert list(update.scalars) != [scalars_of(param, 1, 1.0) for param in update.part.flat.params]
    assert list(update.scalars) != [scalars_of(param, 2, 0.25) for param in update.part.flat.params]


def test_what_has_no_gradient_is_not_updated(scene: Scene) -> None:
    (part,) = scene.units[1].parts
    assert part.training is not None
    scene.begin()
    part.training.held[:] = [False] * len(part.training.held)
    scene.ahead.gradient_is_complete(part, part.training)
    assert scene.queue.begun == []
    part.training.held[0] = True
    scene.ahead.gradient_is_complete(part, part.training)
    (update, _), *_ = scene.queue.begun
    assert [scalars is not None for scalars in update.scalars] == part.training.held


def test_norms_are_asked_for_only_if_the_step_before_clipped_by_one(scene: Scene) -> None:
    scene.begin()
    scene.complete(scene.units[0])
    assert scene.landing.num_asked == 0
    scene.ahead.expected_max_norm = 100.0
    scene.begin()
    scene.complete(scene.units[0])
    assert scene.landing.num_asked == 1


@pytest.mark.parametrize("factor", [1.0, 0.5, -0.5])
def test_from_where_the_step_will_clip_nothing_begins(scene: Scene, factor: float) -> None:
    """Of square sums of 1 each, three come to more than 1.5, scaled as the step scales them."""
    scene.ahead.expected_factor, scene.ahead.expected_max_norm = factor, 1.5 * abs(factor)
    scene.begin()
    for unit in scene.units:
        scene.complete(unit)
    assert len(scene.queue.begun) == 2
    assert scene.queue.num_dropped == 1
    # The next one begins anew.
    scene.begin()
    scene.complete(scene.units[0])
    assert len(scene.queue.begun) == 3


@pytest.mark.parametrize("square_sum", [math.inf, math.nan])
def test_gradients_that_are_no_numbers_do_no_harm(scene: Scene, square_sum: float) -> None:
    scene.landing.square_sum, scene.ahead.expected_max_norm = square_sum, 1.0
    scene.begin()
    scene.complete(scene.units[0])
    assert len(scene.queue.begun) == math.isnan(square_sum)


def test_with_two_optimizers_or_another_one_nothing_begins(scene: Scene, make_net: MakeNet) -> None:
    ours, theirs = scene.optimizers[0], torch.optim.SGD(make_net().parameters())
    for optimizers in ([], [ours, ours], [theirs]):
        scene.optimizers[:] = optimizers
        scene.begin()
        scene.complete(scene.units[0])
    assert scene.queue.begun == []


def test_what_belongs_to_no_group_is_left_out(scene: Scene) -> None:
    (optimizer,) = scene.optimizers
    optimizer.param_groups[0]["params"] = list(scene.units[0].parts[0].flat.params)
    scene.begin()
    for unit in scene.units:
        scene.complete(unit)
    assert len(scene.queue.begun) == 1


@pytest.mark.parametrize("fields", [{"atomic_steps": False}, {"optimizer": "host"}, {"params": "host"}], ids=str)
def test_without_second_places_nothing_begins(offload: Offload, make_net: MakeNet, fields: dict[str, Any]) -> None:
    scene = scene_of(offload(make_net(), "nvme", **fields))
    scene.begin()
    for unit in scene.units:
        scene.complete(unit)
    assert scene.queue.begun == []


def test_what_needs_the_device_is_left_to_the_thread_that_trains(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = scene.units[0].parts
    assert part.training is not None
    monkeypatch.setattr(part.training.gradient, "needs_device", True, raising=False)
    assert part.training.gradient.view(Space.HOST, 0) is None
    scene.begin()
    for unit in scene.units[:2]:
        scene.complete(unit)
    assert [update.part for update, _ in scene.queue.begun] == list(scene.units[1].parts)
