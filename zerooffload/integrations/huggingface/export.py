"""Export of an offloaded model to a folder that the Hugging Face libraries load, in the memory that it trains in."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerooffload.checkpoint.safetensors_file import SafetensorsFile
from zerooffload.checkpoint.staged_folder import StagedFolder
from zerooffload.checkpoint.weights_folder import INDEX_FILE
from zerooffload.checkpoint.weights_writer import (
    PlannedFile,
    Spans,
    WeightsWriter,
    check_complete,
    create_files,
    index_of,
    plan_files,
    write_json,
)
from zerooffload.entry.runs import run_of_all_stages
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.formats import parse_bytes
from zerooffload.integrations.huggingface.exported_tensors import (
    adapter_tensors,
    base_model_tensors,
    is_of_transformers,
    model_tensors,
    tied_names,
)
from zerooffload.integrations.huggingface.models import transformers_errors
from zerooffload.runtime.param_access import units_of
from zerooffload.runtime.run import Run
from zerooffload.runtime.weight_export import FileTensor, write_buffers, write_parameters
from zerooffload.sharding.collectives import agree, gather_from_all, writing_role
from zerooffload.sharding.registry import residence_of
from zerooffload.sharding.unit import Unit

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ADAPTER_FOLDER = "adapter"


def export_safetensors(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    base_model: bool = False,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> None:
    """Write a folder that `from_pretrained` loads, piece by piece: no tensor is ever whole in memory.

        zo.export_safetensors(model, "my-model")

    The folder has its name when every byte in it was read back from the drive and compared with what was sent; until
    then it is a hidden one beside. It holds config.json and generation_config.json where the model has them. Of a model
    with adapters of peft it holds these alone, as peft does. All ranks call it, and see the same file system.

    Parameters
    ----------
    directory : path
        New or empty; its parent exists.
    dtype : torch.dtype, optional
        float32, bfloat16 or float16, of what is floating-point. Default: each tensor as it computes. With float32, what
        is trained in 16 bits is written as its exact fp32 master; other conversions round once, from the master.
    max_shard_size : int or str
        Bytes of tensors in a file; a larger tensor has a file of its own.
    base_model : bool
        Of a model with adapters, write the model below them, and the adapters to the folder "adapter" inside.
    tokenizer : optional
        Of transformers: its files go into the folder.
    overwrite : bool
        Replace a folder that holds weights already, with all that is in it.

    Raises
    ------
    ConfigError
        If the model is not offloaded, is in use, a stage of a pipeline, or cannot be stored in a way that loads; if the
        directory cannot be made, or holds files.
    CheckpointError
        If the files cannot be written, or do not hold what they were given. Nothing of them is left then.
    """
    run = run_of_all_stages(model, "zo.export_safetensors")
    _, units = units_of(model)
    ranks = run.collectives
    is_first, writes = writing_role(ranks)

    def plan() -> tuple[StagedFolder, list[_Weights]]:
        weights = _weights_of(model, _checked(dtype), _most_nbytes(max_shard_size), base_model=base_model)
        return StagedFolder(Path(directory), replace=overwrite), weights

    def finish() -> None:
        if tokenizer is not None:
            with transformers_errors("the tokenizer cannot be written"):
                tokenizer.save_pretrained(folder.path)
        _finish(folder, weights, written)

    def write() -> list[Spans]:
        return [part.write(run, units, folder.path, buffers=is_first) for part in weights if writes]

    folder, weights = agree(ranks, plan, "planning the export")
    try:
        agree(ranks, lambda: _create(folder, weights) if is_first else None, "making the folder")
        written = gather_from_all(ranks, agree(ranks, write, "writing the weights"))
        agree(ranks, lambda: finish() if is_first else None, "finishing the folder")
    finally:
        folder.discard()


@dataclass(frozen=True)
class _Weights:
    """Weights that belong together, their place in the folder, and what is written beside them."""

    place: str
    tensors: list[FileTensor]
    files: list[PlannedFile]
    write_configs: Callable[[Path], None]

    def write(self, run: Run, units: list[Unit], folder: Path, *, buffers: bool) -> Spans:
        """Write what is this rank's, and see that the drive keeps it."""
        params = [tensor for tensor in self.tensors if residence_of(tensor.source) is not None]
        others = [tensor for tensor in self.tensors if residence_of(tensor.source) is None]
        with WeightsWriter(folder / self.place, self.files) as writer:
            write_parameters(run, units, params, writer)
            if buffers:
                write_buffers(others, writer)
            writer.verify()
            return writer.spans


