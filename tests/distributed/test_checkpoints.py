"""Checkpoints of replicas and of pipelines; those of plain ranks are in tests/durability/test_checkpoints.py."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support.pipelines import whole_model
from support.rank_checkpoints import save_and_load_pipelines, save_and_load_replicas
from support.rank_training import whole_params
from support.ranks import run_ranks

import zerooffload as zo


def test_replicas_write_their_states_once_and_shards_load_them(tmp_path: Path) -> None:
    results = run_ranks(save_and_load_replicas, 4, str(tmp_path))
    assert [result["same"] for result in results] == [True] * 4
    assert [result["extra"] for result in results] == [{"rank": rank} for rank in range(4)]
    folder = Path(results[0]["folder"])
    manifests = [json.loads(path.read_text().partition("\n")[0]) for path in sorted(folder.glob("rank-*.json"))]
    assert [bool(manifest["params"]) for manifest in manifests] == [True, True, False, False]
    assert {path.name.split("-")[1] for path in folder.glob("*.safetensors")} == {"00000", "00001"}


def test_stages_save_the_whole_model_together(tmp_path: Path) -> None:
    """Which each stage loads its part of, and one rank loads whole."""
    results = run_ranks(save_and_load_pipelines, 4, str(tmp_path))
    assert [result["same"] for result in results] == [True] * 4
    assert all("two stages of the pipeline have a parameter 0.down.bias" in result["refused"] for result in results)
    model = zo.offload(whole_model(), zo.OffloadConfig(threads=1))
    zo.load(results[0]["folder"], model, zo.AdamW(model.parameters()))
    loaded = whole_params(model)
    zo.close(model)
    saved = {name: value for result in results for name, value in result["saved"].items()}
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
