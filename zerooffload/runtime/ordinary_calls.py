"""Calls that know nothing of offloading: each works within the budget, or is refused with what to do instead.

A forward is refused when parameters are not those any more that were offloaded (resized embeddings, new adapters).

`state_dict` and `load_state_dict` go through the homes; `.to` and its kin are let through where they change nothing
about the parameters; `copy.deepcopy` and pickling are refused, because a placeholder copies without an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zerooffload.errors import ConfigError
from zerooffload.runtime.param_access import keep_lease
from zerooffload.runtime.run import Run
from zerooffload.sharding.local_tensors import distributed_like, is_distributed, local_tensor
from zerooffload.sharding.registry import Residence, residence_of
from zerooffload.sharding.stored import parts_of, rebuilt
from zerooffload.sharding.unit import Unit

_GUARDED = ("_apply", "__deepcopy__", "__reduce_ex__", "load_state_dict", "_save_to_state_dict", "compile")


def make_ordinary_calls_right(model: nn.Module, run: Run) -> None:
    """Put the guards and hooks on `model` and its parts, until the run is closed."""
    # The guards live on the modules, and the run undoes them: neither may keep the other alive through this.
    guarded = []
    run_moves = run.moves
    copies = WeakIdKeyDictionary()
    loading: list[AbstractContextManager[None]] = []
    for module in model.modules():
        if not any(residence_of(param) is not None for param in module.parameters()):
            continue
        module.__dict__["_apply"] = _guarded_apply(module)
        module.__dict__["__deepcopy__"] = _refusal(
            "copy.deepcopy", "offload the copy instead, or copy parameters inside zo.full_params(model)"
        )
        module.__dict__["__reduce_ex__"] = _refusal(
            "pickling (torch.save of the module)", "save model.state_dict() instead"
        )
        module.__dict__["load_state_dict"] = _loading_to_the_end(module, loading)
        if any(is_distributed(param) for param in module.parameters()):
            module.__dict__["compile"] = _refusal(
                "compile", "torch traces no DTensor that is a part of a larger buffer; compile modules that are not cut"
            )
        guarded.append(weakref.ref(module))
        if any(residence_of(param) is not None for param in module.parameters(recurse=False)):
            module.__dict__["_save_to_state_dict"] = _saving_placeholders(module)
            _hook_state_dict(module, run, copies, loading)
    run.keep_hook(model.register_forward_pre_hook(_refuse_other_parameters(model), prepend=True))
    run.at_close(lambda: _end_guards(guarded, values_are_gone=run_moves))


def _end_guards(guarded: list[weakref.ref[nn.Module]], *, values_are_gone: bool) -> None:
    """After the run: an ordinary model again, or one whose values nobody may take for real."""
    for ref in guarded:
        module = ref()
        if module is None:
            continue
        if values_are_gone:
            module.register_state_dict_pre_hook(_refusal("state_dict", "its run was ended by zo.close(model)"))
            continue
        for name in _GUARDED:
            module.__dict__.pop(name, None)


def _refuse_other_parameters(model: nn.Module) -> Callable[[nn.Module, Any], None]:
    """A hook that sees to it that all parameters are those that the run knows: it keeps them alive."""
    known = [id(param) for param in model.parameters()]

    def check(module: nn.Module, _args: Any) -> None:
        if [id(param) for param in module.parameters()] == known:
            return
        others = [name for name, param in module.named_parameters() if id(param) not in known]
        raise ConfigError(
            f"parameters were replaced, added or taken away after zo.offload ({', '.join(others[:3]) or 'taken away'}),"
            " and would not be trained: take model.state_dict(), call zo.close(model), change a model that has these"
            " values, and offload that"
        )

    return check


def _refusal(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise ConfigError(f"{what} does not work on an offloaded model, whose values are on their tiers: {instead}")

    return refuse


def _guarded_apply(module: nn.Module) -> Callable[..., nn.Module]:
    """`Module._apply`, which `.to`, `.half`, `.cuda` and the like are made of, for buffers alone."""
    ref = weakref.ref(module)

    def apply(
        fn: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> nn.Module:
        target = ref()
        if target is None:
            raise ConfigError("the module is gone")
        for name, param in target.named_parameters(recurse=recurse):
            probe = torch.empty(1, dtype=param.dtype, device=param.device)
            result = fn(probe)
            if (result.dtype, result.device) != (param.dtype, param.device):
                raise ConfigError(
                    f"this would take {name} from {param.dtype} on {param.device} to {result.dtype} on {result.device}."
                    " An offloaded model stays as it is: choose OffloadConfig(compute_dtype=...), or convert before"
                    " zo.offload"
                )
        for part in target.modules() if recurse else (target,):
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = fn(buffer)
        return target

    return apply


def _loading_to_the_end(module: nn.Module, loading: list[AbstractContextManager[None]]) -> Callable[..., Any]:
    """`load_state_dict` that also ends what it began in the modules around one that raised."""
    ref = weakref.ref(module)

    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        target = ref()
        if target is None:
            raise ConfigError("the module is gone")
        try:
            return type(target).load_state_dict(target, *args, **kwargs)
        except BaseException as error:
            while loading:
                with suppress(type(error)):
                    loading.pop().__exit__(type(error), error, error.__traceback__)
            raise

    return load_state_dict


def _saving_placeholders(module: nn.Module) -> Callable[..., None]:
    """`_save_to_state_dict` that takes what parameters show; `after_state_dict` puts values in its place."""
    ref = weakref.ref(module)

    def save_to_state_dict(*args: Any, **kwargs: Any) -> None:
        target = ref()
        if target is None:
            raise ConfigError("the module is gone")
        with torch._C.DisableTorchFunctionSubclass():
            type(target)._save_to_state_dict(target, *args, **kwargs)

    return save_to_state_dict


def _hook_state_dict(
    module: nn.Module, run: Run, copies: WeakIdKeyDictionary, loading: list[AbstractContextManager[None]]
) -> None:

    def before_state_dict(owner: nn.Module, _prefix: str, _keep_vars: bool) -> None:  # noqa: FBT001 - torch's signature
        run.check_on_device()
        run.access.wait_for_updates(_direct_units(owner))

    def after_state_dict(owner: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, param in owner._parameters.items():
            residence = residence_of(param) if param is not None else None
            if param is None or residence is None or residence.part.range is None:
                continue
            if prefix + name in state:
                state[prefix + name] = _copy_for(state, param, residence, run, copies)

    def before_loading(owner: nn.Module, _state: Any, _prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise ConfigError("load_state_dict(assign=True) would replace offloaded parameters: leave assign off")
        run.check_on_device()
        context = run.access.full(_direct_units(owner), writeback=True, grads=False)
        context.__enter__()
        loading.append(context)

    def after_loading(_owner: nn.Module, _incompatible: Any) -> None:
        if loading:
            loading.pop().__exit__(None, None, None)

    run.keep_hook(module.register_state_dict_pre_hook(before_state_dict))
    run.keep_hook(module.register_state_dict_post_hook(after_state_dict))
    run.keep_hook(module.register_load_state_dict_pre_hook(before_loading))
    run.keep_hook(module.register_load_state_dict_post_hook(after_loading))


def _copy_for(
    state: Mapping[str, Any], param: torch.Tensor, residence: Residence, run: Run, copies: WeakIdKeyDictionary
) -> torch.Tensor:
    """A copy of the values, leased from the host's budget while it lives; one for all names of a tied weight."""
    if residence.part.flat.layout.slots[residence.slot_index].param.aliases:
        for value in state.values():
            if isinstance(value, torch.Tensor) and copies.get(value) == id(param):
                return value
    parts = parts_of(param)
    if parts:
        inside = {name: (part, residence_of(part)) for name, part in parts.items()}
        return rebuilt(
            param,
            {name: _copy_for(state, part, lives, run, copies) for name, (part, lives) in inside.items() if lives},
        )
    tensor = local_tensor(param)
    lease = run.access.lease_copies(tensor.numel() * tensor.dtype.itemsize)
    values = run.access.read_parameter(residence)
    keep_lease(lease, [values])
    copy = distributed_like(param, values)
    copies[copy] = id(param)
    return copy


def _direct_units(module: nn.Module) -> list[Unit]:
    residences = [residence_of(param) for param in module.parameters(recurse=False)]
    return list(dict.fromkeys(residence.unit for residence in residences if residence is not None))
