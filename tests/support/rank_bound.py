"""How far training on several ranks may get from training on one, by running error analysis.

[Note: the bound on ranks]
Let G be the gradient of the loss of the whole batch, a function of the parameters, and a = mean_i a_i its mean over the
ranks: with the right weights both are the same function. Ranks at parameters p compute fp32 gradients a_i' of it, add
and divide them in fp32; one rank at parameters q computes w'. With autograd in float64 beside both,

    |fl(mean_i a_i') - w'|  <=  gamma(N) mean_i |a_i'|           N - 1 additions and a division
                             +  mean_i |a_i'(p) - a_i(p)|        torch's rounding in the ranks' backwards
                             +  |G(p) - G(q)|                    the parameters are not the same any more
                             +  |G(q) - w'(q)|                   torch's rounding in one rank's backward

and that mean_i a_i(p) = G(p) is what is tested. Nothing on the right comes from the package, and float64's own
roundings are 2^-29 of those of fp32. Micro-steps add up in fp32, once each on either side. The norms differ by at most
the norm of the differences, so clip factors, which fall with the norm, differ by no more than at the two ends of that
range. `rounding_bound` propagates all of it through AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from support.rank_emulation import EmulatedRanks
from support.rank_training import Loss, MicroStep
from support.rounding_bound import RoundingBound, Step, U, clip_factor, gamma
from torch import nn

_NORM_ROUNDING = 3e-14
"""Relative; see docs/numerics.md."""

Gradients = dict[str, torch.Tensor]


class RanksAndOne:
    """Several ranks and one in plain PyTorch, side by side, and bounds on what is between them.

    Attributes
    ----------
    losses, norms : list[float]
        Bounds on the difference of each micro-step's mean loss over the ranks, and of each step's norm.
    """

    def __init__(self, build: Callable[[], nn.Module], world_size: int, options: dict[str, float]) -> None:
        self.ranks = EmulatedRanks(build(), world_size, **options)
        self.one = EmulatedRanks(build(), 1, **options)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._options = options
        self._exact = build().double()
        self._bounds = {name: RoundingBound(param) for name, param in self.ranks.model.named_parameters()}
        self._num_steps = 0

    def step(self, micro_steps: Sequence[MicroStep], max_norm: float) -> None:
        """Train both, each micro-step on the ranks' losses and on the loss of the whole batch."""
        between: Gradients = {name: torch.zeros_like(bound.param) for name, bound in self._bounds.items()}
        for of_ranks, of_whole in micro_steps:
            for name, difference in self._gradient_difference(of_ranks, of_whole, len(micro_steps)).items():
                between[name] += difference
            self.ranks.micro_step(of_ranks, len(micro_steps))
            self.one.micro_step([of_whole], len(micro_steps))
        self._propagate(between, max_norm)
        for side in (self.ranks, self.one):
            side.clip(max_norm)
            side.step()

    def bounds(self) -> Gradients:
        """On the difference of each parameter's elements."""
        return {name: bound.param for name, bound in self._bounds.items()}

    def excess(self) -> float:
        """The largest ratio of a difference between the two to its bound."""
        one = self.one.params()
        differences = {name: (value.double() - one[name].double()).abs() for name, value in self.ranks.params().items()}
        return max(float((differences[name] / bound).max()) for name, bound in self.bounds().items())

    def _gradient_difference(self, of_ranks: Sequence[Loss], of_whole: Loss, num_micro_steps: int) -> Gradients:
        ranks, one = self.ranks.model, self.one.model
        computed = [_gradients(ranks, loss, num_micro_steps) for loss in of_ranks]
        at_ranks = [_gradients(self._at(ranks), loss, num_micro_steps) for loss in (*of_ranks, of_whole)]
        whole = _gradients(one, of_whole, num_micro_steps)
        at_one = _gradients(self._at(one), of_whole, num_micro_steps)
        world_size = len(of_ranks)

        def bound(exact: Sequence[torch.Tensor], rounded: Sequence[torch.Tensor]) -> torch.Tensor:
            """From the ranks', the whole's at the ranks' and at one's, and what was computed for ranks and one."""
            *of_each, whole_at_ranks, whole_at_one = exact
            *rounded_of_each, rounded_whole = rounded
            errors = [(a - b).abs() for a, b in zip(of_each, rounded_of_each, strict=True)]
            total = torch.stack(errors).sum(0) / world_size
            return total + (whole_at_ranks - whole_at_one).abs() + (whole_at_one - rounded_whole).abs()

        exact_losses = [loss for loss, _ in at_ranks] + [at_one[0]]
        self.losses.append(float(bound(exact_losses, [loss for loss, _ in computed] + [whole[0]])))
        found: Gradients = {}
        for name in self._bounds:
            rounded = [gradients[name] for _, gradients in computed]
            exact = [gradients[name] for _, gradients in at_ranks] + [at_one[1][name]]
            magnitude = torch.stack(rounded).abs().sum(0) / world_size
            found[name] = bound(exact, [*rounded, whole[1][name]]) + gamma(world_size) * magnitude
            # What adding up the micro-steps rounds.
            found[name] += gamma(num_micro_steps) * (2 * magnitude + found[name])
        return found

    def _at(self, model: nn.Module) -> nn.Module:
        """The float64 model, with the parameters of `model`."""
        for target, source in zip(self._exact.parameters(), model.parameters(), strict=True):
            target.data.copy_(source.data)
        return self._exact

    def _propagate(self, between: Gradients, max_norm: float) -> None:
        self._num_steps += 1
        norm = self.ranks.norm()
        difference = math.sqrt(sum(float(part.square().sum()) for part in between.values()))
        difference += 2 * _NORM_ROUNDING * (norm + difference)
        self.norms.append(difference + 2 * U * (norm + difference))
        factor = clip_factor(norm, max_norm)
        largest, least = clip_factor(max(norm - difference, 0.0), max_norm), clip_factor(norm + difference, max_norm)
        step = Step(
            learning_rate=self._options["lr"],
            betas=self._options["betas"],  # type: ignore[arg-type]
            eps=self._options["eps"],
            weight_decay=self._options["weight_decay"],
            number=self._num_steps,
        )
        for name, param in self.ranks.model.named_parameters():
            moment = self.ranks.optimizer.moment
            values = {key: moment(param, key).double().view(param.shape) for key in ("exp_avg", "exp_avg_sq")}
            values["param"] = param.detach().double()
            grad = (self.ranks.gradient(name).double(), between[name])
            self._bounds[name].step(values, grad, (factor, largest - least + 2 * U), step)


def _gradients(model: nn.Module, loss: Loss, num_micro_steps: int) -> tuple[torch.Tensor, Gradients]:
    """A loss and its gradients by autograd in the dtype of `model`, as float64."""
    value = loss(model)
    (value / num_micro_steps).backward()
    found = {
        name: torch.zeros_like(param, dtype=torch.float64) if param.grad is None else param.grad.double()
        for name, param in model.named_parameters()
    }
    model.zero_grad()
    return value.detach().double(), found
