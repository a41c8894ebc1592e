"""What many unit tests need: a tiny model, runs that end, and a folder in which nothing may be left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from support.folders import leftovers
from support.threads import on_one_thread
from torch import nn

import zerooffload as zo
from zerooffload import native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, print_blob=False)
settings.load_profile("deterministic")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take most of the time of such small tensors."""
    with on_one_thread():
        yield


class TinyNet(nn.Module):
    """Embedding, three blocks, and a head of one output whose bias is a parameter of one element."""

    def __init__(self, width: int = 16, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(width, 1)
        self.unembed = nn.Linear(width, 32, bias=False)
        if tied:
            self.unembed.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).pow(2).mean() + self.unembed(hidden).logsumexp(-1).mean()


@pytest.fixture
def make_net() -> Callable[..., TinyNet]:
    """Makes a `TinyNet` with the same values every time."""

    def make(width: int = 16, *, tied: bool = False, seed: int = 0) -> TinyNet:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TinyNet(width, tied=tied)

    return make


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.arange(8).reshape(2, 4)


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """A user's folder; a run that ended has left nothing in it but what it committed."""
    folder = tmp_path / "nvme"
    folder.mkdir()
    yield folder
    assert leftovers(folder) == []


class _UnknownTarget:
    """The native module in a process whose environment forced a CPU target that is not there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_native_module, name)

    @staticmethod
    def active_target() -> str:
        raise ValueError("unknown")


_native_module = native.module


@pytest.fixture
def wrong_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment forces a CPU target that is not there; the real module reads it once in a process."""
    if not native.available:
        pytest.skip(f"no native module: {native.why_unavailable}")
    monkeypatch.setenv(native.TARGET_VARIABLE, "avx9")
    monkeypatch.setattr(native, "module", _UnknownTarget())


@pytest.fixture
def offload(nvme: Path) -> Iterator[Callable[..., Any]]:
    """`offload(model, "nvme", **fields)`: every state on one tier, but for what the fields say; closed at the end."""
    models: list[nn.Module] = []

    def start(model: nn.Module, tier: str = "host", *, weights: Path | None = None, **fields: Any) -> nn.Module:
        homes = {"params": tier, "optimizer": tier, "gradients": tier}
        bounds = {"host_memory": "64MiB", "nvme_space": "64MiB", "nvme_paths": [nvme], "threads": 1, "overwrite": True}
        zo.offload(model, zo.OffloadConfig(**{**homes, **bounds, **fields}), weights=weights)
        models.append(model)
        return model

    yield start
    for model in models:
        zo.close(model)
