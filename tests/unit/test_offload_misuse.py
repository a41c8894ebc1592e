"""`zo.offload` on what cannot work: a clear error, and neither the model nor the folder touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerooffload as zo
from zerooffload.sharding.registry import residence_of

Offload = Callable[..., nn.Module]
MakeNet = Callable[..., nn.Module]


def untouched(model: nn.Module, plain: nn.Module) -> bool:
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return all(residence_of(ours) is None and torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_model_without_parameters_is_refused(offload: Offload) -> None:
    with pytest.raises(zo.ConfigError, match="no parameters"):
        offload(nn.ReLU(), "nvme")


def test_a_module_on_the_meta_device_that_cannot_be_initialised_is_refused_by_name(offload: Offload) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
        model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    with pytest.raises(zo.ConfigError, match=r"Sequential.* is on the meta device and has neither reset_parameters"):
        offload(model, "nvme")


def test_gradients_that_are_there_are_refused_by_name(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = make_net()
    model(tokens).backward()
    with pytest.raises(zo.ConfigError, match=r"embed\.weight has a gradient: call model\.zero_grad"):
        offload(model, "nvme")
    model.zero_grad()
    offload(model, "nvme")


def test_offloading_twice_is_refused_and_the_first_run_goes_on(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = offload(make_net(), "nvme")
    for part in (model, model.layers, nn.Sequential(model)):
        with pytest.raises(zo.ConfigError, match="offloaded already"):
            zo.offload(part)
    assert torch.equal(model(tokens), make_net()(tokens))


def test_a_model_whose_values_went_with_a_closed_run_is_refused(offload: Offload, make_net: MakeNet) -> None:
    model = offload(make_net(), "nvme")
    zo.close(model)
    with pytest.raises(zo.ConfigError, match="belonged to a run that was closed"):
        offload(model, "nvme")


def test_a_model_that_never_moved_can_be_offloaded_again(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    model = offload(make_net(), "host")
    zo.close(model)
    zo.close(model)
    offload(model, "nvme")
    assert torch.equal(model(tokens), make_net()(tokens))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_torchs_optimizer_from_before_meets_our_words_at_its_step(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, optimizer: type[torch.optim.Optimizer]
) -> None:
    model = make_net()
    theirs = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    offload(model, "nvme")
    model(tokens).backward()
    with pytest.raises((zo.ConfigError, RuntimeError), match=r"zo\.AdamW|single memory location"):
        theirs.step()


@pytest.mark.parametrize("units", [["nothing.*"], [nn.Conv2d], lambda *_: False], ids=["pattern", "class", "callable"])
def test_units_that_match_nothing_are_refused(offload: Offload, make_net: MakeNet, units: Any) -> None:
    model = make_net()
    with pytest.raises(zo.ConfigError, match="matches no module"):
        offload(model, "nvme", units=units)
    assert untouched(model, make_net())


def test_a_home_for_units_that_do_not_exist_is_told(offload: Offload, make_net: MakeNet) -> None:
    with pytest.raises(zo.ConfigError, match=r"layerz\.\*"):
        offload(make_net(), "nvme", params={"layerz.*": "nvme"})


@pytest.mark.parametrize("dtype", [torch.float64])
def test_parameters_that_cannot_be_trained_are_refused(offload: Offload, make_net: MakeNet, dtype: torch.dtype) -> None:
    with pytest.raises(zo.ConfigError, match=f"{dtype} cannot be trained"):
        offload(make_net().to(dtype), "nvme")


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_an_nvme_path_that_is_no_folder_is_refused(
    offload: Offload, make_net: MakeNet, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_text("mine")
    model = make_net()
    with pytest.raises(zo.ConfigError, match=f"{path} is not a folder"):
        offload(model, "nvme", nvme_paths=[path])
    assert untouched(model, make_net())
    assert path.exists() == (kind == "file")


def test_a_folder_that_cannot_be_written_to_is_refused(
    offload: Offload, make_net: MakeNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Root may write everywhere.
    monkeypatch.setattr(Path, "mkdir", refuse)
    model = make_net()
    with pytest.raises(zo.ConfigError, match="is not writable"):
        offload(model, "nvme")
    assert untouched(model, make_net())


def test_a_folder_in_use_is_refused_and_its_run_goes_on(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor
) -> None:
    first, second = offload(make_net(), "nvme"), make_net(seed=1)
    with pytest.raises(zo.ConfigError, match="in use by another run"):
        offload(second, "nvme")
    assert untouched(second, make_net(seed=1))
    assert torch.equal(first(tokens), make_net()(tokens))
    zo.close(first)
    offload(second, "nvme")


@pytest.mark.parametrize("field", ["host_memory", "nvme_space", "device_memory"])
def test_a_budget_one_byte_too_small_is_refused_and_the_smallest_change_helps(
    offload: Offload, make_net: MakeNet, tokens: torch.Tensor, nvme: Path, field: str
) -> None:
    model = make_net()
    with pytest.raises(zo.BudgetError) as caught:
        offload(model, "nvme", **{field: 0})
    least = int(str(caught.value).split(f'{field} = "')[1].split("B")[0])
    with pytest.raises(zo.BudgetError, match="1 bytes more"):
        offload(model, "nvme", **{field: least - 1})
    assert untouched(model, make_net())
    assert list(nvme.iterdir()) == []
    offload(model, "nvme", **{field: least})
    optimizer = zo.AdamW(model.parameters())
    model(tokens).backward()
    zo.clip_grad_norm_(model, 1.0)
    optimizer.step()


def test_a_full_disk_is_refused_before_the_model_is_touched(
    offload: Offload, make_net: MakeNet, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_space)
    model = make_net()
    with pytest.raises(zo.TierIOError, match="free space, or name another path"):
        offload(model, "nvme")
    assert untouched(model, make_net())
    assert list(nvme.iterdir()) == []


def test_asking_about_a_model_that_is_not_offloaded_is_refused(make_net: MakeNet) -> None:
    for ask in (zo.step_report, lambda model: zo.clip_grad_norm_(model, 1.0)):
        with pytest.raises(zo.ConfigError, match="not offloaded"):
            ask(make_net())
    with pytest.raises(zo.ConfigError, match="not offloaded"):
        zo.step_report(nn.ReLU())
    zo.close(make_net())
    zo.close(nn.ReLU())
