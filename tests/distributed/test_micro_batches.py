"""Blocks in slices on ranks: each unit is gathered once in each direction, and reduced once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from support.folders import leftovers
from support.rank_emulation import EmulatedRanks
from support.rank_training import (
    MAX_NORM,
    NUM_MICRO_STEPS,
    NUM_ROWS,
    NUM_STEPS,
    OPTIONS,
    even_shares,
    micro_steps,
    train_all,
)
from support.ranks import run_ranks
from support.slices_by_hand import in_slices_by_hand
from support.small_models import small_gpt2

SIZE = NUM_ROWS // 2 // 2


def test_two_ranks_have_the_bits_of_plain_pytorch(tmp_path: Path) -> None:
    homes = [("host", "host", "host"), ("nvme", "nvme", "nvme")]
    train = partial(train_all, fields={"micro_batch_size": SIZE})
    ranks = run_ranks(train, 2, str(tmp_path), homes, even_shares(2))
    whole = run_ranks(train_all, 2, str(tmp_path), homes[:1], even_shares(2))
    assert leftovers(tmp_path) == []
    model = small_gpt2()
    in_slices_by_hand(SIZE)(model)
    plain = EmulatedRanks(model, 2, **OPTIONS)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for of_ranks, _ in micro_steps(step, even_shares(2)):
            losses.append(plain.micro_step(of_ranks, NUM_MICRO_STEPS))
        norms.append(plain.clip(MAX_NORM))
        plain.step()
    assert [result["losses"] for result in ranks] == [list(of_rank) for of_rank in zip(*losses, strict=True)]
    for result, at_once in zip(ranks, whole, strict=True):
        assert result["norms"] == norms
        for name, value in plain.params().items():
            assert torch.equal(result["params"][name], value), name
        assert {link: result["moved"][link] for link in ("gathered", "reduced")} == {
            link: at_once["moved"][link] for link in ("gathered", "reduced")
        }
