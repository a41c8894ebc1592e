"""A whole step: what the report says, what graphs from before may do, and modules used in unusual ways."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.folders import leftovers
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerooffload as zo

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]


def gradients_equal(model: nn.Module, plain: nn.Module) -> bool:
    expected = [leaf for leaf in plain.modules() if leaf._parameters]
    for ours, theirs in zip([leaf for leaf in model.modules() if leaf._parameters], expected, strict=True):
        # One after the other: the window may be small.
        with zo.full_params(ours, grads=True):
            pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
            if not all(torch.equal(one.grad, other.grad) for one, other in pairs):
                return False
    return True


def test_the_report_tells_what_a_step_moved(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = offload(make_net(), "nvme", update="after_backward")
    optimizer = zo.AdamW(model.parameters())
    with pytest.raises(zo.ConfigError, match="nothing to report"):
        zo.step_report(model)
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(tokens).backward()
    optimizer.step()
    report = zo.step_report(model)
    assert (report.step, report.committed_step) == (2, 1)
    moved = report.bytes_moved
    # Every unit has one chunk. The states are in host memory since the step before: the forward copies the parameters
    # from there, the backward reads them at most once more, and the update reads the gradients, which are new.
    numels = (512, 272, 272, 272, 544)
    layouts = {name: sum(_file_nbytes(width * n) for n in numels) for name, width in (("param", 4), ("moments", 8))}
    assert moved["nvme_written"] == 2 * layouts["param"] + layouts["moments"]
    gradients = layouts["param"]
    assert gradients <= moved["nvme_read"] <= gradients + layouts["param"]
    assert (moved["copy_in"], moved["copy_out"]) == (sum(4 * n for n in numels), 0)
    assert 0 <= report.compute_seconds <= report.seconds
    assert report.process_peak_bytes >= report.baseline_bytes > 0
    for tier in report.tiers:
        assert tier.planned_bytes == tier.leased_bytes == tier.peak_bytes <= tier.budget_bytes
    assert [tier.name for tier in report.tiers] == ["device", "host", "nvme"]


def _file_nbytes(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def test_backward_through_a_graph_from_before_the_update_raises(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    for tier in ("host", "nvme"):
        model = offload(make_net(), tier)
        optimizer = zo.AdamW(model.parameters())
        old = model(tokens)
        model(tokens).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        zo.close(model)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_changes_nothing(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, context: Callable[[], torch.no_grad]
) -> None:
    model, plain = offload(make_net(256), "nvme", device_memory="606208B"), make_net(256)
    for net in (model, plain):
        net(tokens).backward()
        with context():
            evaluated = net(tokens + 1)
        net(tokens + 2).backward()
    with context():
        assert torch.equal(model(tokens + 1), evaluated)
    assert gradients_equal(model, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_give_the_same_gradients(
    offload: Offload,
    make_net: MakeNet,
    tokens: torch.Tensor,
    reentrant: bool,  # noqa: FBT001
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(256)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.net.embed(inputs)
            for layer in self.net.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
            return self.net.head(hidden).pow(2).mean() + self.net.unembed(hidden).logsumexp(-1).mean()

    model, plain = offload(Checkpointed(), "nvme", device_memory="606208B"), make_net(256)
    for net in (model, plain):
        net(tokens).backward()
    assert gradients_equal(model, plain)


def test_blocks_that_are_not_used_have_no_gradient(offload: Offload, make_net: MakeNet, tokens: torch.Tensor) -> None:
    model = make_net()
    model.layers[1].forward = lambda hidden: hidden
    offload(model, "nvme")
    optimizer = zo.AdamW(model.parameters())
    model(tokens).backward()
    assert model.layers[1][0].weight.grad is None
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters())) - 2


def test_units_inside_units_train_within_the_least_budget(offload: Offload) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mlp = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.mlp(self.first(inputs)) + self.first(inputs)

    model = nn.Sequential(Block(), Block())
    fields = {"units": ["?", "?.mlp"]}
    with pytest.raises(zo.BudgetError) as caught:
        offload(model, "nvme", host_memory=0, **fields)
    least = str(caught.value).split('host_memory = "')[1].split('"')[0]
    offload(model, "nvme", host_memory=least, **fields)
    optimizer = zo.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()


def test_parameters_without_dimensions_are_offloaded(offload: Offload) -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    for tier in ("host", "nvme"):
        offload(model, tier)
        with zo.full_params(model):
            assert float(model.scale.detach()) == 2.0
        state = {name: value.clone() for name, value in model.state_dict().items()}
        zo.close(model)
        model = nn.Linear(2, 2)
        model.register_parameter("scale", nn.Parameter(state["scale"]))


def test_a_model_that_is_dropped_ends_its_run(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, nvme: Path
) -> None:
    del offload
    homes = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}
    model = zo.offload(make_net(), zo.OffloadConfig(**homes, nvme_paths=nvme, host_memory="64MiB", threads=1))
    optimizer = zo.AdamW(model.parameters())
    model(tokens).backward()
    optimizer.step()
    assert list(nvme.iterdir()) != []
    del model, optimizer
    gc.collect()
    gc.collect()
    assert leftovers(nvme) == []
