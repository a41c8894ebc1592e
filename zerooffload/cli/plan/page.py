"""A plan as one page for people: a step's lanes, and how full each tier is."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from zerooffload.cli.plan.document import capacity_bytes
from zerooffload.cli.plan.section import offload_section
from zerooffload.cli.plan.show import PHASES, headline, tier_label, verdict, wear_of
from zerooffload.formats import format_bytes, format_count, format_seconds
from zerooffload.planner.cost import Lane, MemoryAccount
from zerooffload.planner.plan import Plan
from zerooffload.train.pages import fill, script_text
from zerooffload.train.recipe import Recipe

_LANE_STYLES = {
    Lane.COMPUTE: "compute",
    Lane.COPY_IN: "copy-in",
    Lane.COPY_OUT: "copy-out",
    Lane.LINK: "gather",
    Lane.PARAMETER_READ: "nvme-read",
    Lane.STATE_READ: "nvme-read",
    Lane.WRITE: "nvme-write",
    Lane.UPDATE: "cpu-update",
    Lane.LANDING: "cpu-update",
}
_BUSY_STYLES = {**{str(lane): style for lane, style in _LANE_STYLES.items()}, "drive": "nvme-read"}
_BACKWARD_SHADE = 0.65


def plan_page(plan: Plan, recipe: Recipe) -> str:
    """The page; it fetches nothing."""
    return fill(
        "plan.html",
        {
            "title": escape(f"zerooffload: {plan.model.name} on {plan.machine.name}"),
            "subtitle": escape(headline(plan)),
            "verdict": escape(verdict(plan)),
            "facts": _facts(plan),
            "busy": _busy_table(plan),
            "moved": _moved_table(plan),
            "wear": escape(wear_of(plan)),
            "memory": "".join(_account(account, plan) for account in plan.estimate.memory if account.peak_bytes),
            "reasons": "".join(f"<p>{escape(reason)}</p>" for reason in plan.reasons or ["Nothing was left open."]),
            "section": escape(offload_section(recipe.offload, plan)),
            "data": script_text(_data(plan)),
        },
    )


def _facts(plan: Plan) -> str:
    step = plan.estimate
    facts = {
        "step": format_seconds(step.seconds),
        "at the least": format_seconds(plan.floor_seconds),
        "tokens/s": f"{step.tokens_per_second:.0f}",
        "bound": step.bound,
        "updates": plan.kind.schedule.replace("_", " "),
        "parameters": format_count(plan.num_params),
    }
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{items}</dl>"


def _busy_table(plan: Plan) -> str:
    step = plan.estimate
    rows = []
    for name, seconds in sorted(step.busy.items(), key=lambda item: -item[1]):
        if not seconds:
            continue
        part, style = seconds / step.seconds, _BUSY_STYLES[name]
        is_bound = name == step.bound
        mark = ' class="bound"' if is_bound else ""
        rows.append(
            f"<tr{mark}>"
            f'<td><span class="chip {style}"></span>{escape(name)}{" (the bound)" if is_bound else ""}</td>'
            f'<td class="number">{format_seconds(seconds)}</td><td class="number">{part:.1%}</td>'
            f'<td class="bar"><span class="meter {style}" style="width:{100 * min(1.0, part):.1f}%"></span></td></tr>'
        )
    head = (
        '<tr><th>resource</th><th class="number">busy</th><th class="number">of the step</th><th class="bar"></th></tr>'
    )
    return f"<table>{head}{''.join(rows)}</table>"


def _moved_table(plan: Plan) -> str:
    return _two_columns(
        (link.replace("_", " "), format_bytes(round(nbytes)))
        for link, nbytes in plan.estimate.bytes_moved.items()
        if nbytes
    )


def _two_columns(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f'<tr><td>{escape(name)}</td><td class="number">{escape(value)}</td></tr>' for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


def _account(account: MemoryAccount, plan: Plan) -> str:
    whole = capacity_bytes(account, plan) or account.peak_bytes
    budget = f", budget {format_bytes(account.budget_bytes)}" if account.is_bounded else ""
    bars = [_fill(account, phase, whole) for phase in (PHASES if account.activations else ("at all times",))]
    claims = sorted(account.claims, key=lambda claim: -claim.nbytes)
    held = _two_columns((claim.holder, format_bytes(claim.nbytes)) for claim in claims)
    return f"<h3>{tier_label(account, plan)}: {format_bytes(whole)}{budget}</h3>{''.join(bars)}{held}"


def _fill(account: MemoryAccount, phase: str, whole: int) -> str:
    parts = {
        "process": account.baseline_bytes or 0,
        "leased": account.leased_bytes,
        "activations": account.activations.get(phase, 0),
    }
    spans = "".join(
        f'<span class="{name}" style="width:{100 * nbytes / whole:.3f}%" title="{name}: {format_bytes(nbytes)}"></span>'
        for name, nbytes in parts.items()
        if nbytes
    )
    limit = (account.baseline_bytes or 0) + account.budget_bytes
    mark = f'<span class="mark" style="left:{100 * limit / whole:.3f}%"></span>' if limit <= whole else ""
    told = f"{phase}: {format_bytes(sum(parts.values()))}"
    return f'<p class="quiet">{escape(told)}</p><div class="fill">{spans}{mark}</div>'


def _data(plan: Plan) -> dict[str, Any]:
    names: dict[str, int] = {}
    rows: dict[Lane, list[list[float]]] = {lane: [] for lane in Lane}
    for span in sorted(plan.estimate.spans, key=lambda span: span.begin):
        begin, seconds = round(span.begin, 7), round(span.end - span.begin, 7)
        rows[span.lane].append([begin, seconds, names.setdefault(span.name, len(names)), 0])
    return {
        "seconds": plan.estimate.seconds,
        "lanes": [
            {"lane": str(lane), "style": _LANE_STYLES[lane], "rows": [spans]} for lane, spans in rows.items() if spans
        ],
        "names": list(names),
        "shades": [_BACKWARD_SHADE if name.endswith("backward") else 1.0 for name in names],
    }
