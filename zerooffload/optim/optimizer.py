"""The face that all optimizers share: torch's, over states that live on tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import nn

from zerooffload.errors import ConfigError
from zerooffload.optim.rules import Rule, StepScalars
from zerooffload.optim.rules.rule import step_scalars
from zerooffload.sharding.registry import Residence, residence_of

Params: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
ScalarsOf: TypeAlias = Callable[[torch.Tensor, int, float], StepScalars | None]


class OptimizerRun(Protocol):
    """What an optimizer asks of the run that owns its parameters."""

    def adopt(self, optimizer: torch.optim.Optimizer, rule: Rule) -> None:
        """Serve one more optimizer; raise `ConfigError` if the states were not laid out for its rule."""

    def update(self, scalars_of: ScalarsOf) -> None:
        """Update every parameter that has a gradient and whose `scalars_of(param, step, grad_factor)` is not None."""

    def unscale_gradients(self, params: Iterable[nn.Parameter], factor: float) -> bool:
        """Let the update multiply the gradients with `factor`; whether all of them are finite, on every rank."""

    def skip_step(self) -> None:
        """Report a step that ends without an update."""

    def discard_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Forget the gradients of these parameters."""

    def read_optimizer_state(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of a parameter's optimizer state, shaped like it."""

    def forget_optimizer_state(self, param: nn.Parameter) -> None:
        """Let a parameter's optimizer state be that of one that never stepped."""

    def write_optimizer_states(self, states: Sequence[tuple[nn.Parameter, Mapping[str, Any] | None]]) -> None:
        """Replace optimizer states, None by that of a parameter that never stepped; check all before any is changed."""


class OffloadedOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` for the parameters of an offloaded model.

    A subclass names its rule, gives torch's arguments to `defaults`, and says which are out of range.

    Raises
    ------
    ConfigError
        If a parameter is not offloaded, was frozen when it was, or belongs to another run; if the run's states were
        laid out for another algorithm; if a hyperparameter is out of range. A second optimizer of the same parameters
        starts their states afresh.
    """

    RULE: ClassVar[Rule]

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self._run: OptimizerRun | None = None
        # Torch adds some of its own to `defaults`.
        self._hyperparameters = frozenset(defaults)
        super().__init__(params, defaults)

    def out_of_range(self, group: dict[str, Any]) -> Iterable[str]:
        """The names of a param group's hyperparameters that are out of range."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the parameters must be offloaded, all by one call of `zo.offload`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            for param in group["params"]:
                if param.requires_grad:
                    self._adopt(param)
        except ConfigError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        wrong = [f"{name}={group[name]!r}" for name in self.out_of_range(group)]
        if wrong:
            raise ConfigError(f"{type(self).__name__}: out of range: {', '.join(wrong)}")

    def _adopt(self, param: nn.Parameter) -> None:
        residence = self._residence(param)
        if residence.part.training is None:
            name = residence.part.flat.layout.slots[residence.slot_index].param.name
            raise ConfigError(f"{name} was frozen when zo.offload was called: set requires_grad before offloading")
        if self._run is None:
            residence.run.adopt(self, self.RULE)
            self._run = residence.run
        elif self._run is not residence.run:
            raise ConfigError("one optimizer got parameters of two offloaded models: make one optimizer for each")
        # An earlier optimizer's states are not this one's.
        residence.run.forget_optimizer_state(param)

    def _residence(self, param: torch.Tensor) -> Residence:
        residence = residence_of(param)
        if residence is None:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is not offloaded: call zo.offload(model) first, then"
                f" zo.{type(self).__name__}(model.parameters())"
            )
        return residence

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
            self._run.update(self.scalars_of())
        return loss

    def scalars_of(self) -> ScalarsOf:
        """What each parameter would be updated with if `step` were called now; None for one of no group."""
        group_of = {id(param): group for group in self.param_groups for param in group["params"]}
        made: dict[tuple[int, int, float], StepScalars] = {}

        def scalars_of(param: torch.Tensor, step: int, grad_factor: float) -> StepScalars | None:
            group = group_of.get(id(param))
            if group is None:
                return None
            key = (id(group), step, grad_factor)
            if key not in made:
                made[key] = step_scalars(self.RULE, group, step, grad_factor)
            return made[key]

        return scalars_of

    def unscale_gradients(self, factor: float) -> bool:
        """Let the update multiply the gradients with `factor`; whether all of them are finite, on every rank."""
        params = [param for group in self.param_groups for param in group["params"]]
        return self._run is None or self._run.unscale_gradients(params, factor)

    def skip_step(self) -> None:
        """Let a step end without an update: its report covers what came before, and no state changes."""
        if self._run is not None:
            self._run.skip_step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002 - torch's signature
        """Forget all gradients. `set_to_none=False` does the same: nothing is kept that could be set to zero."""
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            param.grad = None
        if self._run is not None:
            self._run.discard_gradients(params)

    def state_dict(self) -> dict[str, Any]:
        """Torch's layout, with fp32 copies of the states in host memory, which the host's budget must have room for.

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
        """Take over hyperparameters and states, of ours or of torch's optimizer of that name.

        Raises
        ------
        ConfigError
            If it lacks something, or its groups or shapes are not those of this optimizer. Nothing has changed then.
        TierIOError
            If a state could not be read or written. If some are new then, the run has ended, as with `zo.load`.
        """
        if not {"state", "param_groups"} <= state_dict.keys():
            raise ConfigError(f"no optimizer's state: it has {', '.join(map(str, state_dict)) or 'nothing'}")
        for group in state_dict["param_groups"]:
            if group.get("amsgrad"):
                raise ConfigError(f"the state has amsgrad=True, which zo.{type(self).__name__} does not do")
        # Torch makes new groups.
        before = self.param_groups
        try:
            self._load_groups(state_dict)
            if self._run is not None:
                self._run.write_optimizer_states(self._states_in(state_dict))
        except BaseException:
            self.param_groups = before
            raise

    def _load_groups(self, state_dict: dict[str, Any]) -> None:
        try:
            super().load_state_dict({**state_dict, "state": {}})
        except ValueError as error:
            raise ConfigError(f"the state is of another optimizer: {error}") from error
        for group in self.param_groups:
            if missing := self._hyperparameters - group.keys():
                raise ConfigError(f"the state is of another optimizer: a group lacks {', '.join(sorted(missing))}")
            self._check(group)

    def _states_in(self, state_dict: dict[str, Any]) -> list[tuple[nn.Parameter, Mapping[str, Any] | None]]:
        """For each parameter that is trained, its entry."""
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        states: list[tuple[nn.Parameter, Mapping[str, Any] | None]] = []
        for number, param in zip(numbers, params, strict=True):
            if not param.requires_grad:
                continue
            entry = state_dict["state"].get(number)
            # Torch's SGD counts no steps, and its Adagrad has a state before the first one.
            if entry is None or not entry.get("step", 1) or entry.get(self.RULE.moments[0].name) is None:
                states.append((param, None))
            else:
                states.append((param, {"step": torch.tensor(1.0), **entry}))
        return states


def outside(group: dict[str, Any], *names: str) -> Iterable[str]:
    """Those of `names` that are negative or no number."""
    return [name for name in names if not float(group[name]) >= 0]


def betas_outside(group: dict[str, Any]) -> Iterable[str]:
    """`betas`, if one of them is not in [0, 1)."""
    return [] if all(0 <= beta < 1 for beta in group["betas"]) else ["betas"]
