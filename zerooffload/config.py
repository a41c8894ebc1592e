"""`OffloadConfig`: everything that a user may decide, validated once."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from zerooffload.errors import ConfigError
from zerooffload.formats import parse_bytes


class TierName(StrEnum):
    """Where a state can have its home, from the fastest to the largest."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class UpdateMode(StrEnum):
    """When an update runs; see `OffloadConfig.update`."""

    AFTER_BACKWARD = "after_backward"
    UNDER_NEXT_FORWARD = "under_next_forward"
    DURING_BACKWARD = "during_backward"


ByteCount = Annotated[int, BeforeValidator(parse_bytes)]
"""A number of bytes, also written "24GiB"."""

HomeTier = Literal["auto", "device", "host", "nvme"]
TierChoice = HomeTier | dict[str, HomeTier]
"""One home tier for all units, or one for each `fnmatch` pattern of unit names; the first that matches counts."""
Activations = Literal["auto", "keep", "device", "host", "nvme"]
ActivationChoice = Activations | dict[str, Activations]
"""What becomes of activations in all blocks, or for each `fnmatch` pattern of unit names; the first counts."""

_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Stage = Literal[0, 1, 2, 3]
Algorithm = Literal["adamw", "adam", "adagrad", "lion", "sgd"]
"""The optimizers, by the names of their rules."""
MomentFormat = Literal["fp32", "bf16", "8bit"]
"""How an optimizer's moments are kept."""
UnitSpec = Literal["auto"] | list[str] | list[type] | Callable[..., Any]


def _a_list_of_paths(value: Any) -> Any:
    return [value] if isinstance(value, str | Path) else value


