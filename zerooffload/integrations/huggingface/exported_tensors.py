"""Which tensors the files of a model hold, under which names, and where in the model their elements are.

[Note: tensors that stand for others]
Libraries know best how they name what they save, and how they cut what they have packed (experts that are one
parameter). They are asked with tensors on the meta device, one for each of the model's own; what comes back is a view
of one of these, whose offset tells where its elements are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zerooffload.errors import ConfigError
from zerooffload.integrations.huggingface.models import transformers_errors
from zerooffload.runtime.weight_export import FileTensor, check_sources, file_dtype
from zerooffload.sharding.stored import parts_of

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and checkpoint wrappers put into names."""

Tensors = dict[str, torch.Tensor]


def is_of_transformers(model: nn.Module) -> bool:
    """Whether the model has a configuration that goes into its folder."""
    return hasattr(getattr(model, "config", None), "save_pretrained") and hasattr(model, "save_pretrained")


def model_tensors(model: nn.Module, dtype: torch.dtype | None) -> list[FileTensor]:
    """Of a model without adapters: as `save_pretrained` of transformers names them, or as `state_dict` does.

    A tied weight is there once where the model ties it when it is loaded.

    Raises
    ------
    ConfigError
        If the files could not be loaded: for quantized weights, extra states, and layouts that cannot be cut out.
    """
    return _made_by(_saved(model, state_tensors(model)), lambda stand_ins: _on_disk(model, stand_ins), dtype)


def base_model_tensors(base: nn.Module, dtype: torch.dtype | None) -> list[FileTensor]:
    """Of a model that peft has put adapters into: its own weights, under the names that they had before.

    Raises
    ------
    ConfigError
        As `model_tensors`; if there are others than its class has.
    """
    tensors = _without_adapters(base)
    with torch.device("meta"):
        expected = state_tensors(type(base)(base.config)).keys()
    if tensors.keys() != expected:
        (odd, *_) = sorted(tensors.keys() ^ expected)
        raise ConfigError(f"the model below the adapters cannot be told from them: {odd} has no match")
    return _made_by(_saved(base, tensors), lambda stand_ins: _on_disk(base, stand_ins), dtype)


def adapter_tensors(model: nn.Module, adapter: str, dtype: torch.dtype | None) -> list[FileTensor]:
    """Of one of peft's adapters, as `save_pretrained` of peft names them.

    Raises
    ------
    ConfigError
        If peft cannot tell.
    """
    # Adapters that transformers itself put into a model have no prefix there.
    prefix = "" if hasattr(model, "get_base_model") else "base_model.model."

    def of_adapter(stand_ins: Tensors) -> Tensors:
        peft: Any = import_module("peft")
        named = peft.get_peft_model_state_dict(model, state_dict=stand_ins, adapter_name=adapter)
        return {prefix + name: tensor for name, tensor in named.items()}

    return _made_by(state_tensors(model, opaque=False), of_adapter, dtype, is_whole=False)


def state_tensors(model: nn.Module, *, opaque: bool = True) -> Tensors:
    """The parameters and persistent buffers by all their names, in the order of `state_dict`.

    Parameters
    ----------
    opaque : bool
        Whether parameters made of other tensors are wanted; they are refused then, and else left out.

    Raises
    ------
    ConfigError
        If a module has an extra state, or one of those is wanted.
    """
    tensors: Tensors = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ConfigError(f"{path or 'the model'} has an extra state, which safetensors files cannot hold")
        own = {**module._parameters}
        own |= {
            name: value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        for name, tensor in own.items():
            if tensor is None:
                continue
            full = f"{path}.{name}" if path else name
            for wrapper in _WRAPPERS:
                full = full.replace(wrapper, "")
            if not parts_of(tensor):
                tensors[full] = tensor
            elif opaque:
                raise ConfigError(
                    f"{full} is a {type(tensor).__name__}, made of other tensors, which a folder of weights cannot"
                    " hold: export adapters alone, or load the model without quantization"
                )
    return tensors


def _saved(model: nn.Module, tensors: Tensors) -> Tensors:
    """Those that are saved: a tied one under the name that it is tied to, and nothing that the model leaves out."""
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    patterns = [
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    for names in _shared_names(tensors):
        if is_of_transformers(model):
            # Others, which no configuration ties again, are saved under each name.
            tied = [name for name in names if any(re.search(pattern, name) for pattern in patterns)]
            left_out |= set(tied if len(tied) < len(names) else names[1:])
        else:
            left_out |= set(names[1:])
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names that are in no file, as the safetensors library notes them: each with that of the same tensor."""
    return {name: names[0] for names in _shared_names(state_tensors(model)) for name in names[1:]}


def _shared_names(tensors: Tensors) -> Iterable[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return [of_one for of_one in names.values() if len(of_one) > 1]


def _without_adapters(base: nn.Module) -> Tensors:
    """The tensors of the model as it was, by the names that they had."""
    adapters: list[str] = []
    for path, module in base.named_modules():
        inside = [*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ())]
        if hasattr(module, "original_module"):
            inside.append("modules_to_save")
        adapters += [f"{path}.{name}" for name in inside]
    kept = {}
    for name, tensor in state_tensors(base).items():
        if not any(name == adapter or name.startswith(f"{adapter}.") for adapter in adapters):
            kept[re.sub(r"\.(base_layer|original_module)(?=\.)", "", name)] = tensor
    return kept


def _on_disk(model: nn.Module, stand_ins: Tensors) -> Tensors:
    """Under the names, and in the pieces, that files have: since transformers 5 a model may pack several into one."""
    if not is_of_transformers(model):
        return stand_ins
    try:
        loading: Any = import_module("transformers.core_model_loading")
    except ModuleNotFoundError:
        return stand_ins
    named: Tensors = loading.revert_weight_conversion(model, stand_ins)
    return named


class _EverythingIsAView(TorchFunctionMode):
    """Copies give the tensor itself, so that what comes out can be traced to what went in."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _made_by(
    tensors: Tensors, library: Callable[[Tensors], Tensors], dtype: torch.dtype | None, *, is_whole: bool = True
) -> list[FileTensor]:
    """What `library` makes of them; see [Note: tensors that stand for others]."""
    stand_ins: dict[int, torch.Tensor] = {}
    sources: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in stand_ins:
            stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            stand_ins[id(tensor)] = stand_in
            sources[_storage_of(stand_in)] = tensor
    with transformers_errors("the model's weights cannot be named"), _EverythingIsAView():
        named = library({name: stand_ins[id(tensor)] for name, tensor in tensors.items()})
    made = [_traced(name, view, sources, dtype) for name, view in named.items()]
    if is_whole:
        check_sources(made, tensors)
    return made


def _traced(
    name: str, view: torch.Tensor, sources: Mapping[int, torch.Tensor], dtype: torch.dtype | None
) -> FileTensor:
    source = sources.get(_storage_of(view))
    if source is None or not view.is_contiguous():
        raise ConfigError(
            f"{name} is no piece of a parameter in one run: transformers saves this model in a layout that cannot be"
            " written piece by piece. Use model.save_pretrained(folder), with a host budget that holds the model"
        )
    return FileTensor(name, tuple(view.shape), file_dtype(source, dtype), source, int(view.storage_offset()))


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
