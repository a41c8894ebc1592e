"""Fine-tuning causal language models by recipe: what `zerooffload train` runs."""

from zerooffload.train.loop import TrainingResult, train
from zerooffload.train.recipe import Recipe, read_recipe
from zerooffload.train.report import write_report
from zerooffload.train.resume import recorded_recipe

__all__ = ["Recipe", "TrainingResult", "read_recipe", "recorded_recipe", "train", "write_report"]
