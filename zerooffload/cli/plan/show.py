"""A plan for a person at a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from zerooffload.cli.plan.document import capacity_bytes
from zerooffload.cli.plan.section import offload_section
from zerooffload.config import TierName
from zerooffload.formats import format_bytes, format_count, format_seconds
from zerooffload.planner.cost import MemoryAccount
from zerooffload.planner.cost.memory import largest
from zerooffload.planner.plan import Plan
from zerooffload.planner.stages import StageBytes, sharding_of
from zerooffload.train.recipe import Recipe

_BAR_LENGTH = 16
PHASES = ("forward", "backward", "update")


def show_plan(console: Console, plan: Plan, recipe: Recipe) -> None:
    """All of it, the spans of the lanes left out."""
    console.print(Text(headline(plan), style="bold"))
    console.print(Text(verdict(plan)))
    for title, table in (
        ("Busy in a step", _busy_table(plan)),
        ("Moved by a rank in a step", _moved_table(plan)),
        ("Memory of a rank", _memory_table(plan)),
    ):
        console.print()
        console.print(Text(title, style="bold"))
        console.print(table)
    for account in plan.estimate.memory:
        if account.claims:
            console.print(Text(_holders(account), style="dim"))
    if wear := wear_of(plan):
        console.print()
        console.print(Text(wear))
    if plan.reasons:
        console.print()
        console.print(Text("Why", style="bold"))
    for reason in plan.reasons:
        console.print(Text(f"- {reason}"))
    console.print()
    console.print(Text("The recipe's section", style="bold"))
    console.print(Syntax(offload_section(recipe.offload, plan), "toml", background_color="default", word_wrap=True))


def headline(plan: Plan) -> str:
    """What was planned."""
    kind, batch = plan.kind, plan.model.batch_size * plan.kind.num_slices
    ranks = plan.machine.device.count
    trained = "" if plan.num_trained == plan.num_params else f" ({format_count(plan.num_trained)} trained)"
    sizes = [f"{batch} x {plan.model.sequence_length} tokens"]
    if kind.num_slices > 1:
        sizes.append(f"in slices of {plan.model.batch_size}")
    if kind.accumulation > 1:
        sizes.append(f"{kind.accumulation} times a step")
    where = plan.machine.name if ranks == 1 else f"each of {ranks} ranks of {plan.machine.name}"
    return f"{plan.model.name}, {format_count(plan.num_params)} parameters{trained}, {', '.join(sizes)}, on {where}"


def verdict(plan: Plan) -> str:
    """How long a step takes, and what keeps it from being shorter."""
    step = plan.estimate
    return (
        f"A step of {step.tokens} tokens takes {format_seconds(step.seconds)}: {step.tokens_per_second:.0f} tokens/s."
        f" The bound is {step.bound}; with all else hidden behind it {format_seconds(plan.floor_seconds)}."
        f" Updates run {plan.kind.schedule.replace('_', ' ')}."
    )


def tier_label(account: MemoryAccount, plan: Plan) -> str:
    """A tier's name; where the device computes on host memory, what it holds counts in the host's too."""
    is_in_host = account.tier is TierName.DEVICE and plan.machine.device.shares_host_memory
    return f"{account.tier.value} (in host)" if is_in_host else account.tier.value


def wear_of(plan: Plan) -> str:
    """What the drives bear; "" if nothing is written to them."""
    ranks = plan.machine.device.count
    a_step = round(plan.estimate.bytes_moved["nvme_written"] * ranks)
    if not a_step:
        return ""
    a_day = round(plan.estimate.bytes_written_per_day * ranks)
    days = "what they bear is not told" if plan.drive_days is None else f"they bear it for {plan.drive_days:,.0f} days"
    return f"Drives are written {format_bytes(a_step)} a step, {format_bytes(a_day)} a day: {days}."


def show_zero_table(console: Console, rows: list[StageBytes], num_params: int, num_ranks: int, dtype: str) -> None:
    """ZeRO's table of what a rank holds, and ours beside it."""
    title = f"States of a rank of {num_ranks}, {format_count(num_params)} parameters"
    console.print(Text(title, style="bold"))
    table = _new_table("stage", "parameters", "gradients", "optimizer state", "ZeRO, fp16", f"here, {dtype}")
    for row in rows:
        sharding = sharding_of(row.stage)
        parts = [sharding.params, sharding.gradients, sharding.optimizer]
        words = ["sharded" if is_sharded else "whole" for is_sharded in parts]
        table.add_row(str(row.stage), *words, format_bytes(round(row.zero)), format_bytes(round(row.ours)))
    console.print(table)


def bar(part: float, style: str, more: float = 0.0) -> Text:
    """A line as long as a part of the whole, another behind it, and what is left."""
    length = round(_BAR_LENGTH * min(1.0, part))
    behind = round(_BAR_LENGTH * min(1.0, part + more)) - length
    left = _BAR_LENGTH - length - behind
    return Text.assemble(("━" * length, style), ("━" * behind, "magenta"), ("─" * left, "dim"))


def _new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "phase") else "right", overflow="fold")
    return table


def _busy_table(plan: Plan) -> Table:
    step = plan.estimate
    table = _new_table("", "busy", "of the step", "")
    for name, seconds in sorted(step.busy.items(), key=lambda item: -item[1]):
        if seconds:
            part = seconds / step.seconds
            style = "yellow" if name == step.bound else "blue"
            table.add_row(name, format_seconds(seconds), f"{part:.0%}", bar(part, style))
    return table


def _moved_table(plan: Plan) -> Table:
    table = _new_table("", "bytes")
    for link, nbytes in plan.estimate.bytes_moved.items():
        if nbytes:
            table.add_row(link.replace("_", " "), format_bytes(round(nbytes)))
    return table


def _memory_table(plan: Plan) -> Table:
    accounts = [account for account in plan.estimate.memory if account.peak_bytes]
    knows_process = any(account.baseline_bytes is not None for account in accounts)
    process = ("process",) if knows_process else ()
    table = _new_table("", "phase", *process, "leased", "activations", "together", "of", "")
    for column in table.columns:
        column.no_wrap = True
    for account in accounts:
        for number, phase in enumerate(PHASES if account.activations else ("",)):
            before = (_bytes_or_nothing(account.baseline_bytes),) if knows_process else ()
            table.add_row(
                "" if number else tier_label(account, plan), Text(phase), *before, *_cells(account, phase, plan)
            )
    return table


def _cells(account: MemoryAccount, phase: str, plan: Plan) -> list[str | Text]:
    held = account.leased_bytes + (account.baseline_bytes or 0)
    active, capacity = account.activations.get(phase, 0), capacity_bytes(account, plan)
    return [
        format_bytes(account.leased_bytes),
        _bytes_or_nothing(active or None),
        format_bytes(held + active),
        _bytes_or_nothing(capacity),
        "" if capacity is None else bar(held / capacity, "blue", active / capacity),
    ]


def _bytes_or_nothing(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


def _holders(account: MemoryAccount) -> str:
    """A tier's budget and largest leases."""
    budget = f" in a budget of {format_bytes(account.budget_bytes)}" if account.is_bounded else ""
    largest_ones = ", ".join(f"{claim.holder} {format_bytes(claim.nbytes)}" for claim in largest(account.claims, 3))
    return f"{account.tier.value}{budget}: {largest_ones}"
