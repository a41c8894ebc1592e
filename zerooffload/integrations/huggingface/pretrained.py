"""Models whose weights are read from a folder straight to their homes."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerooffload.checkpoint.gguf_file import GgufFile
from zerooffload.checkpoint.model_weights import ModelWeights, match, refuse_incomplete, shortened
from zerooffload.checkpoint.stored_tensor import StoredTensor
from zerooffload.checkpoint.weights_folder import WeightsFolder
from zerooffload.config import OffloadConfig
from zerooffload.entry.offloading import offload_opened
from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.integrations.huggingface.conversion import converted
from zerooffload.integrations.huggingface.gguf_llama import llama_tensors
from zerooffload.integrations.huggingface.models import (
    ModelSource,
    build_model,
    is_gguf,
    model_config,
    resolve_folder,
    transformers_errors,
)

_log = logging.getLogger("zerooffload")


def load_pretrained(
    name: str | os.PathLike[str],
    config: OffloadConfig | None = None,
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    model_class: Any = None,
    strict: bool = True,
    trust_remote_code: bool = False,
) -> nn.Module:
    """An offloaded model of transformers whose weights are read straight to their homes, each rank its own part.

        model = zo.load_pretrained("path/to/folder", zo.OffloadConfig(params="nvme", optimizer="nvme", ...))

    The model never exists whole in memory. Parameters have the dtype that most weights are stored in, or
    `config.compute_dtype`; masters are the stored numbers. The model is in training mode.

    Parameters
    ----------
    name : path or str
        A folder with config.json and safetensors files; the GGUF file of a Llama, which is dequantized to fp32; or a
        name on the hub, which is fetched unless it is cached.
    config, process_group
        See `zo.offload`.
    model_class : type, optional
        A class of transformers, such as `AutoModelForSequenceClassification`. Default: the one that config.json names.
    strict : bool
        Refuse weights that are missing, or that the model has no place for. With False they are told in a warning, and
        missing ones are initialised as the model does it.
    trust_remote_code : bool
        Run Python code that comes with the model.

    Returns
    -------
    torch.nn.Module
        The model, as from `zo.offload`.

    Raises
    ------
    ConfigError
        If transformers is missing or knows no such model; if its weights are quantized, or are more than put together
        when they are loaded.
    CheckpointError
        If files cannot be read, are damaged or lead elsewhere, or hold other weights than the model's; they are named.
    BudgetError, TierIOError
        See `zo.offload`.
    """
    source = ModelSource(name=os.fspath(name), model_class=model_class, trust_remote_code=trust_remote_code)
    return offload_opened(lambda: opened_model(source, strict=strict, as_saved=True), config, process_group)


@contextmanager
def opened_model(
    source: ModelSource, config: Any = None, *, strict: bool = True, as_saved: bool = False
) -> Iterator[tuple[nn.Module, ModelWeights]]:
    """A model without values, and where they are read from, as long as the context lasts.

    Parameters
    ----------
    config : transformers.PreTrainedConfig, optional
        Default: the folder's.
    as_saved : bool
        Without a class in `source`, make the one that the configuration names.

    Raises
    ------
    ConfigError, CheckpointError
        See `load_pretrained`.
    """
    config = config if config is not None else model_config(source)
    if as_saved and source.model_class is None:
        source = replace(source, model_class=_class_named_in(config))
    with _opened_tensors(source, config) as (stored, place):
        num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
        if strict and num_layers > len(stored):
            # Before modules are made of it.
            raise CheckpointError(f"{place}: {num_layers} layers cannot be made of {len(stored)} tensors")
        with torch.device("meta"):
            model = build_model(replace(source, dtype=_most_common_dtype(stored.values())), config)
        _keep_in_fp32(model)
        with transformers_errors(f"the weights in {place} cannot be converted"):
            tensors = converted(model, stored, str(place))
        found = _without_ignored(model, match(model, tensors, str(place)))
        if strict:
            refuse_incomplete(found, str(place), "Name the class that was saved as model_class, or say strict=False")
        else:
            _tell(found, place)
        _take_generation_config(model, place)
        yield model, found


@contextmanager
def _opened_tensors(source: ModelSource, config: Any) -> Iterator[tuple[dict[str, StoredTensor], Path]]:
    """The tensors of a folder or file, and which it is."""
    name = source.name or ""
    if is_gguf(name):
        with GgufFile(Path(name).expanduser()) as file:
            yield llama_tensors(file), file.path
        return
    folder = resolve_folder(name, trust_remote_code=source.trust_remote_code)
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"{folder} holds quantized weights: load the model with from_pretrained, and hand it to zo.offload"
        )
    with WeightsFolder(folder) as weights:
        yield weights.tensors(), folder


def _class_named_in(config: Any) -> Any:
    """The class that saved the model; None where it is not one of transformers' own."""
    names = getattr(config, "architectures", None) or [None]
    with transformers_errors("the model's class cannot be used"):
        transformers = import_module("transformers")
        kind = getattr(transformers, str(names[0]), None)
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        # A model of one's own may have the name of another.
        return kind if is_model and not getattr(config, "auto_map", None) else None


def _most_common_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype:
    """Of the floating-point bytes; float32 if there are none."""
    nbytes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            own_nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
            nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + own_nbytes
    return max(nbytes, key=lambda dtype: nbytes[dtype], default=torch.float32)


def _keep_in_fp32(model: Any) -> None:
    """What must not be computed in 16 bits, as transformers' models say."""
    dtype = next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)
    patterns: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        patterns.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        patterns.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, param in model.named_parameters():
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns):
            param.data = param.data.float()


def _without_ignored(model: Any, weights: ModelWeights) -> ModelWeights:
    """Leave out what transformers knows to be missing in checkpoints, or of no use."""
    unused = {*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())}
    # Buffers that older versions saved.
    buffers = [name for name, _ in model.named_buffers()]
    unused |= {
        pattern
        for pattern in (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
        if any(re.search(pattern, name) for name in buffers)
    }
    absent = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return replace(
        weights,
        missing=tuple(name for name in weights.missing if not any(re.search(each, name) for each in absent)),
        unexpected=tuple(name for name in weights.unexpected if not any(re.search(each, name) for each in unused)),
    )


def _tell(weights: ModelWeights, place: Path) -> None:
    if weights.missing:
        _log.warning("%s lacks weights, which are new: %s", place, shortened(weights.missing))
    if weights.unexpected:
        _log.warning("%s holds tensors that the model has no place for: %s", place, shortened(weights.unexpected))


def _take_generation_config(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        with transformers_errors(f"the generation settings in {folder} cannot be used"):
            from transformers import GenerationConfig  # noqa: PLC0415 - an extra

            model.generation_config = GenerationConfig.from_pretrained(folder)
