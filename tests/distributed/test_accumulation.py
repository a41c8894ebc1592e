"""Several backwards in bf16 on ranks: the mean of each is rounded once, their sum is in fp32."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from support.environments import PAIRWISE
from support.folders import leftovers
from support.rank_accumulation import NUM_MICRO_STEPS, NUM_STEPS, loss_of, train_halves
from support.rank_emulation import EmulatedRanks
from support.rank_training import MAX_NORM, OPTIONS, even_shares, micro_steps, train_all
from support.rank_training import NUM_MICRO_STEPS as NUM_GPT2_MICRO_STEPS
from support.rank_training import NUM_STEPS as NUM_GPT2_STEPS
from support.ranks import run_ranks
from support.small_models import half_used, small_gpt2


def test_gpt2_has_the_bits_of_plain_pytorch_on_every_tier(tmp_path: Path) -> None:
    fields = {"compute_dtype": "bf16", "accumulation_steps": NUM_GPT2_MICRO_STEPS}
    ranks = run_ranks(partial(train_all, fields=fields), 2, str(tmp_path), PAIRWISE, even_shares(2))
    assert leftovers(tmp_path) == []
    plain = EmulatedRanks(small_gpt2(), 2, compute_dtype="bf16", **OPTIONS)
    losses, norms = [], []
    for step in range(NUM_GPT2_STEPS):
        for of_ranks, _ in micro_steps(step, even_shares(2)):
            losses.append(plain.micro_step(of_ranks, NUM_GPT2_MICRO_STEPS))
        norms.append(plain.clip(MAX_NORM))
        plain.step()
    assert [result["losses"] for result in ranks] == [list(of_rank) for of_rank in zip(*losses, strict=True)]
    for result in ranks:
        assert result["norms"] == norms
        for name, value in plain.params().items():
            assert torch.equal(result["params"][name], value), name


def test_backwards_that_reach_a_part_of_each_unit(tmp_path: Path) -> None:
    ranks = run_ranks(train_halves, 2, str(tmp_path), [("host", "host", tier) for tier in ("host", "nvme")])
    assert leftovers(tmp_path) == []
    plain = EmulatedRanks(half_used(), 2, compute_dtype="bf16", **OPTIONS)
    norms = []
    for step in range(NUM_STEPS):
        for micro_step in range(NUM_MICRO_STEPS):
            plain.micro_step([loss_of(rank, step, micro_step) for rank in range(2)])
        norms.append(plain.clip(MAX_NORM))
        plain.step()
    for result in ranks:
        assert result["norms"] == norms
        for name, value in plain.params().items():
            assert torch.equal(result["params"][name], value), name
