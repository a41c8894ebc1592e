"""Weights that are read in place: folders of them, what was read, and what a model's states are afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import nn

import zerooffload as zo
from zerooffload.checkpoint.safetensors_file import SafetensorsFile
from zerooffload.checkpoint.stored_tensor import read_whole
from zerooffload.checkpoint.weights_folder import WeightsFolder


def save_folder(folder: Path, tensors: Mapping[str, torch.Tensor], num_files: int = 1) -> Path:
    """A folder with these tensors, in one file or in several with an index."""
    folder.mkdir(exist_ok=True)
    if num_files == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {name: f"part-{number % num_files}.safetensors" for number, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder, as ours are read."""
    with WeightsFolder(folder) as weights:
        return {name: read_whole(tensor) for name, tensor in weights.tensors().items()}


@contextmanager
def elements_read() -> Iterator[dict[str, list[tuple[int, int]]]]:
    """For each tensor, the ranges of elements that are read from safetensors files, in their order."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    read = SafetensorsFile.read

    def counted(self: SafetensorsFile, name: str, first: int, target: torch.Tensor) -> None:
        ranges.setdefault(name, []).append((first, first + target.numel()))
        read(self, name, first, target)

    with mock.patch.object(SafetensorsFile, "read", counted):
        yield ranges


def states_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and what a step makes of the parameters, in which their fp32 masters show; ends the run."""
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    with zo.full_params(model, grads=True):
        states = {name: param.detach().clone() for name, param in model.named_parameters()}
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.full_like(param, 1e-3)
    states |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer.step()
    with zo.full_params(model, writeback=False):
        states |= {f"{name} stepped": param.detach().clone() for name, param in model.named_parameters()}
    zo.close(model)
    return states


def assert_same_states(states: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert states.keys() == expected.keys()
    for name, tensor in states.items():
        assert tensor.dtype is expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@contextmanager
def bytes_read(folder: Path) -> Iterator[list[int]]:
    """The bytes of each read of a safetensors file in a folder, those of headers included."""
    reads: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(fd, buffers, offset)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.parent == folder and path.suffix == ".safetensors":
            reads.append(count)
        return count

    with mock.patch("os.preadv", counted):
        yield reads
