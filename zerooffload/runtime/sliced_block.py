"""A block that takes the whole batch and runs it in slices.

[Note: what is found out before the first step]
Whether a block can be sliced is tried when it is first called with arguments of a kind: on one sample, on two, and on
these two with one or the other NaN wherever it can be. If a NaN reaches the other's outputs, the block mixes samples.
What is twice as long for two samples as for one is a part of the batch; what is as long, and depends on no sample, is
shared. What one call changes in the block (buffers, attributes) would be changed by each slice, and again in backward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerooffload.accelerator import Accelerator
from zerooffload.errors import ConfigError
from zerooffload.runtime.gradient_hooks import users_gradient_hooks
from zerooffload.runtime.sliced_call import (
    Joining,
    Kept,
    OutputRules,
    SlicedCall,
    SlicedFunction,
    random_state,
    set_random_state,
)
from zerooffload.runtime.slicing import Cut, Leaf, Rebuild, Rule, find_cut, take_arguments_apart
from zerooffload.sharding.local_tensors import is_distributed


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """What all sliced blocks of a run have in common.

    Attributes
    ----------
    micro_batch_size : int or None
        Samples of a slice; None for one slice.
    declared : Mapping[str, Rule]
        See `find_cut`.
    between_slices : callable
        Called in backward after each slice.
    """

    micro_batch_size: int | None
    declared: Mapping[str, Rule]
    accelerator: Accelerator
    between_slices: Callable[[], None]


class SlicedBlock:
    """Takes the place of a module's `forward` while gradients are computed; the module's own hooks stay around it.

    Parameters
    ----------
    keep : callable
        Keeps the block's input until its backward.
    """

    def __init__(self, name: str, module: nn.Module, slicing: Slicing, keep: Callable[[torch.Tensor], Kept]) -> None:
        self._name = name
        self._module = module
        self._slicing = slicing
        self._keep = keep
        self._own_forward = module.__dict__.get("forward")
        self._forward: Callable[..., Any] = module.forward
        self._found: dict[Any, OutputRules] = {}

    def install(self) -> None:
        """Take the place."""
        self._module.__dict__["forward"] = self._in_slices

    def remove(self) -> None:
        """Give it back."""
        if self._own_forward is None:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.__dict__["forward"] = self._own_forward

    def _in_slices(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self._module.training):
            return self._forward(*args, **kwargs)
        slicing = self._slicing
        leaves, rebuild = take_arguments_apart(self._forward, args, kwargs)
        cut = find_cut(self._name, leaves, slicing.micro_batch_size, slicing.declared)
        hooked = HookedOutputs(self._name, self._module)
        function = SlicedFunction(
            self._name,
            lambda *args, **kwargs: hooked.run(self._forward, args, kwargs),
            tuple(param for param in self._module.parameters() if param.requires_grad),
            slicing.accelerator,
            self._keep,
            slicing.between_slices,
        )
        # What runs differs with the kinds of arguments, and with what their tensors are.
        key = (cut.rules, cut.batch_size == cut.slice_size, *map(_kind, leaves))
        if key not in self._found:
            self._found[key] = Trial(function, self._module, leaves, rebuild, cut).output_rules()
        call = SlicedCall(function, leaves, rebuild, cut, self._found[key])
        tensors = [leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
        return hooked.call_hooks(call(tensors))


def _kind(leaf: Leaf) -> Any:
    value = leaf.value
    if not isinstance(value, torch.Tensor):
        return leaf.path, type(value), value if isinstance(value, bool) else None
    return leaf.path, value.ndim, value.dtype, value.requires_grad


class HookedOutputs:
    """Outputs of modules inside the block that have forward hooks (recorders of router logits, for one).

    The hooks are put off: they are called once, with the outputs of the whole batch, when its slices are joined. They
    get no arguments, and may not replace outputs. Those of torch's tensor parallelism are a part of their module.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        self._name = name
        self._modules = [module for module in block.modules() if module is not block and _hooks_to_put_off(module)]
        self._order: list[nn.Module] = []

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """What `forward` returns, and the outputs of the modules with hooks, in the order of their calls."""
        order: list[nn.Module] = []
        outputs: list[Any] = []

        def take(module: nn.Module, _: Any, output: Any) -> None:
            order.append(module)
            outputs.append(output)

        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(_with_hook(module, take))
            result = forward(*args, **kwargs)
        self._order = self._order or order
        return result, outputs

    def call_hooks(self, joined: tuple[Any, list[Any]]) -> Any:
        """Call the hooks; return what the block returns."""
        result, outputs = joined
        for module, output in zip(self._order, outputs, strict=True):
            for number, hook in _hooks_to_put_off(module).items():
                arguments: tuple[Any, ...] = ((), {}) if number in module._forward_hooks_with_kwargs else ((),)
                if hook(module, *arguments, output) is not None:
                    raise ConfigError(
                        f"unit {self._name}: a forward hook of its {type(module).__name__} replaces what that returns,"
                        " which cannot be done in slices: keep the unit's activations, OffloadConfig(activations=...)"
                    )
        return result


