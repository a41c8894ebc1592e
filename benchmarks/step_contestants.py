"""One contestant of step_time.py, in a process of its own: it makes a model, and steps when it is told to.

Reads lines of standard input: a number of steps, or nothing more at the end. Answers each with one line of JSON on
standard output; everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

LR, MAX_NORM, SEED = 1e-4, 1.0, 0
OPTIONS = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Contestant(Protocol):
    """A model that trains."""

    def step(self, tokens: torch.Tensor) -> float:
        """Forward, backward, clipping, update; the loss."""

    def settle(self) -> None:
        """Finish what goes on behind a step, so that it takes nothing from others' turns."""

    def finish(self) -> dict[str, Any]:
        """What it tells about itself at the end."""


def llama(args: argparse.Namespace, device: str = "cpu") -> Any:
    """The model, with the same weights each time."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415 - after the baseline is known

    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 9 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        num_key_value_heads=max(1, args.hidden // 64),
        vocab_size=args.vocab,
        use_cache=False,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of predicting each next token."""
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


class Plain:
    """PyTorch alone."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._model = llama(args)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True, **OPTIONS)

    def step(self, tokens: torch.Tensor) -> float:
        """See `Contestant`."""
        loss = loss_of(self._model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def settle(self) -> None:
        """Nothing goes on."""

    def finish(self) -> dict[str, Any]:
        """Nothing to tell."""
        return {"versions": {"torch": torch.__version__}}


class Ours:
    """zerooffload, with all states in one tier."""

    def __init__(self, args: argparse.Namespace, tier: str) -> None:
        import zerooffload as zo  # noqa: PLC0415 - other contestants do not need it

        self._zo = zo
        on_nvme = tier == "nvme"
        self._model = llama(args, "meta")
        torch.manual_seed(SEED)
        config = zo.OffloadConfig(
            params=tier,
            optimizer=tier,
            gradients=tier,
            nvme_paths=(args.nvme,) if on_nvme else (),
            host_memory=args.host_memory if on_nvme else None,
            threads=args.threads,
        )
        zo.offload(self._model, config)
        self._optimizer = zo.AdamW(self._model.parameters(), **OPTIONS)
        self._reports: list[Any] = []

    def step(self, tokens: torch.Tensor) -> float:
        """See `Contestant`."""
        loss = loss_of(self._model, tokens)
        loss.backward()
        self._zo.clip_grad_norm_(self._model, MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._reports.append(self._zo.step_report(self._model))
        return loss.item()

    def settle(self) -> None:
        """A loop would find time for it in its next step."""
        from zerooffload.sharding.registry import residence_of  # noqa: PLC0415

        residence = residence_of(next(self._model.parameters()))
        run: Any = residence.run if residence is not None else None
        run._updates.wait_idle()
        if run._resources.commits is not None:
            run._resources.commits.settle()

    def finish(self) -> dict[str, Any]:
        """Bytes and waits of each step."""
        self._zo.close(self._model)
        return {
            "versions": {"zerooffload": self._zo.__version__},
            "bytes_moved": [dict(report.bytes_moved) for report in self._reports],
            "waits": [dict(report.waits) for report in self._reports],
            "work": [dict(report.work) for report in self._reports],
            "hidden_work": [dict(report.hidden_work) for report in self._reports],
            "leased_bytes": {tier.name: tier.peak_bytes for tier in self._reports[-1].tiers},
        }


class FullyShard(Plain):
    """PyTorch with FSDP2 and CPU offload, one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch.distributed as dist  # noqa: PLC0415
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: PLC0415

        one_rank()
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (1,))
        self._model = llama(args)
        policy = CPUOffloadPolicy(pin_memory=False)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(self._model, mesh=mesh, offload_policy=policy)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True, **OPTIONS)


class DeepSpeed:
    """DeepSpeed's ZeRO 3 with CPU offload, one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        one_rank()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # It compiles its optimizer with the ninja beside this python.
        os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        import deepspeed  # noqa: PLC0415

        deepspeed.init_distributed(dist_backend="gloo")
        config = {
            "train_micro_batch_size_per_gpu": args.sequences,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            "optimizer": {"type": "AdamW", "params": OPTIONS},
            "zero_allow_untested_optimizer": True,
        }
        model = llama(args)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self._version = deepspeed.__version__

    def step(self, tokens: torch.Tensor) -> float:
        """See `Contestant`."""
        loss = loss_of(self._engine, tokens)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.item())

    def settle(self) -> None:
        """Nothing goes on."""

    def finish(self) -> dict[str, Any]:
        """Its version."""
        return {"versions": {"torch": torch.__version__, "deepspeed": self._version}}


def one_rank() -> None:
    """A world of one for torch.distributed."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))


def contestant(name: str, args: argparse.Namespace) -> Contestant:
    """The one of that name."""
    match name:
        case "plain":
            return Plain(args)
        case "all-host":
            return Ours(args, "host")
        case "all-nvme":
            return Ours(args, "nvme")
        case "fsdp2":
            return FullyShard(args)
        case "deepspeed":
            return DeepSpeed(args)
    raise ValueError(name)


def memory_bytes(field: str) -> int:
    """A field of this process's memory: VmRSS, VmHWM."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """The same for each contestant."""
    generator = torch.Generator().manual_seed(SEED + 1)
    while True:
        yield torch.randint(0, args.vocab, (args.sequences, args.length), generator=generator)


def baseline_bytes() -> int:
    """What a process takes that has imported all this, and has trained something tiny."""
    import transformers.models.llama.modeling_llama  # noqa: F401, PLC0415

    with contextlib.suppress(ImportError):
        import zerooffload  # noqa: F401, PLC0415
    nn.Linear(64, 64)(torch.randn(8, 64)).sum().backward()
    return memory_bytes("VmRSS")


def serve(args: argparse.Namespace, answer: Any) -> None:
    """Answer until nothing more is asked."""

    def tell(**what: Any) -> None:
        answer.write(json.dumps(what) + "\n")
        answer.flush()

    baseline = baseline_bytes()
    try:
        one = contestant(args.name, args)
    except Exception as error:  # noqa: BLE001 - whatever it raises, it cannot take part here
        tell(missing=f"{type(error).__name__}: {error}"[:300])
        return
    tell(ready=True)
    data = batches(args)
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(int(line)):
            tokens = next(data)
            begin = time.perf_counter()
            losses.append(one.step(tokens))
            seconds.append(time.perf_counter() - begin)
        one.settle()
        tell(seconds=seconds, losses=losses)
    tell(**one.finish(), baseline_bytes=baseline, peak_bytes=memory_bytes("VmHWM"))


def main() -> None:
    """Take part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    for option in ("sequences", "length", "layers", "hidden", "vocab", "threads"):
        parser.add_argument(f"--{option}", type=int, required=True)
    parser.add_argument("--nvme")
    parser.add_argument("--host-memory")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # Libraries print; only answers go where they are read.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(args, answer)


if __name__ == "__main__":
    main()
