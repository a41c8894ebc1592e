"""A training that a test lets go on step by step, in one run after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from support.reference_training import Outcome, Recipe, current_params, differences, offload_prepared, train_plain
from support.small_models import batch

import zerooffload as zo
from zerooffload.planner import placement

RECIPE = Recipe(num_steps=5, num_micro_steps=1, schedule=lambda step: 1.0 / (1 + step))
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("params", "optimizer", "gradients"), "nvme"),
    "host_memory": "32MiB",
    "overwrite": False,
    # What a test does to the drive in step() is met there.
    "update": "after_backward",
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


def be_refused(rank: int, world_size: int, folder: str, overwrite: bool) -> tuple[str, str]:  # noqa: FBT001
    """In a process of its own, the error of a run that cannot begin."""
    del rank, world_size
    try:
        Stepwise(Path(folder), overwrite=overwrite)
    except zo.ZeroOffloadError as error:
        return type(error).__name__, str(error)
    return "", ""


def hold(rank: int, world_size: int, folder: str, num_steps: int) -> None:
    """In a process of its own, train so many steps; then write "holds" and stay."""
    del rank, world_size
    placement.CHUNK_NUMEL = 4096
    training = Stepwise(Path(folder))
    training.step(num_steps)
    Path(folder, "holds").touch()
    signal.pause()


def train_without_permission(
    rank: int, world_size: int, folder: str, io_engine: str
) -> tuple[list[str], str, str, list[str]]:
    """In a process of its own, as a user who is not root: take one's own right to a directory away while training.

    Returns the errors of steps, that of the end, and that of beginning again; and what differs when the right is back.
    """
    del rank, world_size
    placement.CHUNK_NUMEL = 4096
    plain = train_plain(RECIPE)
    # Whoever may not enter the folders above gets there all the same.
    os.chdir(folder)
    if not os.geteuid():
        nobody = 65534
        os.chown(folder, nobody, nobody)
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)
    training = Stepwise(Path(), io_engine=io_engine)
    training.step(2)
    directory = Path("zerooffload", "rank-00000")
    directory.chmod(0)
    told: list[str] = []
    for call in (training.compute_gradients, training.update):
        with suppress_into(told):
            call()
    ending: list[str] = []
    with suppress_into(ending):
        training.close()
    _, refused = be_refused(0, 1, ".", False)
    directory.chmod(0o700)
    training = Stepwise(Path())
    differences = training.differences_at_the_end(plain)
    training.close()
    return told, "".join(ending), refused, differences


@contextmanager
def trainings(*failures: type[BaseException]) -> Iterator[Callable[..., Stepwise]]:
    """`begin(folder, **config)`: a training that is ended with the block; `failures` of that do not count."""
    started: list[Stepwise] = []

    def begin(folder: Path, **config: Any) -> Stepwise:
        started.append(Stepwise(folder, **config))
        return started[-1]

    yield begin
    for training in started:
        with suppress(*failures):
            training.close()


@contextmanager
def suppress_into(errors: list[str]) -> Iterator[None]:
    """Note the class and the number of an I/O error, told or told before."""
    try:
        yield
    except zo.ZeroOffloadError as error:
        errors.append(f"TierIOError {io_error_of(error).errno}")


def io_error_of(error: zo.ZeroOffloadError) -> zo.TierIOError:
    """The I/O error that is told, or that a refusal to go on without `zero_grad()` names as its cause.

    Raises
    ------
    ZeroOffloadError
        If it has to do with none.
    """
    for found in (error, error.__cause__):
        if isinstance(found, zo.TierIOError):
            return found
    raise error
