"""The [offload] section of a recipe that a plan comes to, as TOML."""

from __future__ import annotations

from zerooffload.config import OffloadConfig, TierName
from zerooffload.planner.plan import Plan
from zerooffload.train.toml import toml_table


def offload_section(config: OffloadConfig, plan: Plan) -> str:
    """What the user has set and what the plan chose; a run of it is the run that was planned."""
    values = {**config.model_dump(include=config.model_fields_set), **plan.settings}
    if not (plan.announced.planned_bytes(TierName.NVME) or config.keeps_activations_on_nvme):
        values.pop("nvme_paths", None)
    return "\n".join(toml_table("offload", values)) + "\n"
