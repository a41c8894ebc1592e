"""The optimizers that `adam_kernel.py` times ours beside: torch's own, and those of other packages."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch
from kernel_arrays import DTYPE_NAMES, FP16, FP32, Configuration, Contenders, Memory

from zerooffload.optim.record import MomentFormat

TORCH_OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"weight_decay": 0.01}),
}
# Name, module, class, arguments, and the moments for which it keeps the same.
OTHER_OPTIMIZERS: tuple[tuple[str, str, str, dict[str, Any], MomentFormat], ...] = (
    ("DeepSpeed CPUAdam", "deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": True}, "fp32"),
    ("torchao AdamW8bit", "torchao.optim", "AdamW8bit", {}, "8bit"),
    ("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit", {}, "8bit"),
)


# A peer that needs longer for a step is timed once, and not in every repetition.
LONGEST_STEP_SECONDS = 5.0


def torch_random(memory: Memory, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, in memory of torch's own."""
    return memory.scatter(torch.empty(memory.numel, dtype=dtype))


def torch_param(memory: Memory, dtype: torch.dtype) -> torch.nn.Parameter:
    """A parameter with a gradient, in memory of torch's own."""
    param = torch.nn.Parameter(torch_random(memory, dtype))
    param.grad = torch_random(memory, dtype)
    return param


def peers_of(configuration: Configuration, memory: Memory) -> tuple[Contenders, dict[str, str]]:
    """Optimizers that do the same on as many elements, and why others are missing."""
    peers: Contenders = {}
    missing: dict[str, str] = {}
    if configuration.rule not in TORCH_OPTIMIZERS:
        return peers, {"torch": f"has no {configuration.rule}"}
    optimizer, options = TORCH_OPTIMIZERS[configuration.rule]
    for dtype in dict.fromkeys((FP32, configuration.param)):
        if dtype is FP16:  # torch's steps of fp16 parameters keep fp16 moments, with which no one trains
            continue
        param = torch_param(memory, dtype)
        for way in ("fused", "foreach"):
            peers[f"torch {way} {DTYPE_NAMES[dtype]}"] = optimizer([param], lr=1e-3, **options, **{way: True}).step
    if configuration.rule == "adamw" and configuration.param is FP32:
        add_others(configuration, memory, peers, missing)
    return peers, missing


def add_others(configuration: Configuration, memory: Memory, peers: Contenders, missing: dict[str, str]) -> None:
    """Optimizers of other packages, where they are installed and work here."""
    for name, module, attribute, options, moments in OTHER_OPTIMIZERS:
        if configuration.moments != moments:
            continue
        try:
            step = getattr(importlib.import_module(module), attribute)(
                [torch_param(memory, FP32)], lr=1e-3, weight_decay=0.01, **options
            ).step
            step()  # compiles, and makes the states
            begin = time.perf_counter()
            step()
            seconds = time.perf_counter() - begin
        except ModuleNotFoundError as error:
            missing[name] = f"not installed: {error.name}"
        except Exception as error:  # noqa: BLE001 - whatever it raises, it cannot be timed here
            missing[name] = f"does not run here: {type(error).__name__}: {error}"
        else:
            if seconds > LONGEST_STEP_SECONDS:
                missing[name] = f"takes {seconds:.0f} s, {seconds / memory.numel * 1e9:.0f} ns an element"
            else:
                peers[name] = step
