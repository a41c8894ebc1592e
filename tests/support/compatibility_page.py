"""The page of what works with what: `PYTHONPATH=tests python -P tests/support/compatibility_page.py` writes it."""

from __future__ import annotations

import itertools
import string
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from support.compatibility import (
    BASE_LOOP,
    LOOP_MODELS,
    PLACES,
    STAGES,
    Cell,
    all_rank_cells,
    cells,
    rank_cells,
)
from support.compatible_loops import LOOPS
from support.compatible_loops import NUM_STEPS as NUM_STEPS_ALONE
from support.compatible_models import MODELS
from support.rank_compatibility import NUM_STEPS

PAGE = Path(__file__).parents[2] / "zerooffload" / "docs" / "compatibility.md"

_INTRODUCTION = """\
# What works with what

`=` is a training that has the same bits (losses, gradient norms, parameters, buffers) as the same training in plain
PyTorch with the reference optimizer; a number is that of the [error](#errors) with which it is refused. `-` is what
there is not: blocks to compile or to checkpoint in a model without a list of them, and generation by what is no
language model. A letter is one of the rows below its table: equal in some places, refused in others.

Each of them is a test, in `tests/training/test_compatibility.py` or `tests/distributed/test_compatibility.py`, and this
page is written from their cells, by `PYTHONPATH=tests python -P tests/support/compatibility_page.py`. A part of them is
tried with every change, as said at each table; with `ZEROOFFLOAD_TEST_EXHAUSTIVE=1` the tests try all.
"""

_ALONE = """\
## In one process

{num_cells} cells of {num_steps} steps, in each of the places. With every change {num_tried} are tried: "{base_loop}"
with all models; all loops with {models}, compiled ones with the first alone.
"""

_TWO_RANKS = """\
## On two ranks

{num_cells} cells of {num_steps} steps, in each of [ZeRO's stages](stages.md) in each of the places, each rank with
batches of its own. "Plain PyTorch" is one process that computes each rank's gradients and adds them as the ranks do.
With every change {num_tried} are tried, of these and of those on three ranks. They have every pair: each model, and
each loop, in each stage, in each place and on each number of ranks, and each stage in each place; trained, if any cell
with both is trained, and refused, if any is refused. Which model meets which loop is left to chance there; compiled
blocks are {models}'s, in stage 3 on two devices.
"""

_THREE_RANKS = """\
## On three ranks

{num_cells} cells of the {num_possible} that there could be: those in which there is each pair, that of model and loop
too. Each is written with its stage and the first letter of its place (3n is stage 3 on nvme); one that is refused, with
the error's number in brackets.
"""

_NOTES = """\
## To know

- **Quantized bases.** Frozen parameters of integer dtypes, and tensor subclasses that name the tensors inside them
  (torchao's, by `__tensor_flatten__`), move as the bytes that they are. Buffers stay on the device whole: keep large
  ones as parameters. Optimizer states exist for what is trained when `zo.offload` is called, and for nothing else.
- **Mixed precision.** A model keeps the dtypes that it has, norms and routers in fp32 beside blocks in bf16;
  `OffloadConfig(compute_dtype=...)` is for all floating-point parameters.
- **Gradients of a tensor that several blocks use** (an encoder's states, T5's position bias) are added up block by
  block, and so they are in the plain training that it is compared with; torch adds them in another order.
- **Parameters used outside of their module** are brought in the forward or backward of any module, which keeps them
  from then on while it is in use: the window must have room, and the error says how much. Elsewhere:
  `zo.full_params`.
- **Checkpoints** in both forms, in a block or around it; reentrant ones that share a parameter (a block called twice)
  are refused with the advice to use `use_reentrant=False`.
- **Two graphs at a time** (two forwards, one backward) hold the embeddings of both until both are through: the least
  window has no room for that, and the error says how much it wants.
- **Experts.** Tokens may go anywhere: a block of experts is one unit, and an expert that got no token on any rank has
  no gradient. Where each expert is a unit of its own (`units=[...]`), every rank must call the same ones.
- **Other blocks on other ranks** ("skipped blocks"): parameters are gathered at a block's first call after an update,
  and in stage 3, or where the window has no room for all, at later ones too: every rank must call the same blocks in
  the same order. Loops that bring all parameters between steps, on every rank in the same order (an evaluation that
  calls all blocks, edits), gather them there. How often ("nested") matters only where blocks come and go. Stage 0 never
  gathers parameters.
- **Parallelism of torch's.** Stages of [pipelines](stages.md#pipelines) can be offloaded, and models that
  `parallelize_module` has [cut](stages.md#tensor-parallelism). What `fully_shard` has cut is refused by `zo.offload`.
- **A layer larger than the device budget** is refused by `zo.offload`, with the bytes of each holder and what would
  help.
- **torch.compile.** Compile blocks, or their forwards; our hooks are not traced, so `fullgraph=True` is for the
  forward.
- **Other weights** (resized embeddings, new adapters): take `model.state_dict()`, `zo.close(model)`, change a model
  that has these values, and offload that. A forward with parameters that came or went after `zo.offload` is refused.
- **Alternating with another program**: `zo.release_device` and `zo.reclaim_device`, see [memory](memory.md).
"""