def _weights_of(model: nn.Module, dtype: torch.dtype | None, most_nbytes: int, *, base_model: bool) -> list[_Weights]:
    adapters: Mapping[str, Any] = getattr(model, "peft_config", {})
    if not adapters:
        return [_model(model, model_tensors(model, dtype), most_nbytes)]
    weights = []
    root = Path()
    if base_model:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        weights.append(_model(base, base_model_tensors(base, dtype), most_nbytes))
        root = Path(_ADAPTER_FOLDER)
    for name, config in adapters.items():
        tensors = adapter_tensors(model, name, dtype)
        place = root if name == "default" else root / name
        weights.append(
            _Weights(str(place), tensors, _files(tensors, stem="adapter_model"), partial(_write_adapter, model, config))
        )
    return weights


def _model(model: nn.Module, tensors: list[FileTensor], most_nbytes: int) -> _Weights:
    if is_of_transformers(model):
        return _Weights("", tensors, _files(tensors, most_nbytes), partial(_write_configs, model, tensors))
    return _Weights("", tensors, _files(tensors, most_nbytes, metadata=tied_names(model)), lambda _: None)


def _files(
    tensors: Iterable[FileTensor],
    most_nbytes: int = sys.maxsize,
    *,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> list[PlannedFile]:
    specs = ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    return plan_files(specs, most_nbytes, stem=stem, metadata=metadata)


def _create(folder: StagedFolder, weights: Sequence[_Weights]) -> None:
    folder.create()
    for part in weights:
        (folder.path / part.place).mkdir(parents=True, exist_ok=True)
        create_files(folder.path / part.place, part.files)


def _finish(folder: StagedFolder, weights: Sequence[_Weights], written: Sequence[Sequence[Spans]]) -> None:
    """See that all is there, write what is small, and give the folder its name."""
    for number, part in enumerate(weights):
        place = folder.path / part.place
        check_complete(part.files, (of_rank[number] for of_rank in written if of_rank))
        for planned in part.files:
            with SafetensorsFile(place / planned.name) as file:
                if file.header != planned.header:
                    raise CheckpointError(f"{file.path} names other tensors than were written")
        if len(part.files) > 1:
            write_json(place / INDEX_FILE, index_of(part.files))
        with transformers_errors("the model's configuration cannot be written"):
            part.write_configs(place)
    folder.commit()


def _write_configs(model: Any, tensors: Sequence[FileTensor], place: Path) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = _main_dtype(tensors)
    config.architectures = [type(model).__name__]
    if type(model).__module__.startswith("transformers_modules."):
        # Code that came with the model goes with it.
        modules: Any = import_module("transformers.dynamic_module_utils")
        modules.custom_object_save(model, place, config=config)
    config.save_pretrained(place)
    if model.can_generate():
        model.generation_config.save_pretrained(place)


def _write_adapter(model: Any, config: Any, place: Path) -> None:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = copy.copy(config)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    # Without a task, peft finds the class of the model below by its name.
    kind = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(place, auto_mapping_dict=kind if config.task_type is None else None)


def _main_dtype(tensors: Iterable[FileTensor]) -> torch.dtype:
    """That of most elements."""
    numels: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            numels[tensor.dtype] = numels.get(tensor.dtype, 0) + tensor.numel
    return max(numels, key=lambda dtype: numels[dtype], default=torch.float32)


def _checked(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype not in (None, *_DTYPES):
        raise ConfigError(f"dtype must be None or one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    return dtype


def _most_nbytes(max_shard_size: int | str) -> int:
    try:
        nbytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise ConfigError(f"max_shard_size: {error}") from error
    if not nbytes:
        raise ConfigError("max_shard_size must be more than 0")
    return nbytes
