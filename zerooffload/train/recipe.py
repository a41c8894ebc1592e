"""The recipe of a training run: a TOML file, validated once.

Paths may begin with `~`, and `{cache}` in them stands for zerooffload's cache folder; relative ones start at the
current folder.
"""

from __future__ import annotations

import difflib
import inspect
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from zerooffload.config import Algorithm, OffloadConfig, describe_validation_error
from zerooffload.errors import ConfigError
from zerooffload.integrations.huggingface import SLICE_RULES
from zerooffload.machine import cache_folder
from zerooffload.optim import OPTIMIZERS
from zerooffload.optim.optimizer import OffloadedOptimizer

# Names of fields of a section that pydantic would otherwise reserve.
_SECTION_CONFIG = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def expand(text: Any) -> Any:
    """A path's text with `~` and `{cache}` replaced; a list is taken item by item."""
    if isinstance(text, list | tuple):
        return [expand(item) for item in text]
    if isinstance(text, str):
        return os.path.expanduser(text.replace("{cache}", str(cache_folder())))  # noqa: PTH111 - keeps "owner/model"
    return text


ExpandedPath = Annotated[Path, BeforeValidator(expand)]
ExpandedText = Annotated[str, BeforeValidator(expand)]
PositiveInt = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]


class ModelSection(BaseModel):
    """[model]: what is trained."""

    model_config = _SECTION_CONFIG

    name: ExpandedText | None = None
    """A model folder, or a name on the hub."""
    config: dict[str, Any] | ExpandedPath | None = None
    """Instead of a name: the fields of a config.json, or its path. The weights are random then."""
    tokenizer: ExpandedText | None = None
    """A folder or hub name, or "bytes". None: the model's own; "bytes" for random weights."""
    gradient_checkpointing: bool = False
    """Keep only the blocks' inputs, and compute the rest again in backward."""
    strict: bool = True
    """Refuse a folder that lacks weights, or holds some that the model has no place for. False: a warning tells them,
    and missing ones are initialised."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.config is None):
            raise ValueError("[model] needs either name (a folder or hub name) or config (random weights)")
        return self


class DataSection(BaseModel):
    """[data]: what it is trained on."""

    model_config = _SECTION_CONFIG

    path: ExpandedPath
    """A text file (UTF-8), or documents as JSON objects, one a line (*.jsonl)."""
    field: str = "text"
    """The field of those objects that holds the text."""


class OptimizerSection(BaseModel):
    """[optimizer]: which one, and its settings. Those left out are the optimizer's own defaults."""

    model_config = _SECTION_CONFIG

    name: Algorithm = "adamw"
    lr: Annotated[float, Field(ge=0)] = 1e-4
    betas: tuple[float, float] | None = None
    eps: Annotated[float, Field(ge=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    momentum: Annotated[float, Field(ge=0)] | None = None
    dampening: float | None = None
    nesterov: bool | None = None
    lr_decay: Annotated[float, Field(ge=0)] | None = None
    initial_accumulator_value: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _known_to_the_optimizer(self) -> Self:
        known = inspect.signature(OPTIMIZERS[self.name]).parameters
        for setting in self.settings():
            if setting not in known:
                raise ValueError(f"{self.name} has no setting {setting}")
        return self

    def settings(self) -> dict[str, Any]:
        """The optimizer's arguments that are set."""
        return self.model_dump(exclude={"name"}, exclude_none=True)

    def make(self, params: Iterable[torch.Tensor]) -> OffloadedOptimizer:
        """The optimizer of these parameters."""
        return OPTIMIZERS[self.name](params, **self.settings())


class ScheduleSection(BaseModel):
    """[schedule]: the learning rate over the steps."""

    model_config = _SECTION_CONFIG

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: CountOrNone = 0
    """Steps in which the rate rises linearly to `lr`."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of `lr`, where linear and cosine end."""


class TrainingSection(BaseModel):
    """[training]: how long, in which batches."""

    model_config = _SECTION_CONFIG

    steps: PositiveInt
    batch_size: PositiveInt = 1
    """Sequences of a forward; a step has this many times `accumulation_steps`."""
    sequence_length: PositiveInt = 1024
    """Tokens that a sequence predicts."""
    accumulation_steps: PositiveInt = 1
    """Backwards of a step. With more than 1, gradients of bf16 and fp16 parameters add up in fp32."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the gradients' global norm to this. None: no clipping."""
    seed: CountOrNone = 0
    """Of the order of the data, of dropout and of random weights."""
    evaluation_windows: CountOrNone = 0
    """Sequences held out from the end of the data; their loss is taken before and after training."""
    rank_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Under torchrun: how long a rank waits for the others before it gives up. A rank of the same machine that dies is
    noticed at once."""

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens of a step."""
        return self.batch_size * self.sequence_length * self.accumulation_steps


class CheckpointSection(BaseModel):
    """[checkpoint]: what is saved on the way, beside the training."""

    model_config = _SECTION_CONFIG

    directory: ExpandedPath
    """Made if it is not there; under torchrun one that all ranks see."""
    every_steps: PositiveInt
    keep_last: PositiveInt | None = None
    """So many checkpoints stay in the directory. None: all."""


class Recipe(BaseModel):
    """A training run."""

    model_config = _SECTION_CONFIG

    model: ModelSection
    data: DataSection
    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    """Home tiers, budgets and paths: the fields of `zo.OffloadConfig`."""
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection
    checkpoint: CheckpointSection | None = None

    @model_validator(mode="after")
    def _one_algorithm(self) -> Self:
        named = self.offload.algorithm if "algorithm" in self.offload.model_fields_set else self.optimizer.name
        if named != self.optimizer.name:
            raise ValueError(f"[offload] algorithm is {named}, but [optimizer] name is {self.optimizer.name}")
        return self

    @model_validator(mode="after")
    def _one_number_of_backwards(self) -> Self:
        said, done = self.offload.accumulation_steps, self.training.accumulation_steps
        if said not in (None, done):
            raise ValueError(
                f"[offload] accumulation_steps is {said}, but [training] accumulation_steps is {done}:"
                " leave the former out, it follows the latter"
            )
        return self

    @property
    def placement(self) -> OffloadConfig:
        """[offload], with the states of [optimizer], the backwards of [training], and what transformers' names mean."""
        update: dict[str, Any] = {"algorithm": self.optimizer.name}
        if "accumulation_steps" not in self.offload.model_fields_set:
            update["accumulation_steps"] = self.training.accumulation_steps
        if self.offload.micro_batch_size is not None:
            # The first that matches counts, so the user's come first.
            update["slice_rules"] = self.offload.slice_rules | {
                name: rule for name, rule in SLICE_RULES.items() if name not in self.offload.slice_rules
            }
        return self.offload.model_copy(update=update)


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe in a TOML file, with settings replaced as `section.key=value` says.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a setting is unknown or wrong.
    """
    values = read_values(path)
    for text in overrides:
        override(values, text)
    return recipe_from(values, str(path))


def read_values(path: str | Path) -> dict[str, Any]:
    """The values of a recipe in a TOML file, as they stand there.

    Raises
    ------
    ConfigError
        If the file cannot be read.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {path}: {error}") from error


def recipe_from(values: Mapping[str, Any], whose: str = "recipe") -> Recipe:
    """A recipe from plain values; `whose` begins the messages.

    Raises
    ------
    ConfigError
        If a setting is unknown or wrong.
    """
    _check_names(values, whose)
    fields = dict(values)
    offload = dict(fields.get("offload", {}))
    if "nvme_paths" in offload:
        offload["nvme_paths"] = expand(offload["nvme_paths"])
    try:
        fields["offload"] = OffloadConfig(**offload)
        return Recipe(**fields)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(whose, error)) from None
    except ConfigError as error:
        raise ConfigError(f"{whose}: [offload]: {error}") from None


def override(values: dict[str, Any], setting: str) -> None:
    """Replace what `setting`, a text such as "training.steps=100", names in the values of a recipe.

    Raises
    ------
    ConfigError
        If it is no such text.
    """
    name, equals, text = setting.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {setting}: expected section.key=value, such as training.steps=100")
    *folders, last = key.split(".")
    target = values.setdefault(section, {})
    for folder in folders:
        target = target.setdefault(folder, {}) if isinstance(target, dict) else target
    if not isinstance(target, dict):
        raise ConfigError(f"--set {setting}: {name.strip().rpartition('.')[0]} is no table")
    target[last] = _toml_value(text.strip())


def _toml_value(text: str) -> Any:
    """A TOML value; what is none, such as a path without quotes, is taken as text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _check_names(values: Mapping[str, Any], whose: str) -> None:
    """Refuse unknown sections and keys, each with the known one that it looks most like."""
    for section, content in values.items():
        if section not in Recipe.model_fields:
            raise ConfigError(f"{whose}: unknown section [{section}]; {_closest(section, Recipe.model_fields)}")
        if not isinstance(content, Mapping):
            raise ConfigError(f"{whose}: {section} must be a section, [{section}], got {content!r}")
        known = _fields_of(section)
        for key in content:
            if key not in known:
                raise ConfigError(f"{whose}: unknown key {section}.{key}; {_closest(key, known, f'{section}.')}")


def _fields_of(section: str) -> Iterable[str]:
    kind = Recipe.model_fields[section].annotation
    models = [item for item in (kind, *get_args(kind)) if isinstance(item, type) and issubclass(item, BaseModel)]
    return list(models[0].model_fields)


def _closest(name: str, known: Iterable[str], prefix: str = "") -> str:
    known = list(known)
    best = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"did you mean {prefix}{best[0]}? Known are: {', '.join(known)}"
