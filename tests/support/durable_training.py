"""A training whose every step can be compared: uninterrupted, recorded, resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from support.flushes import without_fsync
from support.random_states import RandomStates, random_states_kept
from support.rank_turns import TurnCollectives, Turns, TurnWaits
from support.recording_engine import Log, RecordingEngine, check_aligned
from torch import nn

import zerooffload as zo
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.aio import Engine, OpenFile, choose_engine
from zerooffload.entry.offloading import offload_in
from zerooffload.optim.kernels import host_kernels
from zerooffload.runtime.build import Environment
from zerooffload.telemetry import Waitable

T = TypeVar("T")

NUM_WORDS = 32
ALL_ON_NVME: dict[str, Any] = {"params": "nvme", "optimizer": "nvme"}


class DroppingNet(nn.Module):
    """Blocks with dropout, of which the second is left out for some batches, a frozen vector, and a tied head."""

    def __init__(self, width: int, num_blocks: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(num_blocks)
        )
        self.shift = nn.Parameter(torch.linspace(-1, 1, width), requires_grad=False)
        self.head = nn.Linear(width, NUM_WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if number != 1 or int(tokens[0, 0]) % 3:
                hidden = hidden + block(hidden) + self.shift
        # A wide model would know its own tokens for sure, and learn nothing.
        logits = self.head(hidden) * (8 / self.shift.numel())
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Loader:
    """Batches from a generator of its own, other ones on each rank; knows where it is."""

    def __init__(self, rank: int = 0) -> None:
        self.position = 0
        self._generator = torch.Generator().manual_seed(3 + rank)

    def next(self) -> torch.Tensor:
        """Token ids `[2, 4]`."""
        self.position += 1
        tokens = torch.randint(0, NUM_WORDS, (2, 4), generator=self._generator)
        # The second block has no gradient in every third step.
        tokens[0, 0] = self.position % 3
        return tokens

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"position": self.position, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.position = state["position"]
        self._generator.set_state(state["generator"])


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training run.

    Attributes
    ----------
    num_batches : int
        One to a step; a step is skipped where the scaled loss is infinite.
    overflows : tuple[int, ...]
        Batches, counted from 1, whose loss is; needs `compute_dtype="fp16"`.
    num_paths : int
    edits : bool
        After every other step, parameters are scaled by hand; before the schedule's step.
    evaluates : bool
        Before every batch but a process's first, random numbers are drawn that a resumed run does not draw.
    config : Mapping
        Of `OffloadConfig`.
    """

    num_batches: int = 3
    width: int = 8
    num_blocks: int = 2
    dropout: float = 0.3
    max_norm: float = 0.8
    overflows: tuple[int, ...] = ()
    num_paths: int = 1
    edits: bool = False
    evaluates: bool = False
    config: Mapping[str, Any] = field(default_factory=lambda: ALL_ON_NVME)

    def model(self) -> nn.Module:
        """The same values every time."""
        torch.manual_seed(5)
        return DroppingNet(self.width, self.num_blocks, self.dropout).train()

    def paths(self, root: Path) -> list[Path]:
        """The user's folders, made if they are not there."""
        paths = [root / f"drive-{index}" for index in range(self.num_paths)]
        for path in paths:
            path.mkdir(parents=True, exist_ok=True)
        return paths

    def settings(self, root: Path, **fields: Any) -> zo.OffloadConfig:
        """Of this run in a folder."""
        bounds = {"host_memory": "16MiB", "nvme_space": "16MiB", "threads": 1, "nvme_paths": self.paths(root)}
        return zo.OffloadConfig(**{"update": "after_backward", **bounds, **self.config, **fields})


@dataclass(frozen=True)
class Moment:
    """Everything that a resumed run must have: after so many steps, before the next batch is drawn.

    Attributes
    ----------
    values : dict
        Plain values and tensors by name.
    """

    values: dict[str, Any]

    def differences(self, other: Moment) -> list[str]:
        """What differs, to the bit; empty if nothing does."""
        return differences("", self.values, other.values)


