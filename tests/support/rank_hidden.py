"""Ranks whose updates are hidden; in a module that spawned processes can import."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.environments import Homes
from support.rank_training import MAX_NORM, OPTIONS, even_shares, global_batch, offload_config, train
from support.small_models import small_gpt2

import zerooffload as zo
from zerooffload.optim.stream import StreamedUpdate

HIDDEN_MODES = ("under_next_forward", "during_backward", "auto")
TIMEOUT_SECONDS = 10.0
"""Of the process group."""


def train_in_modes(rank: int, world_size: int, folder: str, each_homes: Sequence[Homes], stride: int) -> list[str]:
    """What is not as where nothing is hidden; by homes and mode. Of the homes one in `stride` for each dtype."""
    share, wrong = even_shares(world_size)[rank], []
    for number, (dtype, told) in enumerate(((None, 2), ("bf16", None))):
        fields: dict[str, Any] = {"compute_dtype": dtype, "accumulation_steps": told}
        expected = train(share, folder, **fields)
        for homes in each_homes[number % stride :: stride]:
            for mode in HIDDEN_MODES:
                found = train(share, folder, homes, **{**fields, "update": mode})
                same = all(torch.equal(found["params"][name], value) for name, value in expected["params"].items())
                if not same or (found["losses"], found["norms"]) != (expected["losses"], expected["norms"]):
                    wrong.append(f"{dtype} {homes} {mode}")
    return wrong


def end_in_hidden_work(  # noqa: PLR0917 - arguments of ranks have places
    rank: int, world_size: int, folder: str, tier: str, victim: int, update: str, how: str
) -> list[str]:
    """The class and text of the error after one rank's second update fails, or the rank is killed in it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    share, model = even_shares(world_size)[rank], small_gpt2()
    try:
        zo.offload(model, offload_config(folder, (tier,) * 3, update=update, accumulation_steps=1))
        try:
            optimizer = zo.AdamW(model.parameters(), **OPTIONS)
            for step in range(4):
                if (rank, step) == (victim, 1):
                    _let_updates_end(how)
                share.loss(model, global_batch(step, 0)).backward()
                zo.clip_grad_norm_(model, MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            zo.close(model)
    except zo.ZeroOffloadError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def _let_updates_end(how: str) -> None:
    def end(*_: object) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise zo.TierIOError("write", "the victim's drive", errno.EIO)

    StreamedUpdate._step = end  # type: ignore[method-assign]