class _Signs:
    """What stands for the outcomes of cells, and the numbers of errors."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}

    def of_one(self, refused: str) -> str:
        """Of a cell."""
        return str(self.errors.setdefault(refused, len(self.errors) + 1)) if refused else "="

    def of_same(self, outcomes: Iterable[str]) -> str:
        """Of a pair that comes to the same everywhere, or of one that is nowhere; else nothing."""
        signs = {self.of_one(refused) for refused in outcomes}
        return "-" if not signs else signs.pop() if len(signs) == 1 else ""


def page() -> str:
    """The page, in Markdown."""
    signs, alone, on_ranks = _Signs(), cells(exhaustive=True), all_rank_cells()
    two, three = ([cell for cell in on_ranks if cell.world_size == world_size] for world_size in (2, 3))
    parts = [
        _INTRODUCTION,
        "## Places\n",
        _table(("place", "states"), ((name, place.what) for name, place in PLACES.items())),
        "## Models\n",
        _table(("model", ""), ((name, kind.what) for name, kind in MODELS.items())),
        _ALONE.format(
            num_cells=len(alone),
            num_steps=NUM_STEPS_ALONE,
            num_tried=len(cells(exhaustive=False)),
            base_loop=BASE_LOOP,
            models=", ".join(LOOP_MODELS),
        ),
        *_outcomes(alone, [(3, place) for place in PLACES], list(PLACES), signs),
        _TWO_RANKS.format(
            num_cells=len(two), num_steps=NUM_STEPS, num_tried=len(rank_cells(exhaustive=False)), models=LOOP_MODELS[0]
        ),
        *_outcomes(two, *_stages_and_places(), signs),
        _THREE_RANKS.format(num_cells=len(three), num_possible=len(two)),
        _where_tried(three, signs),
        "## Errors\n",
        "\n".join(f'{number}. "{text}"' for text, number in signs.errors.items()) + "\n",
        _NOTES,
    ]
    return "\n".join(parts)


def _stages_and_places() -> tuple[list[tuple[int, str]], list[str]]:
    both = list(itertools.product(STAGES, PLACES))
    return both, [f"{stage}, {place}" for stage, place in both]


def _by_pair(of_cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
    by_pair: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in of_cells:
        by_pair[cell.loop, cell.model].append(cell)
    return by_pair


def _outcomes(
    of_cells: Iterable[Cell], columns: Sequence[tuple[int, str]], heads: Sequence[str], signs: _Signs
) -> list[str]:
    """The table of models and loops, and that of what comes to one thing in some of the columns, else in others."""
    by_pair = _by_pair(of_cells)
    letters: dict[tuple[str, ...], str] = {}

    def sign(pair: tuple[str, str]) -> str:
        of_place = {(cell.stage, cell.place): cell.refused for cell in by_pair[pair]}
        same = signs.of_same(of_place.values())
        if same:
            return same
        outcomes = tuple(signs.of_one(of_place[column]) for column in columns)
        return letters.setdefault(outcomes, string.ascii_lowercase[len(letters)])

    rows = [(loop, *(sign((loop, model)) for model in MODELS)) for loop in LOOPS]
    legend = [(letter, *outcomes) for outcomes, letter in letters.items()]
    return [_table(("loop", *MODELS), rows), _table(("", *heads), legend)]


def _where_tried(of_cells: Iterable[Cell], signs: _Signs) -> str:
    def tried(cell: Cell) -> str:
        refused = f" ({signs.of_one(cell.refused)})" if cell.refused else ""
        return f"{cell.stage}{cell.place[0]}{refused}"

    by_pair = _by_pair(of_cells)
    rows = ((loop, *(", ".join(map(tried, by_pair[loop, model])) or "-" for model in MODELS)) for loop in LOOPS)
    return _table(("loop", *MODELS), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