@dataclass
class Reference:
    """The uninterrupted run.

    Attributes
    ----------
    moments : list[Moment]
        After each number of finished steps.
    losses : list[float]
        Of each batch.
    """

    moments: list[Moment] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    last: Moment | None = None


class Training:
    """A model that is offloaded, and all that its loop holds."""

    def __init__(self, scenario: Scenario, root: Path, env: Environment, **fields: Any) -> None:
        self.scenario = scenario
        self.model = offload_in(scenario.model(), scenario.settings(root, **fields), env)
        try:
            self.optimizer = zo.AdamW(self.model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
            self.scaler = zo.GradScaler(init_scale=64.0, growth_interval=2, enabled=bool(scenario.overflows))
            self.loader = Loader(env.collectives.rank)
            self.num_steps = 0
            self._num_batches_here = 0
            _seed_all(env.collectives.rank)
            tracked: dict[str, Any] = {"scheduler": self.scheduler, "loader": self.loader}
            zo.track(self.model, **tracked, **({"scaler": self.scaler} if scenario.overflows else {}))
        except BaseException:
            zo.close(self.model)
            raise

    def resume(self) -> int:
        """Continue what the folder holds."""
        self.num_steps = zo.resume(self.model, self.optimizer)
        return self.num_steps

    def is_over(self) -> bool:
        """Whether all batches were used."""
        return self.loader.position >= self.scenario.num_batches

    def one_batch(self) -> float:
        """Train on the next batch; its loss."""
        if self.scenario.evaluates and self._num_batches_here:
            _draw()
        self._num_batches_here += 1
        tokens = self.loader.next()
        noise = 0.0 if self.scenario.evaluates else _draw()
        loss = self.model(tokens) * (1 + 0.01 * noise)
        overflow = float("inf") if self.loader.position in self.scenario.overflows else 1.0
        self.scaler.scale(loss * overflow).backward()
        self.scaler.unscale_(self.optimizer)
        zo.clip_grad_norm_(self.model, self.scenario.max_norm)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scenario.edits and self.loader.position % 2:
            self.edit()
        if self.scaler.get_scale() >= before:
            self.scheduler.step()
            self.num_steps += 1
        return loss.item()

    def edit(self) -> None:
        """What a loop may do to parameters after a step."""
        with torch.no_grad(), zo.full_params(self.model):
            self.model.get_parameter("embed.weight").clamp_(-0.5, 0.5)
            self.model.get_parameter("blocks.0.0.weight").mul_(0.9)

    def finish(self) -> list[float]:
        """Train to the end; the losses."""
        losses = []
        while not self.is_over():
            losses.append(self.one_batch())
        return losses

    def moment(self) -> Moment:
        """Everything as it is now."""
        drawn = RandomStates.now()
        with zo.full_params(self.model, writeback=False):
            params = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        return Moment(
            {
                "params": params,
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "rates": [group["lr"] for group in self.optimizer.param_groups],
                "scaler": self.scaler.state_dict(),
                "loader": self.loader.state_dict(),
                "random": {"python": list(drawn.python[1]), "numpy": list(drawn.numpy[1]), "torch": drawn.torch},
                "num_steps": self.num_steps,
            }
        )

    def close(self) -> None:
        """End the run."""
        zo.close(self.model)


@contextmanager
def training(scenario: Scenario, root: Path, env: Environment, **fields: Any) -> Iterator[Training]:
    """A `Training` that is closed at the end, with random states as they were."""
    with random_states_kept(), _no_fsync(env):
        run = Training(scenario, root, env, **fields)
        try:
            yield run
        finally:
            run.close()


@contextmanager
def _no_fsync(env: Environment) -> Iterator[None]:
    if env.open_engine is _UnflushedEngine:
        with without_fsync():
            yield
    else:
        yield


def _draw() -> float:
    """A number from each source of random numbers."""
    return random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002, S311


def _seed_all(rank: int) -> None:
    random.seed(11 + rank)
    np.random.seed(12 + rank)  # noqa: NPY002
    torch.manual_seed(13 + rank)


def environment_with(open_engine: Callable[[], Engine], *, in_background: bool = False) -> Environment:
    """Host memory, and an engine."""
    return Environment(
        accelerator=CpuAccelerator(),
        open_engine=open_engine,
        kernels=host_kernels(1),
        commit_in_background=in_background,
    )


class _UnflushedEngine:
    """The product's engine, but for flushes: nobody cuts the power of these drives, and they take most of the time."""

    reads_devices = False

    def __init__(self) -> None:
        self._engine = choose_engine().engine
        self.name = self._engine.name
        self.submit_read = self._engine.submit_read
        self.close = self._engine.close

    def submit_write(self, file: OpenFile, offset_bytes: int, source: torch.Tensor) -> Waitable:
        """Also where the file system would not mind."""
        check_aligned(offset_bytes, source)
        return self._engine.submit_write(file, offset_bytes, source)

    def register(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - the protocol's
        """Memory is taken as it comes."""
        return False

    def submit_flush(self, file: OpenFile) -> Waitable:
        """Nothing to do."""
        del file
        return _Nothing()


class _Nothing:
    def wait(self) -> None:
        """At once."""

    def done(self) -> bool:
        """It is."""
        return True


def real_environment(*, in_background: bool = False) -> Environment:
    """With the engine of the product, on drives that need no flush."""
    return environment_with(_UnflushedEngine, in_background=in_background)


def recording_environment(log: Log, *, in_background: bool = False) -> Environment:
    """With an engine that logs."""
    return environment_with(lambda: RecordingEngine(log), in_background=in_background)


def train_uninterrupted(scenario: Scenario, root: Path) -> Reference:
    """All of it, looking at everything after each step."""
    with training(scenario, root, real_environment()) as run:
        return watch_to_the_end(run, Reference([run.moment()]))


def train_ranks_uninterrupted(scenario: Scenario, root: Path, world_size: int) -> list[Reference]:
    """The same on each of several ranks."""

    def train(rank: int, turns: Turns) -> Reference:
        with training(scenario, root, of_rank(real_environment(), turns, TurnCollectives(turns, rank))) as run:
            return watch_to_the_end(run, Reference([run.moment()]))

    return in_turns(world_size, train)


def in_turns(world_size: int, function: Callable[[int, Turns], T]) -> list[T]:
    """What a function does on ranks of this process; none of them flushes what the engine has no part in."""
    turns = Turns(world_size)
    with without_fsync():
        return turns.run(lambda rank: function(rank, turns))


def of_rank(env: Environment, turns: Turns, collectives: TurnCollectives) -> Environment:
    """The environment of one rank of several that take turns."""
    return replace(
        env, collectives=collectives, make_waits=lambda recorder: TurnWaits(recorder, turns, collectives.rank)
    )


def watch_to_the_end(run: Training, reference: Reference) -> Reference:
    """Train to the end, adding to what is known of the steps before."""
    while not run.is_over():
        reference.losses.append(run.one_batch())
        if run.num_steps == len(reference.moments):
            reference.moments.append(run.moment())
    reference.last = run.moment()
    return reference


def differences(name: str, one: Any, other: Any) -> list[str]:
    """Between values and tensors in dictionaries and lists, to the bit; empty if there are none."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [f"{name}: {list(one)} != {list(other)}"]
        return [text for key in one for text in differences(f"{name}.{key}", one[key], other[key])]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for index, (a, b) in pairs for text in differences(f"{name}[{index}]", a, b)]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        if same and torch.equal(_raw(one), _raw(other)):
            return []
        return [f"{name}: tensors differ"]
    return [] if type(one) is type(other) and one == other else [f"{name}: {one!r} != {other!r}"]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
