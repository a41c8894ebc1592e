"""What a run wants to place: all that is fixed before home tiers are chosen. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zerooffload.config import OffloadConfig, TierName
from zerooffload.planner.admission import AnnouncedPlan, Limits, Misfit, announce, fit
from zerooffload.planner.block_inputs import place_block_inputs
from zerooffload.planner.placement import (
    BlockInputs,
    Durability,
    Placement,
    Placer,
    Reach,
    TierChoices,
    UnitLayout,
    with_second_places,
)
from zerooffload.planner.stages import Sharding
from zerooffload.planner.units import optimizer_states
from zerooffload.sharding.grouping import UnitModules


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """Layouts and settings for which homes are wanted.

    Attributes
    ----------
    layouts : Sequence[UnitLayout]
    config : OffloadConfig
    reach : Reach
    sharding : Sharding
    block_inputs : BlockInputs
    checkpoint_nbytes : callable
        What a checkpoint of such a run takes of the host's budget, if there is room.
    """

    layouts: Sequence[UnitLayout]
    config: OffloadConfig
    reach: Reach
    sharding: Sharding
    block_inputs: BlockInputs
    checkpoint_nbytes: Callable[[Placement], int]

    @property
    def wants_second_places(self) -> bool:
        """Whether updates may begin before `optimizer.step()`, where there is room for what they change."""
        return self.config.atomic_steps and self.config.update in ("auto", "during_backward")

    @cached_property
    def _placer(self) -> Placer:
        config = self.config
        return Placer(
            self.layouts,
            self.reach,
            optimizer_states(config),
            Durability(config.atomic_steps, config.durable),
            accumulates=config.accumulates,
            sharding=self.sharding,
        )

    def placed(self, choices: TierChoices) -> Placement:
        """Every state of every unit in the home that these choices give it.

        Raises
        ------
        ConfigError
            If parameters cannot be trained, or a pattern of unit names matches none.
        """
        return replace(self._placer.place(choices), block_inputs=self.block_inputs)

    def announced(self, choices: TierChoices, limits: Limits) -> AnnouncedPlan:
        """What the run will lease, with second places where they fit.

        Raises
        ------
        BudgetError
            If the least that the run needs does not fit, with the holders and the smallest changes that help.
        """
        placement, limits = self._with_spare(choices, limits)
        return self._ahead(placement, limits) or announce(placement, limits, choices, self.placed)

    def fitted(self, choices: TierChoices, limits: Limits) -> AnnouncedPlan | Misfit:
        """As `announced`, or why it does not fit."""
        placement, limits = self._with_spare(choices, limits)
        return self._ahead(placement, limits) or fit(placement, limits)

    def fitted_ahead(self, choices: TierChoices, limits: Limits) -> AnnouncedPlan | Misfit:
        """As `fitted`, and with second places in any case."""
        placement, limits = self._with_spare(choices, limits)
        return fit(with_second_places(placement), limits)

    def _with_spare(self, choices: TierChoices, limits: Limits) -> tuple[Placement, Limits]:
        placement = self.placed(choices)
        return placement, replace(limits, spare_host_bytes=self.checkpoint_nbytes(placement))

    def _ahead(self, placement: Placement, limits: Limits) -> AnnouncedPlan | None:
        if self.wants_second_places:
            plan = fit(with_second_places(placement), limits)
            return plan if isinstance(plan, AnnouncedPlan) else None
        return None


def block_inputs_of(
    found: Sequence[UnitModules], layouts: Sequence[UnitLayout], config: OffloadConfig, reach: Reach
) -> BlockInputs:
    """What becomes of the inputs of the blocks among the units that were found.

    Raises
    ------
    ConfigError
        If a pattern of unit names matches no block.
    """
    return place_block_inputs(
        layouts,
        [unit.name for unit in found if unit.is_block],
        config.activations,
        {TierName(tier): nbytes for tier, nbytes in config.activation_memory.items()},
        reach,
        in_slices=[unit.name for unit in found if unit.is_block or unit.is_head] if config.slice_size else [],
    )


def choices_of(config: OffloadConfig) -> TierChoices:
    """The home tiers that the settings name."""
    return TierChoices(config.params, config.optimizer, config.gradients)
