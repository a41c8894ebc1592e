from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from zerooffload import ConfigError, OffloadConfig


def test_defaults_place_everything_automatically_and_bound_nothing() -> None:
    config = OffloadConfig()
    assert (config.params, config.optimizer, config.gradients) == ("auto", "auto", "auto")
    assert (config.device_memory, config.host_memory, config.nvme_space) == (None, None, None)
    assert config.torch_compute_dtype is None


@pytest.mark.parametrize(("said", "accumulates"), [(None, False), (1, False), (2, True), (64, True)])
def test_more_than_one_backward_a_step_accumulates(said: int | None, accumulates: bool) -> None:  # noqa: FBT001
    assert OffloadConfig(accumulation_steps=said).accumulates == accumulates


def test_byte_counts_take_integers_and_texts() -> None:
    config = OffloadConfig(host_memory="2GiB", device_memory=17)
    assert (config.host_memory, config.device_memory) == (2 << 30, 17)


def test_activations_and_slices() -> None:
    config = OffloadConfig(
        micro_batch_size=2,
        activations={"layers.*": "host"},
        activation_memory={"host": "1MiB"},
        slice_rules={"mask": "batch"},
    )
    assert config.activation_memory == {"host": 1 << 20}
    assert not config.keeps_activations_on_nvme
    assert OffloadConfig(activations={"*": "nvme"}, nvme_paths=["/"]).keeps_activations_on_nvme
    wrong: dict[str, Any]
    for wrong in (
        {"micro_batch_size": 0},
        {"micro_batch_size": True},
        {"activations": "disk"},
        {"activation_memory": {"disk": 1}},
        {"slice_rules": {"mask": "half"}},
        {"activations": "nvme"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            OffloadConfig(**wrong)


def test_a_single_path_is_a_list_of_one() -> None:
    assert OffloadConfig(nvme_paths="/mnt/a").nvme_paths == (Path("/mnt/a"),)
    assert OffloadConfig(nvme_paths=["/mnt/a", Path("/mnt/b")]).nvme_paths == (Path("/mnt/a"), Path("/mnt/b"))


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_compute_dtype_is_torchs(name: str, dtype: torch.dtype) -> None:
    assert OffloadConfig(compute_dtype=name).torch_compute_dtype is dtype


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hots_memory": "1GiB"}, ["hots_memory", "unknown setting"]),
        ({"host_memory": "24"}, ["host_memory", "unit", "'24'"]),
        ({"host_memory": -1}, ["host_memory", "-1"]),
        ({"params": "disk"}, ["params", "'disk'"]),
        ({"params": {"layers.*": "disk"}}, ["params", "'disk'"]),
        ({"stage": 4}, ["stage", "4"]),
        ({"threads": 0}, ["threads", "0"]),
        ({"accumulation_steps": 0}, ["accumulation_steps", "0"]),
        ({"accumulation_steps": -4}, ["accumulation_steps", "-4"]),
        ({"accumulation_steps": 2.5}, ["accumulation_steps", "2.5"]),
        ({"accumulation_steps": "four"}, ["accumulation_steps", "'four'"]),
        ({"accumulation_steps": True}, ["accumulation_steps", "True"]),
        ({"io_engine": "libaio"}, ["io_engine", "'libaio'"]),
        ({"update": "someday"}, ["update", "'someday'"]),
        ({"compute_dtype": "fp64"}, ["compute_dtype", "'fp64'"]),
        ({"moments": "4bit"}, ["moments", "'4bit'"]),
        ({"algorithm": "adam8bit"}, ["algorithm", "'adam8bit'"]),
        ({"params": "nvme"}, ["nvme", "nvme_paths is empty"]),
        ({"gradients": {"*": "nvme"}}, ["nvme", "nvme_paths is empty"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_given(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(**fields)
    for word in words:
        assert word in str(caught.value)


def test_all_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="2 wrong") as caught:
        OffloadConfig(threads=0, colour="red")
    assert "threads" in str(caught.value)
    assert "colour" in str(caught.value)


def test_a_config_is_frozen_and_keyword_only() -> None:
    config = OffloadConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.threads = 3
    with pytest.raises(TypeError):
        OffloadConfig("nvme")  # type: ignore[call-arg]


def test_toml_and_mapping_give_the_same_config(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = 'params = "nvme"\nnvme_paths = ["/mnt/a"]\nhost_memory = "1GiB"\n[optimizer]\n"layers.*" = "nvme"\n'
    file.write_text(text)
    fields = {
        "params": "nvme",
        "nvme_paths": ["/mnt/a"],
        "host_memory": "1GiB",
        "optimizer": {"layers.*": "nvme"},
    }
    assert OffloadConfig.from_toml(file) == OffloadConfig.from_mapping(fields)


@pytest.mark.parametrize("text", [None, "params = ", "colour = 'red'"])
def test_a_toml_that_is_missing_broken_or_wrong_is_refused_with_its_reason(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "run.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="colour" if text == "colour = 'red'" else str(file)):
        OffloadConfig.from_toml(file)
