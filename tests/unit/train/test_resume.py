"""A run that is interrupted and continued has the losses of one that was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.hostile_files import signed_manifest

import zerooffload as zo
from zerooffload.train import Recipe, checkpoint_in, recorded_recipe, train
from zerooffload.train.loop import Observer, StepRecord

pytest.importorskip("transformers")

MakeRecipe = Callable[..., Recipe]
STEPS = {"steps": 6, "max_grad_norm": 1.0, "accumulation_steps": 2}


class StopsBehind(Observer):
    """Ctrl-C when a step is done."""

    def __init__(self, step: int) -> None:
        self._step = step

    def finished_step(self, record: StepRecord) -> None:
        if record.step == self._step:
            raise KeyboardInterrupt


@pytest.fixture
def recipe(make_recipe: MakeRecipe, nvme: Path) -> Recipe:
    offload = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(nvme)]}
    return make_recipe(offload=offload, training=STEPS, schedule={"kind": "cosine", "warmup_steps": 2})


@pytest.mark.parametrize("step", [1, 3, 5])
def test_losses_are_those_of_a_run_that_was_not_interrupted(
    step: int, recipe: Recipe, make_recipe: MakeRecipe, nvme: Path
) -> None:
    whole = train(make_recipe(training=STEPS, schedule={"kind": "cosine", "warmup_steps": 2}))
    with pytest.raises(KeyboardInterrupt):
        train(recipe, StopsBehind(step))
    rest = train(recorded_recipe(nvme), resume=True)
    expected = [(record.step, record.loss, record.lr, record.grad_norm) for record in whole.steps[step:]]
    assert [(record.step, record.loss, record.lr, record.grad_norm) for record in rest.steps] == expected
    assert rest.heldout_after == whole.heldout_after


def test_a_run_that_is_done_can_be_made_longer(recipe: Recipe, nvme: Path) -> None:
    train(recipe)
    with pytest.raises(zo.ConfigError, match=r"6 of its 6 steps.*--set training.steps="):
        train(recorded_recipe(nvme), resume=True)
    longer = train(recorded_recipe(nvme, ["training.steps=8"]), resume=True)
    assert [record.step for record in longer.steps] == [7, 8]


def test_a_second_start_is_refused_and_loses_nothing(recipe: Recipe, nvme: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(recipe, StopsBehind(2))
    with pytest.raises(zo.ConfigError, match=r"finished step 2: continue it with.*overwrite=True"):
        train(recipe)
    assert len(train(recorded_recipe(nvme), resume=True).steps) == 4


def test_a_moved_drive_is_found_where_it_is_now(recipe: Recipe, nvme: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(recipe, StopsBehind(4))
    moved = tmp_path / "elsewhere"
    nvme.rename(moved)
    assert len(train(recorded_recipe(moved), resume=True).steps) == 2
    nvme.mkdir()


def test_what_cannot_be_continued_says_why(recipe: Recipe, make_recipe: MakeRecipe, nvme: Path) -> None:
    with pytest.raises(zo.ConfigError, match="holds no run that finished a step"):
        recorded_recipe(nvme)
    with pytest.raises(zo.ConfigError, match="is not a folder"):
        recorded_recipe(nvme / "missing")
    with pytest.raises(zo.ConfigError, match="no finished step to go on from"):
        train(recipe, resume=True)
    with pytest.raises(zo.ConfigError, match="resumes from checkpoints only"):
        train(make_recipe(training=STEPS), resume=True)


def test_a_run_that_saves_goes_on_from_its_newest_checkpoint(
    make_recipe: MakeRecipe, nvme: Path, tmp_path: Path
) -> None:
    """On host, then on nvme."""
    directory = tmp_path / "checkpoints"
    saves = {"directory": str(directory), "every_steps": 2, "keep_last": 2}
    recipe = make_recipe(training=STEPS, schedule={"kind": "cosine", "warmup_steps": 2}, checkpoint=saves)
    whole = train(recipe)
    assert [path.name.rpartition("-")[2] for path in sorted(directory.iterdir())] == ["00000004", "00000006"]
    with pytest.raises(zo.ConfigError, match=r"6 of its 6 steps"):
        train(recorded_recipe(directory), checkpoint=checkpoint_in(directory))
    elsewhere = ["offload.params=nvme", "offload.optimizer=nvme", f'offload.nvme_paths=["{nvme}"]']
    oldest = min(directory.iterdir())
    rest = train(recorded_recipe(oldest, elsewhere), checkpoint=checkpoint_in(oldest))
    expected = [(record.step, record.loss, record.lr, record.grad_norm) for record in whole.steps[4:]]
    assert [(record.step, record.loss, record.lr, record.grad_norm) for record in rest.steps] == expected
    assert rest.heldout_after == whole.heldout_after


def test_a_checkpoint_of_another_loop_is_told(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    saves = {"directory": str(tmp_path), "every_steps": 6}
    train(make_recipe(training=STEPS, checkpoint=saves))
    (manifest,) = tmp_path.rglob("rank-00000.json")
    line = manifest.read_bytes().partition(b"\n")[0]
    manifest.write_bytes(signed_manifest(line.replace(b'"recipe":', b'"receipt":', 1)))
    with pytest.raises(zo.ConfigError, match=r"was not started by zerooffload train: .* zo\.load"):
        recorded_recipe(tmp_path)
