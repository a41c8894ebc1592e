"""Blocks that take the whole batch: which they are, and what they run with."""

from __future__ import annotations

from collections.abc import Sequence

from zerooffload.config import OffloadConfig
from zerooffload.errors import ConfigError
from zerooffload.planner.placement import BlockInputs
from zerooffload.runtime.activations import ActivationStore
from zerooffload.runtime.resources import Parts, Resources
from zerooffload.runtime.run import Run
from zerooffload.runtime.sliced_block import SlicedBlock, Slicing
from zerooffload.runtime.slicing import Rule, check_declared
from zerooffload.sharding.grouping import UnitModules, modules_around


def check_blocks(found: Sequence[UnitModules], config: OffloadConfig, inputs: BlockInputs) -> None:
    """See that the blocks that are computed again in backward can be.

    Raises
    ------
    ConfigError
        If one has another unit inside, or a rule is declared for a unit that is none of them.
    """
    for unit in found:
        outer = next((name for name in modules_around(unit.name)[:-1] if name in inputs.homes), None)
        if outer is not None:
            raise ConfigError(
                f"unit {unit.name} lies inside unit {outer}, whose forward is computed again in backward: cut the model"
                ' into units side by side, OffloadConfig(units=...), or set activations to "keep" for the outer one'
            )
    check_declared(config.slice_rules, list(inputs.homes))


def slice_blocks(
    run: Run, found: Sequence[UnitModules], config: OffloadConfig, resources: Resources, parts: Parts
) -> None:
    """Let the blocks of a run whose inputs have a home run in slices, until it is closed."""
    run.micro_batch_size = config.slice_size
    homes = resources.plan.placement.block_inputs.homes
    if not homes:
        return
    resources.block_inputs = store = ActivationStore(resources, parts)
    declared = {name: Rule(rule) for name, rule in config.slice_rules.items()}
    slicing = Slicing(
        micro_batch_size=config.slice_size,
        declared=declared,
        accelerator=parts.accelerator,
        between_slices=store.advance,
    )
    for unit in found:
        if unit.name in homes:
            block = SlicedBlock(unit.name, unit.module, slicing, store.keeper(homes[unit.name]))
            block.install()
            run.at_close(block.remove)
