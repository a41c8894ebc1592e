"""`zerooffload export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from zerooffload.train import checkpoint_in, export_run, recorded_recipe
from zerooffload.train.ranks import is_first_rank

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Output:
    """What is written.

    Attributes
    ----------
    folder : pathlib.Path
    dtype : str, optional
        fp32, bf16 or fp16; None as it was trained.
    max_shard_size : str
        Bytes of a file.
    overwrite : bool
        Replace a folder that holds weights.
    """

    folder: Path
    dtype: str | None = None
    max_shard_size: str = "5GB"
    overwrite: bool = False


def export_from(path: Path, overrides: list[str], output: Output) -> None:
    """Write the model of the run in an nvme path, or of a checkpoint, and say so.

    Raises
    ------
    ZeroOffloadError
        If there is no such run, a setting does not work, or the folder cannot be written.
    """
    step = export_run(
        recorded_recipe(path, overrides),
        output.folder,
        checkpoint=checkpoint_in(path),
        dtype=_DTYPES[output.dtype] if output.dtype else None,
        max_shard_size=output.max_shard_size,
        overwrite=output.overwrite,
    )
    if is_first_rank():
        Console().print(f"model of step {step} written to {output.folder}", highlight=False)
