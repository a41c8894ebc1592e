"""A flat buffer of a unit, and what its parameters show while it is away or full."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerooffload.errors import ConfigError
from zerooffload.sharding.idle import set_idle, set_in_use
from zerooffload.sharding.layout import FlatLayout
from zerooffload.sharding.local_tensors import convert_distributed, is_distributed, local_tensor
from zerooffload.sharding.placeholders import parameter_placeholder, was_written


class Flat:
    """The parameters of one flat buffer.

    [Note: a stale read raises]
    Autograd saves views of a full parameter (`weight.t()`), and these point into the buffer while it is away. Their
    version counter is the parameter's: it is moved on when the parameter goes away and set back when it returns, so a
    backward that reads a saved weight at the wrong time raises instead of computing with whatever the memory holds. An
    update moves it on for good: backward through a graph from before the update raises too.

    Attributes
    ----------
    layout : FlatLayout
    params : tuple[torch.Tensor, ...]
        In the order of the layout's slots; all that are trained are `torch.nn.Parameter`s.
    tensors : tuple[torch.Tensor, ...]
        What hold their values: the same, or their local tensors.
    """

    def __init__(self, layout: FlatLayout, params: Sequence[torch.Tensor], device: torch.device) -> None:
        self.layout = layout
        self.params = tuple(params)
        self._device = device
        self._placeholders = [parameter_placeholder(slot.param.shape, layout.dtype, device) for slot in layout.slots]
        self._views: list[torch.Tensor] = []
        self._num_changes = 0
        self._is_away = False
        self._take_tensors()

    def _take_tensors(self) -> None:
        self.tensors = tuple(local_tensor(param) for param in self.params)
        # A view of a DTensor shares the DTensor's counter, one of its local tensor that one's.
        local = (tensor for tensor, param in zip(self.tensors, self.params, strict=True) if tensor is not param)
        self._counted = (*self.params, *local)
        self._versions = [tensor._version for tensor in self._counted]

    def convert(self) -> None:
        """Let the parameters, whose values are at home by now, be of the layout's dtype where they do not just show it.

        A DTensor knows its dtype apart from its local tensor.
        """
        for param, placeholder in zip(self.params, self._placeholders, strict=True):
            if is_distributed(param) and param.dtype is not self.layout.dtype:
                convert_distributed(param, placeholder)
        self._take_tensors()

    def bind(self, memory: torch.Tensor) -> None:
        """The memory that the parameters show while full: uint8, 1D, of the device, `[>= layout.nbytes]`."""
        elements = self.layout.elements(memory)
        self._views = [elements[slot.start : slot.stop].view(slot.param.shape) for slot in self.layout.slots]

    def check_untouched(self) -> None:
        """See that nobody wrote to a parameter while it was away.

        Raises
        ------
        ConfigError
            With the parameter's name, if somebody did; what was written is lost.
        """
        if not self._is_away:
            return
        # The parameters' versions are the first ones.
        for slot, param, placeholder, version in zip(
            self.layout.slots, self.params, self._placeholders, self._versions, strict=False
        ):
            # Reading a number from another device would make the host wait for it.
            overwritten = self._device.type == "cpu" and was_written(placeholder)
            if overwritten or param._version != version + 1:
                raise ConfigError(
                    f"parameter {slot.param.name} was written to while its values were on their tier:"
                    " write inside zo.full_params(module)"
                )

    def show_full(self) -> None:
        """The parameters are views of the bound memory, which holds their values.

        Raises
        ------
        ConfigError
            See `check_untouched`; nothing is shown then.
        """
        self.check_untouched()
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, view in zip(self.tensors, self._views, strict=True):
                tensor.data = view
        if self._is_away:
            restored = tuple(version + self._num_changes for version in self._versions)
            torch._C._autograd._unsafe_set_version_counter(self._counted, restored)
            self._is_away = False

    def show_away(self) -> None:
        """The parameters are placeholders; whoever still holds a saved view must not read it."""
        if not self._is_away:
            self._versions = [tensor._version for tensor in self._counted]
            self._num_changes = 0
            torch.autograd.graph.increment_version(self._counted)
            self._is_away = True
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, placeholder in zip(self.tensors, self._placeholders, strict=True):
                tensor.data = placeholder

    def let_be_used(self) -> None:
        """Somebody is known to use the parameters: operations on them are torch's alone."""
        set_in_use(self.params)

    def watch_for_use(self) -> None:
        """Nobody is known to use the parameters: see [Note: idle parameters]."""
        set_idle(self.params)

    def values_changed(self) -> None:
        """The values at home are new ones: graphs from before are stale."""
        if self._is_away:
            self._num_changes += 1
        else:
            torch.autograd.graph.increment_version(self._counted)
