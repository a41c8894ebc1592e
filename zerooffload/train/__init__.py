"""Fine-tuning causal language models by recipe: what `zerooffload train` runs."""

from zerooffload.train.export import export_run
from zerooffload.train.loop import TrainingResult, train
from zerooffload.train.recipe import Recipe, read_recipe
from zerooffload.train.report import is_page, write_report
from zerooffload.train.resume import checkpoint_in, recorded_recipe

__all__ = [
    "Recipe",
    "TrainingResult",
    "checkpoint_in",
    "export_run",
    "is_page",
    "read_recipe",
    "recorded_recipe",
    "train",
    "write_report",
]
