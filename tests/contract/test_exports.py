"""The public face, name by name."""

from __future__ import annotations

import inspect
import pkgutil

import pytest

import zerooffload as zo

# Adding a name is a decision; taking one away breaks somebody.
FACE = [
    "Adagrad",
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "GradScaler",
    "InternalError",
    "Lion",
    "OffloadConfig",
    "RankError",
    "SGD",
    "StepReport",
    "TierIOError",
    "TierUsage",
    "ZeroOffloadError",
    "clip_grad_norm_",
    "close",
    "export_safetensors",
    "full_params",
    "load",
    "load_dcp",
    "load_deepspeed",
    "load_pretrained",
    "no_sync",
    "offload",
    "plan",
    "promote",
    "reclaim_device",
    "release_device",
    "resume",
    "save",
    "save_dcp",
    "sliced_loss",
    "step_report",
    "trace",
    "track",
]


EXPORT_SIGNATURE = (
    "(model, directory, *, dtype=None, max_shard_size='5GB', base_model=False, tokenizer=None, overwrite=False)"
)


def test_the_public_face_is_exactly_this() -> None:
    assert sorted(zo.__all__) == FACE
    assert [name for name in dir(zo) if not name.startswith("__")] == FACE


@pytest.mark.parametrize("name", FACE)
def test_every_name_is_there_and_explained(name: str) -> None:
    assert (inspect.getdoc(getattr(zo, name)) or "").strip()


def test_offload_is_the_function_and_not_its_module() -> None:
    assert callable(zo.offload)
    assert zo.offload.__name__ == "offload"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ofload'"):
        _ = zo.ofload  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("offload", "(model, config=None, *, process_group=None, pipeline_group=None, weights=None)"),
        (
            "load_pretrained",
            "(name, config=None, *, process_group=None, model_class=None, strict=True, trust_remote_code=False)",
        ),
        ("full_params", "(module, writeback=True, *, grads=False)"),
        ("clip_grad_norm_", "(model_or_params, max_norm, norm_type=2.0, error_if_nonfinite=False)"),
        ("sliced_loss", "(head, loss_fn, *, micro_batch_size=None)"),
        ("step_report", "(model)"),
        (
            "plan",
            "(model, config=None, *, run_step, batch_size, sequence_length=1, machine=None, recomputed=(), clips=True)",
        ),
        ("no_sync", "(model)"),
        ("promote", "(nvme_paths, directory)"),
        ("trace", "(model, path, *, steps=None)"),
        ("close", "(model)"),
        (
            "export_safetensors",
            EXPORT_SIGNATURE,
        ),
        (
            "AdamW",
            "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, *, maximize=False)",
        ),
    ],
)
def test_signatures_are_kept(name: str, signature: str) -> None:
    found = inspect.signature(getattr(zo, name))
    bare = [param.replace(annotation=param.empty) for param in found.parameters.values()]
    assert str(found.replace(parameters=bare, return_annotation=found.empty)) == signature


def test_no_submodule_takes_the_name_of_an_export() -> None:
    # Importing it first would make `zo.offload` a module.
    names = {module.name for module in pkgutil.iter_modules(zo.__path__)}
    assert names.isdisjoint(zo.__all__)