def _hooks_to_put_off(module: nn.Module) -> dict[int, Callable[..., Any]]:
    return {
        number: hook
        for number, hook in module._forward_hooks.items()
        if not getattr(hook, "__module__", "").startswith("torch.distributed.tensor.")
    }


@contextmanager
def _with_hook(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    """With `hook` in the place of those that are put off."""
    own, others = module._forward_hooks, _hooks_to_put_off(module)
    kept = {number: each for number, each in own.items() if number not in others}
    module._forward_hooks = OrderedDict({**kept, -1: hook})
    try:
        yield
    finally:
        module._forward_hooks = own


class Trial:
    """See [Note: what is found out before the first step]."""

    def __init__(
        self, function: SlicedFunction, module: nn.Module, leaves: Sequence[Leaf], rebuild: Rebuild, cut: Cut
    ) -> None:
        self._function = function
        self._module = module
        self._cut = cut
        tensor_places = [index for index, leaf in enumerate(leaves) if isinstance(leaf.value, torch.Tensor)]
        self._leaves = [leaves[index] for index in tensor_places]
        self._rules = [cut.rules[index] for index in tensor_places]
        no_outputs = OutputRules((), ())
        self._call = SlicedCall(function, leaves, rebuild, cut, no_outputs)

    def output_rules(self) -> OutputRules:
        """What becomes of each tensor that the function returns.

        Raises
        ------
        ConfigError
            If the block cannot be sliced, with the reason.
        """
        self._refuse_what_is_known()
        self._refuse_distributed([leaf.value for leaf in self._leaves], "gets")
        before = _changing(self._module)
        state = random_state(self._function.accelerator)
        try:
            one = self._outputs(slice(0, 1) if self._is_cut else slice(None))
            self._refuse_distributed(one, "returns")
            self._refuse_changes(before)
            self._refuse_foreign(one)
            differentiable = tuple(output.requires_grad for output in one)
            if not self._is_cut:
                return OutputRules((Joining.SHARED,) * len(one), differentiable)
            two = self._outputs(slice(0, 2))
            if len(one) != len(two):
                raise self._refusal("returns another number of tensors for two samples than for one")
            rules = tuple(self._output_rule(*pair) for pair in zip(one, two, strict=True))
            for spoilt in (0, 1):
                self._refuse_mixing(two, self._outputs(slice(0, 2), spoilt), rules, spoilt)
            return OutputRules(rules, differentiable)
        finally:
            set_random_state(self._function.accelerator, state)

    @property
    def _is_cut(self) -> bool:
        return self._cut.batch_size > self._cut.slice_size

    def _refuse_what_is_known(self) -> None:
        for path, module in self._module.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                raise self._refusal(f"has a {type(module).__name__} ({path}), whose statistics are of the whole batch")
            if getattr(module, "gradient_checkpointing", False):
                raise self._refusal(f"has gradient checkpointing on ({path or 'itself'}): turn it off", advises=False)
        for name, param in self._module.named_parameters():
            if users_gradient_hooks(param):
                raise self._refusal(f"has a hook on the gradient of {name}, which would be called for each slice")

    def _refuse_distributed(self, tensors: Sequence[torch.Tensor], does: str) -> None:
        if any(is_distributed(tensor) for tensor in tensors):
            raise self._refusal(
                f"{does} a DTensor, which is neither cut into samples nor moved: let what is between units be local"
                " tensors (use_local_output=True in the plan of parallelize_module)"
            )

    def _outputs(self, rows: slice, spoilt: int | None = None) -> list[torch.Tensor]:
        """Of some samples, one of which may be `spoilt`: its numbers are NaN."""
        values = []
        for leaf, rule in zip(self._leaves, self._rules, strict=True):
            value = leaf.value.detach()
            if rule is Rule.BATCH and self._is_cut:
                value = value[rows].clone()
                if spoilt is not None and value.is_floating_point():
                    value[spoilt] = float("nan")
            values.append(value.requires_grad_(leaf.value.requires_grad))
        try:
            outputs, _ = self._call.run(values)
        except ConfigError:
            raise
        except Exception as error:
            if not self._is_cut:
                raise
            whole = [leaf.path for leaf, rule in zip(self._leaves, self._rules, strict=True) if rule is Rule.SHARED]
            raise self._refusal(
                f"cannot run on {rows.stop} of {self._cut.batch_size} samples ({error}). Each slice gets all of"
                f" {', '.join(whole) or 'no argument'}, and its own samples of {', '.join(self._cut_paths)}"
            ) from error
        return outputs

    @property
    def _cut_paths(self) -> list[str]:
        return [leaf.path for leaf, rule in zip(self._leaves, self._rules, strict=True) if rule is Rule.BATCH]

    def _output_rule(self, one: torch.Tensor, two: torch.Tensor) -> Joining:
        if one.shape == two.shape:
            return Joining.SHARED
        if one.ndim and two.shape == (2 * len(one), *one.shape[1:]):
            return Joining.BATCH
        raise self._refusal(
            f"returns a tensor of shape {tuple(one.shape)} for one sample, and {tuple(two.shape)} for two"
        )

    def _refuse_mixing(
        self, clean: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], rules: Sequence[Joining], spoilt: int
    ) -> None:
        """See that a spoilt sample has changed nothing but its own part of what is returned."""
        if [output.shape for output in outputs] != [output.shape for output in clean]:
            raise self._refusal("returns tensors whose shapes depend on the data")
        for before, after, rule in zip(clean, outputs, rules, strict=True):
            if not after.is_floating_point():
                continue
            new = after.isnan() & ~before.isnan()
            if rule is Joining.BATCH:
                new = new.chunk(2)[1 - spoilt]
            if bool(new.any()):
                raise self._refusal(
                    "mixes samples: what it returns for one of them depends on others, along dimension 0 of"
                    f" {', '.join(self._cut_paths)}"
                )

    def _refuse_changes(self, before: Mapping[str, Any]) -> None:
        after = _changing(self._module)
        changed = [name for name in (*before, *after) if before.get(name) != after.get(name)]
        if changed:
            raise self._refusal(
                f"changes {', '.join(dict.fromkeys(changed))} in its forward, which runs for each slice, and again in"
                " backward"
            )

    def _refuse_foreign(self, outputs: Sequence[torch.Tensor]) -> None:
        """Refuse a block that uses a trainable tensor that is neither its argument nor its parameter."""
        own = {id(param) for param in self._function.params}
        for leaf in _leaves_of_graph(outputs):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
                raise self._refusal(f"uses a parameter of shape {tuple(leaf.shape)} that is not in its module")

    def _refusal(self, why: str, *, advises: bool = True) -> ConfigError:
        advice = f'. Or keep its activations: OffloadConfig(activations={{"{self._function.name}": "keep"}})'
        return ConfigError(f"unit {self._function.name} {why}{advice if advises else ''}")


def _changing(module: nn.Module) -> dict[str, Any]:
    """What a forward may change, with marks that show if it did."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in part._buffers.items():
            found[prefix + name] = None if buffer is None else (id(buffer), buffer._version)
        for name, value in vars(part).items():
            if not name.startswith("_forward_hooks") and name not in ("_parameters", "_buffers", "_modules"):
                found[prefix + name] = value if isinstance(value, bool | int | float | str) else id(value)
    return found


def _leaves_of_graph(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    seen = set()
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        waiting += [following for following, _ in node.next_functions if following is not None]


__all__ = ["HookedOutputs", "SlicedBlock", "Slicing"]
