"""Plans side by side: of other machines, and of other settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerooffload.config import TierName
from zerooffload.errors import BudgetError
from zerooffload.formats import format_bytes, format_seconds
from zerooffload.planner.plan import Plan
from zerooffload.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a question.

    Attributes
    ----------
    what : str
        The question: what is other than asked for.
    recipe : Recipe
    plan : Plan, optional
        None if it does not fit.
    refusal : str
        Why not.
    """

    what: str
    recipe: Recipe
    plan: Plan | None = None
    refusal: str = ""


def answer(what: str, recipe: Recipe, plan: Callable[[], Plan]) -> Answer:
    """The plan, or why there is none."""
    try:
        return Answer(what=what, recipe=recipe, plan=plan())
    except BudgetError as error:
        return Answer(what=what, recipe=recipe, refusal=str(error))


def show_comparison(console: Console, answers: Sequence[Answer]) -> None:
    """A column for each; below, why some do not fit."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for one in answers:
        table.add_column(Text(one.what), justify="right", overflow="fold")
    for name, cell in _ROWS.items():
        table.add_row(name, *(_cell(one, cell) for one in answers))
    console.print(table)
    for one in answers:
        if one.refusal:
            console.print()
            console.print(Text(f"{one.what}: {one.refusal}"))


def _cell(one: Answer, cell: Callable[[Plan], str]) -> str:
    if one.plan is None:
        return "does not fit" if cell is _step else ""
    return cell(one.plan)


def _step(plan: Plan) -> str:
    return format_seconds(plan.estimate.seconds)


def _leased(tier: TierName) -> Callable[[Plan], str]:
    def cell(plan: Plan) -> str:
        account = next(account for account in plan.estimate.memory if account.tier is tier)
        return format_bytes(account.peak_bytes)

    return cell


def _homes(state: str) -> Callable[[Plan], str]:
    def cell(plan: Plan) -> str:
        tiers = [getattr(homes, state) for homes in plan.homes.values()]
        counts = {tier: tiers.count(tier) for tier in TierName if tier in tiers}
        if len(counts) == 1:
            return str(next(iter(counts)))
        return ", ".join(f"{tier} {count}" for tier, count in counts.items())

    return cell


def _written(plan: Plan) -> str:
    return format_bytes(round(plan.estimate.bytes_written_per_day * plan.machine.device.count))


def _days(plan: Plan) -> str:
    return "" if plan.drive_days is None else f"{plan.drive_days:,.0f}"


_ROWS: dict[str, Callable[[Plan], str]] = {
    "step": _step,
    "at the least": lambda plan: format_seconds(plan.floor_seconds),
    "tokens/s": lambda plan: f"{plan.estimate.tokens_per_second:.0f}",
    "bound": lambda plan: plan.estimate.bound,
    "parameters": _homes("params"),
    "optimizer state": _homes("optimizer"),
    "gradients": _homes("gradients"),
    "device memory": _leased(TierName.DEVICE),
    "host memory": _leased(TierName.HOST),
    "nvme space": _leased(TierName.NVME),
    "written a day": _written,
    "days of the drives": _days,
}
