from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from support.stored_weights import read_weights

from zerooffload import CheckpointError
from zerooffload.checkpoint.weights_folder import WeightsFolder, weight_files

if TYPE_CHECKING:
    from pathlib import Path


WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor([True, False]),
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(5, dtype=torch.int64),
}


def test_weights_are_read_as_the_library_wrote_them(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = read_weights(tmp_path)
    assert read.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor)


def test_an_index_names_the_files(tmp_path: Path) -> None:
    save_file({"a": WEIGHTS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": WEIGHTS["b"]}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weights(tmp_path).keys() == {"a", "b"}


@pytest.mark.parametrize("name", ["missing.safetensors", "../one.safetensors", "/etc/hostname"])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="names"):
        weight_files(tmp_path)


def test_a_folder_without_safetensors_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="convert"):
        read_weights(tmp_path)


def test_an_index_and_its_files_agree(tmp_path: Path) -> None:
    save_file({"a": WEIGHTS["a"]}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match="tensor b is not in it"):
        WeightsFolder(tmp_path)
    save_file({"a": WEIGHTS["a"], "c": WEIGHTS["c"]}, tmp_path / "one.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match="tensor c is not in the index"):
        WeightsFolder(tmp_path)


def test_links_are_followed_within_the_folder_and_into_the_cache_of_the_hub(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "revision", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(WEIGHTS, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert read_weights(snapshot).keys() == WEIGHTS.keys()
    elsewhere = tmp_path / "folder"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").symlink_to(blobs / "0123")
    with pytest.raises(CheckpointError, match="leaves the folder"):
        read_weights(elsewhere)
