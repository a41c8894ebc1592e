from __future__ import annotations

import os
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from zerooffload import CheckpointError
from zerooffload.checkpoint.boxes import Box
from zerooffload.checkpoint.dcp_reader import METADATA_FILE, DcpReader, prefix_of
from zerooffload.checkpoint.dcp_writer import DcpWriter, write_metadata

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHT = torch.arange(12, dtype=torch.float32).view(3, 4)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """One process's checkpoint: a matrix and a scalar."""
    folder = tmp_path / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": WEIGHT, "s": torch.tensor(3.0), "e": torch.empty(0, 2)}, "n": 5}, checkpoint_id=folder)
    return folder


def test_what_torch_wrote_is_read_in_pieces(saved: Path) -> None:
    with DcpReader(saved) as reader:
        assert {name: tensor.shape for name, tensor in reader.tensors.items()} == {
            "model.w": (3, 4),
            "model.s": (),
            "model.e": (0, 2),
        }
        assert reader.read("model.w", 3, 9).tolist() == [3, 4, 5, 6, 7, 8]
        assert reader.read("model.s", 0, 1).tolist() == [3]
        assert reader.read("model.e", 0, 0).tolist() == []


def test_torch_reads_what_was_written_in_pieces(tmp_path: Path) -> None:
    written = []
    for rank, (start, stop) in enumerate([(0, 5), (5, 12)]):
        with DcpWriter(tmp_path, rank) as writer:
            writer.write(("model", "w"), Box.of_all((3, 4)), start, WEIGHT.view(-1)[start:stop])
            columns = Box((3, 4), (0, 2 * rank), (3, 2))
            writer.write(("model", "cut"), columns, 0, WEIGHT[:, 2 * rank : 2 * rank + 2].flatten())
            if rank:
                writer.write(("model", "s"), Box.of_all(()), 0, torch.tensor([2.0]))
                writer.write(("model", "e"), Box.of_all((0, 2)), 0, torch.empty(0))
                writer.write_value(("lr",), 0.5)
            writer.finish()
            written.append(writer.written)
    write_metadata(tmp_path, written, {("model", "tied"): ("model", "w")})
    tensors = {name: torch.zeros(3, 4) for name in ("w", "cut", "tied")}
    tensors |= {"s": torch.zeros(()), "e": torch.zeros(0, 2)}
    states = {"model": tensors, "lr": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(states, checkpoint_id=tmp_path)
    assert torch.equal(tensors["w"], WEIGHT)
    assert torch.equal(tensors["cut"], WEIGHT)
    assert torch.equal(tensors["tied"], WEIGHT)
    assert (tensors["s"].item(), states["lr"]) == (2.0, 0.5)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def change(saved: Path, edit: Callable[[Any], None]) -> None:
    metadata = pickle.loads((saved / METADATA_FILE).read_bytes())  # noqa: S301 - written above
    edit(metadata)
    (saved / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def elsewhere(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../checkpoint/" + info.relative_path


def beyond(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = 1 << 40


def outside(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].size = torch.Size([2, 4])


def lacking(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].size = torch.Size([5, 4])


def other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].properties.dtype = torch.int32


def nowhere(metadata: Any) -> None:
    metadata.storage_data = {}


def harmful(metadata: Any) -> None:
    metadata.planner_data = Harmful()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (elsewhere, "no file of that folder"),
        (beyond, "incomplete"),
        (outside, "outside of it"),
        (lacking, r"elements of model\.w are missing"),
        (other_dtype, "not what was saved"),
        (nowhere, "cannot be used"),
        (harmful, r"asks for posix\.mkdir"),
    ],
)
def test_a_checkpoint_that_is_not_what_it_says_is_refused(
    edit: Callable[[Any], None], message: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    change(saved, edit)
    with pytest.raises(CheckpointError, match=message), DcpReader(saved) as reader:
        reader.read("model.w", 0, torch.Size(reader.tensors["model.w"].shape).numel())
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [None, b"", b"noise", pickle.dumps({"a": 1}), pickle.dumps([])[:-1]])
def test_what_is_no_checkpoint_is_told(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / METADATA_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"metadata|holds no checkpoint"):
        DcpReader(tmp_path)


def test_a_file_that_is_a_link_is_not_followed(saved: Path, tmp_path: Path) -> None:
    (file,) = saved.glob("*.distcp")
    file.rename(tmp_path / "real")
    file.symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError), DcpReader(saved) as reader:
        reader.read("model.w", 0, 12)


@pytest.mark.parametrize(
    ("names", "of_states", "expected"),
    [
        (["w", "v"], False, ""),
        (["model.w", "model.v", "optimizer.state.w"], False, "model."),
        (["app.model.w", "ema.x.v"], False, None),
        (["x"], False, "nothing"),
        (["optimizer.state.w", "model.w", "model.v"], True, "optimizer.state."),
        (["state.w"], True, "state."),
        (["state.w", "state.v"], False, "state."),
    ],
)
def test_a_model_is_found_whatever_it_is_called(
    names: list[str],
    of_states: bool,  # noqa: FBT001
    expected: str | None,
    tmp_path: Path,
) -> None:
    if expected is None:
        with pytest.raises(CheckpointError, match="several models"):
            prefix_of(names, ["w", "v"], tmp_path, of_states=of_states)
    else:
        found = prefix_of(names, ["w", "v"], tmp_path, of_states=of_states)
        assert found == (None if expected == "nothing" else expected)
