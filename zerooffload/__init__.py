"""zerooffload: train PyTorch models larger than the memory of the accelerators at hand.

    import zerooffload as zo

    model = zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme_paths=["/mnt/nvme"]))
    optimizer = zo.AdamW(model.parameters(), lr=1e-5)

Names are resolved when they are first used: importing the package is quick and initialises no device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerooffload.config import OffloadConfig
    from zerooffload.entry.checkpoints import load, load_dcp, load_deepspeed, promote, save, save_dcp
    from zerooffload.entry.offloading import close, offload, reclaim_device, release_device
    from zerooffload.entry.training import (
        clip_grad_norm_,
        full_params,
        no_sync,
        resume,
        sliced_loss,
        step_report,
        trace,
        track,
    )
    from zerooffload.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        InternalError,
        RankError,
        TierIOError,
        ZeroOffloadError,
    )
    from zerooffload.integrations.huggingface import load_pretrained
    from zerooffload.integrations.huggingface.export import export_safetensors
    from zerooffload.optim import SGD, Adagrad, Adam, AdamW, GradScaler, Lion
    from zerooffload.telemetry import StepReport, TierUsage

__version__ = "0.1.0"

_HOMES = {
    "SGD": "optim",
    "Adagrad": "optim",
    "Adam": "optim",
    "AdamW": "optim",
    "BudgetError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "GradScaler": "optim",
    "InternalError": "errors",
    "Lion": "optim",
    "OffloadConfig": "config",
    "RankError": "errors",
    "StepReport": "telemetry",
    "TierIOError": "errors",
    "TierUsage": "telemetry",
    "ZeroOffloadError": "errors",
    "clip_grad_norm_": "entry.training",
    "close": "entry.offloading",
    "export_safetensors": "integrations.huggingface.export",
    "full_params": "entry.training",
    "load": "entry.checkpoints",
    "load_dcp": "entry.checkpoints",
    "load_deepspeed": "entry.checkpoints",
    "load_pretrained": "integrations.huggingface",
    "no_sync": "entry.training",
    "offload": "entry.offloading",
    "plan": "entry.planning",
    "promote": "entry.checkpoints",
    "reclaim_device": "entry.offloading",
    "release_device": "entry.offloading",
    "resume": "entry.training",
    "save": "entry.checkpoints",
    "save_dcp": "entry.checkpoints",
    "sliced_loss": "entry.training",
    "step_report": "entry.training",
    "trace": "entry.training",
    "track": "entry.training",
}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "GradScaler",
    "InternalError",
    "Lion",
    "OffloadConfig",
    "RankError",
    "StepReport",
    "TierIOError",
    "TierUsage",
    "ZeroOffloadError",
    "clip_grad_norm_",
    "close",
    "export_safetensors",
    "full_params",
    "load",
    "load_dcp",
    "load_deepspeed",
    "load_pretrained",
    "no_sync",
    "offload",
    "plan",
    "promote",
    "reclaim_device",
    "release_device",
    "resume",
    "save",
    "save_dcp",
    "sliced_loss",
    "step_report",
    "trace",
    "track",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # No submodule may have one of these names: importing it would bind the module here in place of the value.
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
