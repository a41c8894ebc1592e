"""Models of transformers: where they are, their configurations, and models with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerooffload.checkpoint.gguf_file import GgufFile
from zerooffload.errors import ConfigError
from zerooffload.integrations.huggingface.gguf_llama import llama_config

_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_CONFIG_FILES = ["config.json"]


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What to build.

    Attributes
    ----------
    name : str, optional
        A model folder, the GGUF file of a Llama, or a name on the hub.
    config : Mapping[str, Any] or pathlib.Path, optional
        The fields of a config.json, or the file: weights are random then.
    seed : int
        For random weights.
    dtype : torch.dtype, optional
        Of the parameters; default: as the configuration says.
    model_class : type, optional
        Of transformers, or one of its Auto classes. Default: a causal language model.
    gradient_checkpointing : bool
        Recompute each block's activations in backward.
    trust_remote_code : bool
        Run Python code that comes with the model.
    """

    name: str | None = None
    config: Mapping[str, Any] | Path | None = None
    seed: int = 0
    dtype: torch.dtype | None = None
    model_class: Any = None
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False


def resolve_folder(name: str, *, trust_remote_code: bool = False) -> Path:
    """The folder of a model that is given as a folder or as a name on the hub; downloads what is missing.

    Raises
    ------
    ConfigError
        If there is no such folder, and no such model can be fetched.
    """
    return _folder_with(_HUB_FILES, name, trust_remote_code=trust_remote_code)


def _folder_with(files: Sequence[str], name: str, *, trust_remote_code: bool) -> Path:
    """As above; of what the hub has only files that match one of the patterns."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model folder {folder} does not exist")
    patterns = [*files, "*.py"] if trust_remote_code else list(files)
    with transformers_errors(f"model {name!r} is no folder here, and could not be had from the hub"):
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - an extra

        return Path(snapshot_download(name, allow_patterns=patterns))


def is_gguf(name: str) -> bool:
    """Whether a name is that of a GGUF file."""
    return name.endswith(".gguf") and Path(name).expanduser().is_file()


def source_config(source: ModelSource) -> Any:
    """The transformers configuration of the model, as it is published; from the hub nothing else is fetched.

    Raises
    ------
    ConfigError
        If transformers is missing, or knows no such model.
    """
    with transformers_errors("the model's configuration cannot be used"):
        from transformers import AutoConfig  # noqa: PLC0415 - an extra

        if source.name is not None and is_gguf(source.name):
            with GgufFile(Path(source.name).expanduser()) as file:
                return AutoConfig.for_model(**llama_config(file))
        if source.name is not None:
            folder = _folder_with(_CONFIG_FILES, source.name, trust_remote_code=source.trust_remote_code)
            return AutoConfig.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
        if isinstance(source.config, Path):
            return AutoConfig.from_pretrained(source.config.expanduser())
        fields = dict(source.config or {})
        return AutoConfig.for_model(fields.pop("model_type", "(missing model_type)"), **fields)


def model_config(source: ModelSource) -> Any:
    """The configuration to train with; raises as `source_config` does."""
    config = source_config(source)
    # Training reads no cache, and one that is filled holds every block's keys and values.
    config.use_cache = False
    return config


def build_model(source: ModelSource, config: Any = None) -> nn.Module:
    """The model with random weights, under whatever device or mode is active. Consumes random numbers."""
    config = config if config is not None else model_config(source)
    with transformers_errors("the model cannot be built"):
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an extra

        dtype = source.dtype or _dtype_in(config)
        trust = {"trust_remote_code": True} if source.trust_remote_code else {}
        kind: Any = source.model_class or AutoModelForCausalLM
        # The Auto classes have the one, models the other.
        make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        model: nn.Module = make(config, dtype=dtype, **(trust if hasattr(kind, "from_config") else {}))
    if source.gradient_checkpointing:
        # transformers 5 renamed it, and warns about the old name.
        old: Any = getattr(model, "gradient_checkpointing_enable", None)
        enable: Any = getattr(model, "activation_checkpointing_enable", old)
        enable({"use_reentrant": False})
    return model.train()


def random_model(source: ModelSource, config: Any = None) -> nn.Module:
    """The model on the CPU with seeded random weights; leaves the random numbers of others alone.

    Raises
    ------
    ConfigError
        If the model cannot be built.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.seed)
        return build_model(source, config)


def _dtype_in(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


@contextmanager
def transformers_errors(what: str) -> Iterator[None]:
    """What the libraries raise, as one error of ours; their own is the cause."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name in ("transformers", "tokenizers", "huggingface_hub"):
            raise ConfigError("this needs transformers: pip install 'zerooffload[hf]'") from None
        raise ConfigError(f"{what}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        raise ConfigError(f"{what}: {error}") from error
