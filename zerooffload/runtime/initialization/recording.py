"""How the tensors of a whole model get their values: for each kind of module, what is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from types import CodeType, FunctionType

import torch
from torch import nn

from zerooffload.errors import ConfigError
from zerooffload.runtime.initialization.hugging_face import build_again, difference, initialisers, is_hugging_face
from zerooffload.runtime.initialization.modes import recording
from zerooffload.runtime.initialization.tape import Place, Tape

_DRAWING = re.compile(
    r"apply|deepcopy|init|_?init(ialize)?_?(weights?|params|parameters)|_?reset_parameters"
    r"|rand\w*|normal|bernoulli|multinomial|(normal|uniform|xavier|kaiming|trunc_normal|orthogonal|sparse)\w*_"
)
"""Names of what draws or copies, in the code of a constructor."""


class Recording:
    """How all of a model's tensors on meta get their values; see [Note: the same random numbers].

    Parameters
    ----------
    provided : set[int]
        Identities of tensors that get theirs elsewhere.

    Attributes
    ----------
    tape : Tape
    sources : dict[int, Place]
        For each parameter and buffer on meta, by its identity, where the tape has its values.
    doubts : list[str]
        Why values may differ from those of a model built in memory.

    Raises
    ------
    ConfigError
        If nothing says how one of them is initialised.
    """

    def __init__(self, model: nn.Module, provided: AbstractSet[int] = frozenset()) -> None:
        self.tape = Tape()
        self.sources: dict[int, Place] = {}
        self.doubts: list[str] = []
        self._wanted = {id(tensor) for _, tensor in named_tensors(model) if tensor.is_meta} - provided
        self._seen: set[nn.Module] = set()
        self._first_names: dict[int, str] = {}
        # A constructor may leave memory as it found it; the model in memory has no values there either.
        self._may_lack_values: set[int] = set()
        kept = (name for name, param in model.named_parameters() if not param.is_meta and id(param) not in provided)
        if in_memory := list(kept):
            more = f" (as are {len(in_memory) - 1} other parameters)" if len(in_memory) > 1 else ""
            self.doubts.append(f"{in_memory[0]} is in memory already and keeps its values{more}")
        with _parameters_in_memory_hidden(model), recording(self.tape):
            self._record("", model)
        self._find_sources(model)

    def _find_sources(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            for key, tensor in self._wanted_of(module):
                place = self.sources.setdefault(id(tensor), self.tape.place(tensor))
                if self.tape.is_written(place.storage) or tensor.numel() == 0:
                    continue
                if id(tensor) not in self._may_lack_values:
                    raise self._unknown(name, module, f"{key} gets no values")
                self.doubts.append(f"{_joined(name, key)} gets no values from its constructor, so it is zero")

    def _record(self, name: str, module: nn.Module) -> None:
        tensors = [tensor for _, tensor in named_tensors(module)]
        if module in self._seen or (tensors and not any(id(tensor) in self._wanted for tensor in tensors)):
            return
        self._seen.add(module)
        if is_hugging_face(module):
            self._record_hugging_face(name, module)
            return
        layers = module.layers if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) else None
        for child_name, child in module.named_children():
            if child is layers and isinstance(layers, nn.ModuleList):
                self._record_copies(_joined(name, child_name), layers)
            else:
                self._record(_joined(name, child_name), child)
        self._record_own(name, module)

    def _record_copies(self, name: str, layers: nn.ModuleList) -> None:
        first, *others = layers
        self._record(f"{name}.0", first)
        for number, layer in enumerate(others, 1):
            self._regard_as_done(f"{name}.{number}", layer)
            for mine, theirs in zip(layer.parameters(), first.parameters(), strict=True):
                mine.copy_(theirs)

    def _regard_as_done(self, name: str, module: nn.Module) -> None:
        self._seen.update(module.modules())
        for path, param in module.named_parameters(prefix=name):
            self._first_names.setdefault(id(param), path)

    def _record_own(self, name: str, module: nn.Module) -> None:
        """A module's own parameters and buffers, after its children's."""
        method = next((key for key in ("reset_parameters", "_reset_parameters") if hasattr(module, key)), None)
        names_used = _names_in_constructors(module)
        owns = bool(self._wanted_of(module))
        if method is None and owns:
            raise self._unknown(name, module, "has neither reset_parameters() nor a Hugging Face model around it")
        if method is not None and (owns or method in names_used):
            with self._own_parameters_once(name, module):
                self._initialise(name, module, f"{method}()", getattr(module, method))
        elif drawing := sorted(filter(_DRAWING.fullmatch, names_used)):
            self.doubts.append(
                f"the constructor of {_called(name, module)} uses {', '.join(drawing)}, which is not repeated"
                " (let it call reset_parameters(), and do that there)"
            )

    @contextmanager
    def _own_parameters_once(self, name: str, module: nn.Module) -> Iterator[None]:
        """Let a module that shares a parameter draw for it, as its constructor did before it was tied, in vain."""
        kept = dict(module._parameters)
        for key, param in kept.items():
            if param is None:
                continue
            first = self._first_names.setdefault(id(param), _joined(name, key))
            if first != _joined(name, key):
                module._parameters[key] = _stand_in(param)
                self.doubts.append(f"{_joined(name, key)} is taken to have been tied to {first}, not the reverse")
        shown = dict(module._parameters)
        try:
            yield
            if any(module._parameters.get(key) is not param for key, param in shown.items()):
                raise self._unknown(name, module, "makes new parameters in place of those that it has")
        finally:
            module._parameters.clear()
            module._parameters.update(kept)

    def _record_hugging_face(self, name: str, module: nn.Module) -> None:
        self._regard_as_done(name, module)
        start = len(self.tape.operations)
        try:
            built = build_again(module)
            changed = difference(module, built)
        except Exception as error:  # noqa: BLE001 - a constructor of anybody's; what it needs may not be on meta
            changed = f"building it again fails: {error}"
        if not changed:
            for (_, mine), (_, theirs) in zip(named_tensors(module), named_tensors(built), strict=True):
                if id(mine) in self._wanted:
                    self.sources[id(mine)] = self.tape.place(theirs)
                    self._may_lack_values.add(id(mine))
            return
        self.tape.forget(start)
        self.doubts.append(f"{_called(name, module)} is not what its class makes of its config: {changed}")
        paths = {inner: path for path, inner in module.named_modules(prefix=name)}
        for inner, method, initialise in initialisers(module):
            self._initialise(paths[inner], inner, method, initialise)

    def _initialise(self, name: str, module: nn.Module, method: str, initialise: Callable[[], object]) -> None:
        try:
            initialise()
        except Exception as error:
            raise self._unknown(name, module, f"its {method} fails there: {error}") from error

    def _wanted_of(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """A module's own parameters and buffers on meta."""
        own = (*module._parameters.items(), *module._buffers.items())
        return [(key, tensor) for key, tensor in own if tensor is not None and id(tensor) in self._wanted]

    def _unknown(self, name: str, module: nn.Module, why: str) -> ConfigError:
        tensors = ", ".join(key for key, _ in self._wanted_of(module)) or "none of its own"
        return ConfigError(
            f"{_called(name, module)} is on the meta device and {why}; so nothing says how to initialise its"
            f" tensors ({tensors}). Define a reset_parameters() that sets them all, as torch's modules do, or build it"
            " in memory"
        )


@contextmanager
def _parameters_in_memory_hidden(model: nn.Module) -> Iterator[None]:
    """Let initialisation find parameters on meta where some are in memory, which keep their values."""
    kept = [
        (module, key, param)
        for module in model.modules()
        for key, param in module._parameters.items()
        if param is not None and not param.is_meta
    ]
    stand_ins = {id(param): _stand_in(param) for _, _, param in kept}
    for module, key, param in kept:
        module._parameters[key] = stand_ins[id(param)]
    try:
        yield
    finally:
        for module, key, param in kept:
            module._parameters[key] = param


def _stand_in(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)


def _names_in_constructors(module: nn.Module) -> set[str]:
    """What the constructors of a module's class and its bases use, as far as their code shows."""
    names: set[str] = set()
    constructors = (vars(kind).get("__init__") for kind in type(module).__mro__ if kind is not nn.Module)
    waiting = [constructor.__code__ for constructor in constructors if isinstance(constructor, FunctionType)]
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, each once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name and key else name or key


def _called(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
