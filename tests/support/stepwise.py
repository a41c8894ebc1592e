"""A training that a test lets go on step by step, in one run after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.reference_training import Outcome, Recipe, current_params, differences, offload_prepared
from support.small_models import batch

import zerooffload as zo

RECIPE = Recipe(num_steps=5, num_micro_steps=1, schedule=lambda step: 1.0 / (1 + step))
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("params", "optimizer", "gradients"), "nvme"),
    "host_memory": "32MiB",
    "overwrite": False,
}


class Ballast:
    """A tracked object whose state is as large as one likes."""

    def __init__(self) -> None:
        self.content = b""

    def state_dict(self) -> dict[str, bytes]:
        """The content."""
        return {"content": self.content}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        """Put it back."""
        self.content = state["content"]


class Stepwise:
    """A run of `RECIPE` with all states on nvme, begun or continued.

    Attributes
    ----------
    num_steps : int
        That are finished.
    """

    def __init__(self, folder: Path, **config: Any) -> None:
        self.model = offload_prepared(RECIPE, **{**SETTINGS, "nvme_paths": [folder], **config})
        try:
            self.optimizer = zo.AdamW(self.model.parameters(), lr=RECIPE.learning_rate, **RECIPE.options)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, RECIPE.schedule or (lambda _: 1.0))
            self.ballast = Ballast()
            zo.track(self.model, scheduler=self.scheduler, ballast=self.ballast)
            self.num_steps = zo.resume(self.model, self.optimizer)
        except BaseException:
            self.close()
            raise

    def compute_gradients(self) -> None:
        """Of the next step."""
        self.optimizer.zero_grad()
        RECIPE.loss(self.model, batch(self.num_steps, 0)).backward()
        zo.clip_grad_norm_(self.model, RECIPE.max_norm or 0.0)

    def update(self) -> None:
        """With them."""
        self.optimizer.step()
        self.scheduler.step()
        self.num_steps += 1

    def step(self, times: int = 1) -> None:
        """Both, so often."""
        for _ in range(times):
            self.compute_gradients()
            self.update()

    def differences_at_the_end(self, plain: Outcome) -> list[str]:
        """Train to the end: what is not as plain PyTorch has it."""
        self.step(RECIPE.num_steps - self.num_steps)
        return differences(Outcome(params=current_params(self.model)), Outcome(params=plain.params))

    def close(self) -> None:
        """End the run."""
        zo.close(self.model)
