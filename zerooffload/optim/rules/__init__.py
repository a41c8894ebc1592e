"""What each optimizer does to one element: its scalars, and the reference that its kernel equals bit for bit."""

from zerooffload.optim.rules.adagrad import AdagradRule
from zerooffload.optim.rules.adam import AdamRule
from zerooffload.optim.rules.adamw import AdamWRule
from zerooffload.optim.rules.lion import LionRule
from zerooffload.optim.rules.rule import Moment, Rule, StepScalars
from zerooffload.optim.rules.sgd import SgdRule

RULES: dict[str, Rule] = {rule.name: rule for rule in (AdamWRule(), AdamRule(), AdagradRule(), LionRule(), SgdRule())}

__all__ = ["RULES", "Moment", "Rule", "StepScalars"]
