"""`zo.AdamW`: torch's optimizer face over states that live on tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from zerooffload.errors import ConfigError
from zerooffload.optim.scalars import AdamWSettings
from zerooffload.sharding.registry import Residence, residence_of

Params: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class OptimizerRun(Protocol):
    """What the optimizer asks of the run that owns its parameters."""

    def update(self, settings_of: Callable[[nn.Parameter, int, float], AdamWSettings | None]) -> None:
        """Update every parameter that has a gradient and whose `settings_of(param, step, grad_factor)` is not None."""

    def discard_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Forget the gradients of these parameters."""

    def read_optimizer_state(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of a parameter's optimizer state, shaped like it."""

    def forget_optimizer_state(self, param: nn.Parameter) -> None:
        """Let a parameter's optimizer state be that of one that never stepped."""

    def write_optimizer_state(self, param: nn.Parameter, state: dict[str, torch.Tensor]) -> None:
        """Replace a parameter's optimizer state."""


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) for the parameters of an offloaded model.

    Arguments, param groups and `state_dict` are those of `torch.optim.AdamW`. Each operation is rounded once, in the
    order `g *= factor; p *= 1 - lr*wd; m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*(g*g); d = sqrt(v)/sqrt(1-b2^t) + eps;
    p -= (lr/(1-b1^t)) * (m/d)`, on every tier and CPU alike, so results are bit-equal wherever states live.

    Parameters
    ----------
    params : iterable
        Parameters of a model that `zo.offload` was called on, or param groups of them.
    lr : float or torch.Tensor
        A tensor is read when `step()` is called.

    Raises
    ------
    ConfigError
        If a parameter is not offloaded, was frozen when it was, or belongs to another run. A second optimizer of the
        same parameters starts their states afresh.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        self._run: OptimizerRun | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the parameters must be offloaded, all by one call of `zo.offload`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_hyperparameters(group)
            for param in group["params"]:
                if param.requires_grad:
                    self._adopt(param)
        except ConfigError:
            self.param_groups.pop()
            raise

    def _adopt(self, param: nn.Parameter) -> None:
        residence = _residence(param)
        if residence.part.training is None:
            name = residence.part.flat.layout.slots[residence.slot_index].param.name
            raise ConfigError(f"{name} was frozen when zo.offload was called: set requires_grad before offloading")
        if self._run is None:
            self._run = residence.run
        elif self._run is not residence.run:
            raise ConfigError("one optimizer got parameters of two offloaded models: make one optimizer for each")
        # An earlier optimizer's states are not this one's.
        residence.run.forget_optimizer_state(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Raises
        ------
        ConfigError
            If a gradient was replaced by a tensor of the user's.
        TierIOError
            If a state cannot be read or written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._run is not None:
            group_of = {id(param): group for group in self.param_groups for param in group["params"]}
            self._run.update(lambda param, step, factor: _settings(group_of.get(id(param)), step, factor))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002 - torch's signature
        """Forget all gradients. `set_to_none=False` does the same: nothing is kept that could be set to zero."""
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            param.grad = None
        if self._run is not None:
            self._run.discard_gradients(params)

    def state_dict(self) -> dict[str, Any]:
        """Torch's layout, with copies of the states in host memory, which the host's budget must have room for.

        Raises
        ------
        BudgetError
            If it has not.
        """
        state = {}
        index = 0
        for group in self.param_groups:
            for param in group["params"]:
                if self._run is not None and param.requires_grad:
                    entry = self._run.read_optimizer_state(param)
                    if entry["step"]:
                        state[index] = entry
                index += 1
        packed = super().state_dict()
        packed["state"] = state
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over hyperparameters and states, of ours or of `torch.optim.AdamW`, as they are in `state_dict`.

        Raises
        ------
        ConfigError
            If its groups or shapes are not those of this optimizer.
        """
        for group in state_dict["param_groups"]:
            if group.get("amsgrad"):
                raise ConfigError("the state is of AdamW with amsgrad=True, which zo.AdamW does not do")
        try:
            super().load_state_dict({**state_dict, "state": {}})
        except ValueError as error:
            raise ConfigError(f"the state is of another optimizer: {error}") from error
        if self._run is None:
            return
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if not param.requires_grad:
                continue
            entry = state_dict["state"].get(number)
            if entry is None:
                self._run.forget_optimizer_state(param)
            else:
                self._run.write_optimizer_state(param, entry)


def _residence(param: torch.Tensor) -> Residence:
    residence = residence_of(param)
    if residence is None:
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} is not offloaded: call zo.offload(model) first, then"
            " zo.AdamW(model.parameters())"
        )
    return residence


def _check_hyperparameters(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    for name, value, good in (
        ("lr", group["lr"], float(group["lr"]) >= 0),
        ("betas", group["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1),
        ("eps", group["eps"], group["eps"] >= 0),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0),
    ):
        if not good:
            raise ConfigError(f"AdamW: {name}={value!r} is out of range")


def _settings(group: dict[str, Any] | None, step: int, grad_factor: float) -> AdamWSettings | None:
    if group is None:
        return None
    return AdamWSettings(
        lr=float(group["lr"]),
        betas=tuple(group["betas"]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        maximize=bool(group["maximize"]),
        grad_factor=grad_factor,
        step=step,
    )
