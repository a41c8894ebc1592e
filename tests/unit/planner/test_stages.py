"""ZeRO's memory model, as its paper has it, and ours beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zerooffload
from zerooffload import ConfigError
from zerooffload.optim.record import OptimizerStates
from zerooffload.planner.stages import ParameterBytes, parameter_bytes, sharding_of, stage_table

BILLION = 10**9


def test_the_papers_table() -> None:
    """Figure 1 of the paper: 7.5 B parameters on 64 ranks, in GB of 10^9 bytes."""
    table = stage_table(7_500_000_000, 64)
    assert [row.stage for row in table] == [0, 1, 2, 3]
    assert [f"{row.zero / BILLION:.3g}" for row in table] == ["120", "31.4", "16.6", "1.88"]


def test_ours_beside_it() -> None:
    """The master in bf16 is the parameter and 16 bits more: 14 bytes a parameter instead of 16."""
    table = stage_table(7_500_000_000, 64)
    assert [f"{row.ours / BILLION:.4g}" for row in table] == ["105", "31.17", "16.41", "1.641"]
    fp16 = stage_table(7_500_000_000, 64, torch.float16)
    assert [row.ours for row in fp16] == [row.zero for row in fp16]


@pytest.mark.parametrize(
    ("dtype", "moments", "expected"),
    [
        (torch.float32, "fp32", ParameterBytes(4, 4, 8)),
        (torch.bfloat16, "fp32", ParameterBytes(2, 2, 10)),
        (torch.float16, "fp32", ParameterBytes(2, 2, 12)),
        (torch.bfloat16, "bf16", ParameterBytes(2, 2, 6)),
        (torch.bfloat16, "8bit", ParameterBytes(2, 2, 4 + 2 / 128)),
    ],
)
def test_bytes_of_a_parameter(dtype: torch.dtype, moments: str, expected: ParameterBytes) -> None:
    assert parameter_bytes(dtype, OptimizerStates(moments=moments)) == expected  # type: ignore[arg-type]
    assert parameter_bytes(dtype, OptimizerStates(), accumulates=True).gradients == 4


def test_on_one_rank_all_stages_are_the_same() -> None:
    assert len({row.ours for row in stage_table(1000, 1)}) == 1


def test_each_stage_shards_one_state_more() -> None:
    sharded = [(item.optimizer, item.gradients, item.params) for item in map(sharding_of, (0, 1, 2, 3))]
    assert sharded == [(False,) * 3, (True, False, False), (True, True, False), (True,) * 3]


def test_nonsense_is_refused() -> None:
    for num_params, world_size in ((0, 4), (4, 0)):
        with pytest.raises(ConfigError, match="parameters and ranks"):
            stage_table(num_params, world_size)
    with pytest.raises(ConfigError, match="cannot be trained"):
        stage_table(1, 1, torch.int8)


def test_the_table_in_the_documentation() -> None:
    page = (Path(zerooffload.__file__).parent / "docs" / "stages.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    header, *shown = rows
    assert header[1:6] == ["parameters", "gradients", "optimizer state", "ZeRO, fp16", "here, bf16"]
    words = {True: "sharded", False: "whole"}
    expected = []
    for row in stage_table(7_500_000_000, 64):
        sharding = sharding_of(row.stage)
        kept = [words[is_sharded] for is_sharded in (sharding.params, sharding.gradients, sharding.optimizer)]
        expected.append([str(row.stage), *kept, *(f"{of / BILLION:.3g} GB" for of in (row.zero, row.ours))])
    assert [cells[:6] for cells in shown] == expected
    # Counted in tests/distributed/test_accounts.py.
    assert [cells[6] for cells in shown] == ["2 Ψ", "2 Ψ", "2 Ψ", "3 Ψ"]
