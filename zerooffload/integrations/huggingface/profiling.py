"""What language models of transformers ask of the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from zerooffload.config import UnitSpec
from zerooffload.errors import ConfigError
from zerooffload.integrations.huggingface.losses import next_token_loss
from zerooffload.integrations.huggingface.models import ModelSource, build_model, model_config
from zerooffload.planner.profiles import ModelProfile
from zerooffload.planner.tracing import trace_model


def profile_language_model(
    source: ModelSource,
    *,
    batch_size: int,
    sequence_length: int,
    units: UnitSpec = "auto",
    device: torch.device | str = "cpu",
) -> ModelProfile:
    """What a causal language model asks for on one (micro-)batch of tokens, from its configuration alone.

        profile_language_model(ModelSource(name="owner/model"), batch_size=1, sequence_length=4096)

    Parameters
    ----------
    source : ModelSource
        Of the hub only config.json is read. Gradient checkpointing is left out: a profile tells both what a block saves
        and what it keeps if it is computed again.
    batch_size, sequence_length : int
    units, device
        See `trace_model`.

    Raises
    ------
    ConfigError
        If the sizes are no positive numbers, there is no such model, or it cannot be traced without weights.
    """
    return LanguageModelProfiles(source, units=units, device=device).of_batch(batch_size, sequence_length)


class LanguageModelProfiles:
    """Profiles of a causal language model on batches of any shape. Each is traced once."""

    def __init__(self, source: ModelSource, *, units: UnitSpec = "auto", device: torch.device | str = "cpu") -> None:
        self._source = replace(source, gradient_checkpointing=False)
        self._config = model_config(source)
        self._units = units
        self._device = device
        self._profiles: dict[tuple[int, int], ModelProfile] = {}

    def of_batch(self, batch_size: int, sequence_length: int) -> ModelProfile:
        """See `profile_language_model`."""
        shape = (batch_size, sequence_length)
        if min(shape) < 1:
            raise ConfigError(
                f"a batch needs a sample and a token at least, got batch_size={batch_size},"
                f" sequence_length={sequence_length}"
            )
        if shape not in self._profiles:
            self._profiles[shape] = self._trace(shape)
        return self._profiles[shape]

    def _trace(self, shape: tuple[int, int]) -> ModelProfile:
        tokens = torch.zeros(shape, dtype=torch.int64)
        name = self._source.name or self._config.model_type
        try:
            return trace_model(
                lambda: build_model(self._source, self._config),
                lambda model: next_token_loss(model, tokens, tokens),
                units=self._units,
                name=name,
                batch_size=shape[0],
                sequence_length=shape[1],
                device=self._device,
            )
        except RuntimeError as error:
            raise ConfigError(f"{name} cannot be traced without weights: {error}") from error
