"""Ranks with batches of other sizes, and ranks that use other parts of the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from support.environments import Homes
from support.rank_bound import RanksAndOne
from support.rank_emulation import EmulatedRanks
from support.rank_training import MAX_NORM, NUM_STEPS, OPTIONS, micro_steps, shares, train_all
from support.ranks import run_ranks
from support.routed import Routed, Use, refusal_of_routed, routed_input, train_routed
from support.small_models import small_gpt2

HOMES: list[Homes] = [("host", "host", "host"), ("nvme", "nvme", "nvme")]


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("num_rows", [(5, 7), (1, 4, 7)], ids=str)
def test_uneven_batches(num_rows: tuple[int, ...], tmp_path: Path, *, weighted: bool) -> None:
    """Weighted by `world_size * own / all`, ranks train like one on all rows; else on the mean of their means."""
    each_rank = shares(num_rows, weighted=weighted)
    results = run_ranks(train_all, len(num_rows), str(tmp_path), HOMES, each_rank)
    side_by_side = RanksAndOne(small_gpt2, len(num_rows), OPTIONS)
    for step in range(NUM_STEPS):
        side_by_side.step(micro_steps(step, each_rank, mean_of_ranks=not weighted), MAX_NORM)
    for result in results:
        for name, value in side_by_side.ranks.params().items():
            assert torch.equal(result["params"][name], value), name
    assert side_by_side.excess() <= 1.0
    assert max(float(bound.max()) for bound in side_by_side.bounds().values()) < OPTIONS["lr"] / 20


def test_unweighted_is_not_one_rank_on_the_whole_batch() -> None:
    side_by_side = RanksAndOne(small_gpt2, 2, OPTIONS)
    side_by_side.step(micro_steps(0, shares((5, 7))), MAX_NORM)
    assert side_by_side.excess() > 1.0


def expect_as_if_zero(uses: Sequence[tuple[Use, ...]], *, least_window: bool) -> None:
    """A rank that does not use the second block counts as one whose gradient is zero; if nobody does, there is none."""
    world_size = len(uses[0])
    plain = EmulatedRanks(Routed(), world_size, **OPTIONS)
    norms = []
    for step, of_ranks in enumerate(uses):
        losses = [
            partial(lambda model, rank, step, use: model(routed_input(rank, step), use), rank=rank, step=step, use=use)
            for rank, use in enumerate(of_ranks)
        ]
        plain.micro_step(losses)
        norms.append(plain.clip(0.1))
        plain.step()
    for result in run_ranks(train_routed, world_size, uses, least_window, limit_seconds=30):
        assert result["norms"] == norms
        for name, value in plain.params().items():
            assert torch.equal(result["params"][name.removeprefix("blocks.")], value), name


@pytest.mark.parametrize("least_window", [True, False])
def test_a_rank_that_multiplies_a_part_with_zero(*, least_window: bool) -> None:
    yes, zero = Use.YES, Use.TIMES_ZERO
    expect_as_if_zero([(yes, zero), (zero, yes), (zero, zero), (yes, yes)], least_window=least_window)
    expect_as_if_zero([(yes, zero, zero), (zero, yes, zero), (zero, zero, yes)], least_window=least_window)


def test_a_rank_whose_loss_does_not_see_a_part() -> None:
    """Everything stays gathered for the backward, so it gathers nothing."""
    yes, unseen = Use.YES, Use.UNSEEN
    uses = [(yes, unseen), (unseen, yes), (unseen, unseen), (yes, yes), (unseen, yes)]
    expect_as_if_zero(uses, least_window=False)


@pytest.mark.parametrize(
    ("uses", "least_window"),
    [
        ((Use.YES, Use.NO), False),
        ((Use.NO, Use.YES), False),
        # Parts of one size: each rank gets as many bytes as it waits for.
        ((Use.NO, Use.NO_OTHER), False),
        # Called by both, and needed again in the backward of one.
        ((Use.YES, Use.UNSEEN), True),
        ((Use.UNSEEN, Use.YES), True),
    ],
)
def test_ranks_that_need_other_parts_are_told(uses: tuple[Use, Use], *, least_window: bool) -> None:
    for message in run_ranks(refusal_of_routed, 2, uses, least_window, limit_seconds=30):
        assert message.startswith("the ranks do not do the same (rank 0: all-gather of blocks.")
        assert "every rank must call the same parts of the model in the same order" in message