class OffloadConfig(BaseModel):
    """How a model is cut, where its states live, and what they may take.

    Frozen and keyword-only. Byte counts are integers or texts with a unit ("24GiB"). An unknown or wrong field raises
    `ConfigError` with its name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    stage: Stage = 3
    """ZeRO stage, where there are several ranks. 3: each rank keeps 1/N of parameters, gradients and optimizer state.
    2: parameters whole; they are gathered once a step instead of for each use. 1: gradients whole too. 0: all whole, as
    in plain data parallelism. The numbers are the same."""
    params: TierChoice = "auto"
    """Home tier of the parameters. "auto": a plan chooses. Recipes and `zerooffload plan` know what a step computes; a
    model alone gets host, or, if that does not fit, what costs its links least within the budgets."""
    optimizer: TierChoice = "auto"
    """Home tier of the optimizer state (what the master has beyond the parameter, and the moments)."""
    gradients: TierChoice = "auto"
    """Home tier of the gradients between backward and update."""
    nvme_paths: Annotated[tuple[Path, ...], BeforeValidator(_a_list_of_paths)] = ()
    """Folders on the drives of the nvme tier. A folder of ours is made inside each; nothing else is touched."""
    device_memory: ByteCount | None = None
    """Bound on our bytes in device memory. None: what the device has free."""
    host_memory: ByteCount | None = None
    """Bound on our bytes in host memory; on a CPU device it includes the parameters in use. None: what the machine (or
    its memory cgroup) has available."""
    nvme_space: ByteCount | None = None
    """Bound on our bytes on the nvme paths together. None: what is free there."""
    compute_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of floating-point parameters in forward and backward. None keeps the model's own. "fp16" wants a
    `GradScaler`."""
    algorithm: Algorithm = "adamw"
    """The optimizer that the states are laid out for: its moments decide what they take."""
    moments: MomentFormat = "fp32"
    """Format of the optimizer's moments. The fewer bits, the less they take and move; they change the numbers:
    moments are then rounded up or down at random (the same in every run)."""
    units: UnitSpec = "auto"
    """How the model is cut: "auto", module classes, `fnmatch` patterns of module names, or `(name, module) -> bool`."""
    update: Literal["auto", "after_backward", "under_next_forward", "during_backward"] = "auto"
    """When the optimizer update runs; the numbers are the same. "after_backward": in `optimizer.step()`.
    "under_next_forward": it goes on when `step()` has returned, and a unit's is done before its next use.
    "during_backward": a unit's may begin as soon as its gradient is complete, where its states have second slots on
    nvme; what `step()` finds to be other than expected (clipping, a learning rate) is redone. "auto": hidden where the
    update uses what compute does not, ahead unless clipping fires often."""
    accumulation_steps: Annotated[int, Field(ge=1, strict=True)] | None = None
    """How many backwards add up before each `optimizer.step()`. With more than 1, gradients of bf16 and fp16 parameters
    are added and held in fp32, in 2 more bytes a parameter. None: not said; they add up in their own dtype, as torch's
    do."""
    micro_batch_size: Annotated[int, Field(ge=1, strict=True)] | Literal["auto"] | None = None
    """Samples of a slice: each block takes the whole batch and runs it in slices, computed again in backward, so that
    its parameters move once in each direction of a step. None: blocks run the whole batch at once. "auto": as a plan
    says, where the batch is known: in recipes and `zerooffload plan`."""
    slice_rules: dict[str, Literal["batch", "shared"]] = {}
    """What a slice gets of a block's argument, where that is not certain: its own samples ("batch"), or all of it
    ("shared"). By the argument's name, or "unit:argument" with an `fnmatch` pattern for the unit."""
    activations: ActivationChoice = "auto"
    """What becomes of a block's activations between forward and backward. "keep": autograd keeps them, and the block is
    not sliced. "device", "host", "nvme": the block's input alone is kept, there, and the rest computed again. "auto":
    "device" with `micro_batch_size`, else "keep"."""
    activation_memory: dict[Literal["device", "host", "nvme"], ByteCount] = {}
    """Bytes of a tier set aside for inputs of blocks. Without: they take what is left of its budget when they come."""
    atomic_steps: bool = True
    """Commit whole steps on the nvme tier, where all that is trained lives there (or is `durable`): a crash costs at
    most one finished step and the one in progress, and `zo.resume` continues. Takes two slots a chunk, so twice the
    space. False: half the space, nothing to resume."""
    durable: bool = False
    """Also keep copies on nvme of trained states that live elsewhere, so that such a placement can be resumed too. They
    are written in every step."""
    overwrite: bool = False
    """Lose a run that the nvme paths hold, instead of refusing to train before `zo.resume`."""
    verify_reads: bool = False
    """Compare a checksum in every read of a state from nvme, not only in `zo.resume`."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of the optimizer kernel. None: one for each physical core of this rank's share of the machine, which
    its threads stay on, as far as the CPU quota goes."""
    io_engine: Literal["auto", "uring", "threads", "aiofiles", "kvikio"] = "auto"
    """I/O engine of the nvme tier. "auto" measures, once for each drive, which is the fastest there, and at each start
    whether kvikio, if it is installed, reads faster into a CUDA device (GPUDirect Storage). A forced engine never falls
    back."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(describe_validation_error("OffloadConfig", error)) from None

    @model_validator(mode="after")
    def _nvme_needs_a_path(self) -> Self:
        choices = (self.params, self.optimizer, self.gradients)
        wants_nvme = any("nvme" in (c.values() if isinstance(c, dict) else (c,)) for c in choices)
        if wants_nvme and not self.nvme_paths:
            raise ValueError("a state has its home on nvme, but nvme_paths is empty: name a folder on the drive")
        if self.keeps_activations_on_nvme and not self.nvme_paths:
            raise ValueError("activations go to nvme, but nvme_paths is empty: name a folder on the drive")
        if self.durable and not self.nvme_paths:
            raise ValueError("durable keeps copies on nvme, but nvme_paths is empty: name a folder on the drive")
        if self.durable and not self.atomic_steps:
            raise ValueError("durable needs atomic_steps: a copy that a crash leaves half-written resumes nothing")
        return self

    @property
    def torch_compute_dtype(self) -> torch.dtype | None:
        """The compute dtype as torch's, or None to keep the model's own."""
        return None if self.compute_dtype is None else _COMPUTE_DTYPES[self.compute_dtype]

    @property
    def accumulates(self) -> bool:
        """Whether several backwards are said to add up before each step."""
        return (self.accumulation_steps or 1) > 1

    @property
    def leaves_homes_open(self) -> bool:
        """Whether the home of some state may be for a plan to choose: of units that no pattern matches, too."""
        choices = (self.params, self.optimizer, self.gradients)
        return any("auto" in c.values() or "*" not in c if isinstance(c, dict) else c == "auto" for c in choices)

    @property
    def slice_size(self) -> int | None:
        """`micro_batch_size` as a number.

        Raises
        ------
        ConfigError
            If that is still to be planned.
        """
        if self.micro_batch_size == "auto":
            raise ConfigError(
                'micro_batch_size = "auto" is chosen where the batch is known: by a recipe, or by zerooffload plan,'
                " whose answer can be given here"
            )
        return self.micro_batch_size

    @property
    def keeps_activations_on_nvme(self) -> bool:
        """Whether inputs of blocks may go there."""
        choice = self.activations
        return "nvme" in (choice.values() if isinstance(choice, dict) else (choice,))

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> Self:
        """A config from plain values, as read from TOML or JSON."""
        return cls(**fields)

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """A config from the fields of a TOML file.

        Raises
        ------
        ConfigError
            If the file is missing or is not TOML, or a field is unknown or wrong.
        """
        try:
            fields = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from error
        return cls(**fields)


def describe_validation_error(whose: str, error: ValidationError) -> str:
    """One line a wrong field: its name, what is wrong, what was given."""
    lines = [f"{whose}: {error.error_count()} wrong setting(s)"]
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "(whole)"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown setting; check its spelling"
            lines.append(f"  {name}: {message}")
        elif item["loc"]:
            lines.append(f"  {name}: {message} (got {item['input']!r})")
        else:
            lines.append(f"  {message}")
    return "\n".join(lines)
