"""A run's account: one JSON object for programs, or a page for people."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from zerooffload import __version__, native
from zerooffload.errors import ConfigError, InternalError
from zerooffload.machine import cpu_name, write_whole
from zerooffload.telemetry import StepPicture
from zerooffload.train.html_report import html_report
from zerooffload.train.keeper import HeldRun
from zerooffload.train.loop import TrainingResult
from zerooffload.train.summary import memory_account, seconds_by_cause, settled_steps, wear


def run_report(result: TrainingResult) -> dict[str, Any]:
    """The report of a run that finished a step. Bytes and seconds throughout.

    `seconds` leaves the first step out if there are others, because its report begins with `offload` and so covers the
    evaluation before training; bytes count in all.
    """
    records = result.steps
    account = memory_account(result)
    moved = [record.report.bytes_moved for record in records]
    seconds = sum(record.seconds for record in records)
    return {
        "steps": len(records),
        "losses": [record.loss for record in records],
        "heldout_loss_before": result.heldout_before,
        "heldout_loss_after": result.heldout_after,
        "tokens_per_second": sum(record.tokens for record in records) / seconds,
        "peak_bytes": {
            **{tier.name: tier.peak_bytes for tier in records[-1].report.tiers},
            "process": result.process_peak_bytes,
        },
        "planned_bytes": {tier.name: tier.planned_bytes for tier in records[-1].report.tiers},
        "budget_bytes": {tier.name: tier.budget_bytes for tier in records[-1].report.tiers},
        "baseline_bytes": account.baseline_bytes,
        "leased_bytes": account.leased_bytes,
        "activations_predicted_bytes": account.activations_bytes,
        "nvme_read_bytes": sum(entry.get("nvme_read", 0) for entry in moved),
        "nvme_written_bytes_per_step": wear(settled_steps(records), 0.0).bytes_per_step,
        "nvme_written_bytes": sum(entry.get("nvme_written", 0) for entry in moved),
        "seconds": seconds_by_cause(settled_steps(records)),
        "seconds_steps": len(settled_steps(records)),
        "prediction": None if result.held is None else _prediction(result.held),
        "step_records": [_step(record) for record in records],
        "machine": machine(),
        "recipe": result.recipe.model_dump(mode="json"),
    }


def is_page(path: Path) -> bool:
    """Whether a report of this name is a page: it needs the last step's timeline."""
    return path.suffix.lower() in (".html", ".htm")


def write_report(path: Path, result: TrainingResult, last_step: StepPicture | None = None) -> None:
    """Write the report; the file appears whole or not at all.

    Parameters
    ----------
    path : pathlib.Path
        A page if its name ends in .html, JSON otherwise.
    last_step : StepPicture, optional
        What a page shows.

    Raises
    ------
    ConfigError
        If it cannot be written.
    """
    if not is_page(path):
        text = json.dumps(run_report(result), indent=1) + "\n"
    elif last_step is None:
        raise InternalError("a page was asked for, and nobody followed the last step")
    else:
        text = html_report(result, last_step, machine())
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror}") from error


def machine() -> dict[str, Any]:
    """What the run ran on."""
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "zerooffload": __version__,
        "kernel": native.active_target() if native.available else "torch",
    }


def _prediction(held: HeldRun) -> dict[str, Any]:
    step = held.estimate
    return {
        "step_seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "bound": step.bound,
        "probe_step": held.probe_step,
        "figures": [{**asdict(each), "is_outside": each.is_outside} for each in held.comparisons],
        "notes": [{"step": number, "text": text} for number, text in held.notes],
    }


def _step(record: Any) -> dict[str, Any]:
    report = record.report
    return {
        "step": record.step,
        "loss": record.loss,
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "seconds": record.seconds,
        "committed_step": report.committed_step,
        "bytes_moved": dict(report.bytes_moved),
        "waits": dict(report.waits),
        "work": dict(report.work),
        "busy": dict(report.busy),
    }
