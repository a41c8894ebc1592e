"""A plan as one JSON object; docs/planning.md describes it."""

from __future__ import annotations

from typing import Any

from zerooffload.cli.plan.section import offload_section
from zerooffload.config import TierName
from zerooffload.planner.cost import MemoryAccount
from zerooffload.planner.plan import Plan
from zerooffload.train.recipe import Recipe

FORMAT = 1


def document(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """All that a plan says. Bytes, seconds, tokens; of one rank where nothing else is said."""
    step = plan.estimate
    return {
        "format": FORMAT,
        "model": _model(plan),
        "machine": {
            "name": plan.machine.name,
            "measured": None if plan.machine.measured is None else plan.machine.measured.isoformat(),
            "ranks": plan.machine.device.count,
        },
        "step": {
            "seconds": step.seconds,
            "floor_seconds": plan.floor_seconds,
            "tokens": step.tokens,
            "tokens_per_second": step.tokens_per_second,
            "bound": step.bound,
            "update": str(plan.kind.schedule),
            "busy_seconds": dict(step.busy),
            "bytes_moved": {link: round(nbytes) for link, nbytes in step.bytes_moved.items()},
        },
        "drives": _drives(plan),
        "memory": [_account(account, plan) for account in step.memory],
        "settings": dict(plan.settings),
        "homes": {
            name: {"params": homes.params, "optimizer": homes.optimizer, "gradients": homes.gradients}
            for name, homes in plan.homes.items()
        },
        "reasons": list(plan.reasons),
        "offload_toml": offload_section(recipe.offload, plan),
        "spans": [[str(span.lane), span.name, span.begin, span.end] for span in step.spans],
    }


def capacity_bytes(account: MemoryAccount, plan: Plan) -> int | None:
    """What the machine has of a tier for each rank; None where its profile does not tell."""
    device, host, drives = plan.machine.device, plan.machine.host, plan.machine.drives
    match account.tier:
        case TierName.DEVICE:
            return host.memory // device.count if device.shares_host_memory else device.memory
        case TierName.HOST:
            return host.memory // device.count
        case TierName.NVME:
            spaces = [drive.space for drive in drives if drive.space is not None]
            return sum(spaces) // device.count if len(spaces) == len(drives) else None


def _model(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.model.name,
        "num_params": plan.num_params,
        "num_trained": plan.num_trained,
        "batch_size": plan.model.batch_size * plan.kind.num_slices,
        "micro_batch_size": plan.model.batch_size if plan.kind.num_slices > 1 else None,
        "sequence_length": plan.model.sequence_length,
        "accumulation_steps": plan.kind.accumulation,
        "recomputed": sorted(plan.kind.computed_again),
    }


def _drives(plan: Plan) -> dict[str, Any]:
    """Of all ranks together."""
    ranks = plan.machine.device.count
    return {
        "count": len(plan.machine.drives),
        "bytes_written_per_step": round(plan.estimate.bytes_moved["nvme_written"] * ranks),
        "bytes_written_per_day": round(plan.estimate.bytes_written_per_day * ranks),
        "days": plan.drive_days,
    }


def _account(account: MemoryAccount, plan: Plan) -> dict[str, Any]:
    return {
        "tier": account.tier.value,
        "capacity_bytes": capacity_bytes(account, plan),
        "budget_bytes": account.budget_bytes if account.is_bounded else None,
        "baseline_bytes": account.baseline_bytes,
        "leased_bytes": account.leased_bytes,
        "holders": {claim.holder: claim.nbytes for claim in account.claims},
        "activation_bytes": dict(account.activations),
        "peak_bytes": account.peak_bytes,
    }
