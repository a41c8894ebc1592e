"""A run as one page for people: what its last step did when, what tiers held, what moved, and what was the bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from zerooffload.formats import format_bytes, format_seconds
from zerooffload.telemetry import Lane, Span, StepPicture, StepReport
from zerooffload.telemetry.spans import Rows, by_lane
from zerooffload.train.keeper import HeldRun
from zerooffload.train.loop import TrainingResult
from zerooffload.train.pages import fill, script_text

_SHADES = (1.0, 0.72, 0.5, 0.36)


def html_report(result: TrainingResult, picture: StepPicture, machine: Mapping[str, Any]) -> str:
    """The page of a run that finished a step, whose last one was followed."""
    title = f"zerooffload: {_model_name(result)}"
    reports = [record.report for record in result.steps]
    places = {
        "title": escape(title),
        "subtitle": escape(_subtitle(result)),
        "verdict": escape(_verdict(picture)),
        "facts": _facts(result, picture),
        "step": str(result.steps[-1].step),
        "lanes": _lane_table(picture),
        "parts": _parts(picture.step.report),
        "prediction": "" if result.held is None else _prediction(result.held),
        "memory_note": escape(_memory_note(result)),
        "run": _run_table(result, machine),
        "data": script_text(_data(result, picture, reports)),
    }
    return fill("report.html", places)


def _model_name(result: TrainingResult) -> str:
    model = result.recipe.model
    if model.name is not None:
        return model.name
    config = model.config
    return f"{config.get('model_type', 'model')} with random weights" if isinstance(config, dict) else str(config)


def _subtitle(result: TrainingResult) -> str:
    offload, training = result.recipe.offload, result.recipe.training
    homes = f"parameters on {offload.params}, optimizer on {offload.optimizer}, gradients on {offload.gradients}"
    return f"{homes}; {len(result.steps)} steps of {training.tokens_per_step} tokens a rank"


def _verdict(picture: StepPicture) -> str:
    bound = picture.bound()
    if bound is None:
        return "Nothing was seen to be busy."
    part = bound.busy_seconds / picture.seconds
    return (
        f"The bound was {bound.lane.value}: busy {part:.0%} of the last step. With everything else hidden behind it,"
        f" the step would take {format_seconds(bound.busy_seconds)} instead of {format_seconds(picture.seconds)}."
    )


def _facts(result: TrainingResult, picture: StepPicture) -> str:
    records = result.steps
    seconds = sum(record.seconds for record in records)
    facts = {
        "last step": format_seconds(picture.seconds),
        "mean step": format_seconds(seconds / len(records)),
        "tokens/s": f"{sum(record.tokens for record in records) / seconds:.0f}",
        "moved in the last step": format_bytes(sum(picture.step.report.bytes_moved.values())),
        "loss, first and last step": f"{records[0].loss:.4f}, {records[-1].loss:.4f}",
        "peak of the process": format_bytes(result.process_peak_bytes),
    }
    if result.heldout_before is not None and result.heldout_after is not None:
        facts["held-out loss, before and after"] = f"{result.heldout_before:.4f}, {result.heldout_after:.4f}"
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{items}</dl>"


def _lane_table(picture: StepPicture) -> str:
    bound = picture.bound()
    rows = []
    for use in picture.uses():
        rate = use.bytes_per_second
        part = use.busy_seconds / picture.seconds
        style = _style(use.lane)
        meter = f'<span class="meter {style}" style="width:{100 * part:.1f}%"></span>'
        is_bound = bound is not None and use.lane is bound.lane
        mark = ' class="bound"' if is_bound else ""
        rows.append(
            f"<tr{mark}>"
            f'<td><span class="chip {style}"></span>{escape(use.lane.value)}{" (the bound)" if is_bound else ""}</td>'
            f'<td class="number">{format_seconds(use.busy_seconds)}</td><td class="number">{part:.1%}</td>'
            f'<td class="bar">{meter}</td>'
            f'<td class="number">{format_bytes(use.nbytes) if use.nbytes else ""}</td>'
            f'<td class="number">{f"{rate / 1e9:.2f} GB/s" if rate else ""}</td></tr>'
        )
    head = (
        '<tr><th>lane</th><th class="number">busy</th><th class="number">of the step</th><th class="bar"></th>'
        '<th class="number">moved</th><th class="number">rate</th></tr>'
    )
    return f"<table>{head}{''.join(rows)}</table>{_left_out(picture)}"


def _left_out(picture: StepPicture) -> str:
    if not picture.num_left_out:
        return ""
    return f'<p class="quiet">{picture.num_left_out} spans were too many to be kept: the lanes are not whole.</p>'


def _parts(report: StepReport) -> str:
    """The step's seconds as a bar and a table: compute, waits by cause, our work by kind."""
    parts = [("compute (the model, and the user's loop)", "compute", max(0.0, report.compute_seconds))]
    parts += [(f"stall: {cause}", "stall", seconds) for cause, seconds in _largest(report.waits)]
    parts += [(kind, "cpu-update", seconds) for kind, seconds in _largest(report.work)]
    whole = sum(seconds for *_, seconds in parts) or 1.0
    bar: list[str] = []
    rows: list[str] = []
    shades: dict[str, int] = {}
    for name, style, seconds in parts:
        shade = _SHADES[min(shades.get(style, 0), len(_SHADES) - 1)]
        shades[style] = shades.get(style, 0) + 1
        look = f"opacity:{shade}"
        told = escape(f"{name}: {format_seconds(seconds)}, {seconds / whole:.1%}", quote=True)
        bar.append(f'<span class="{style}" style="flex:{seconds / whole:.5f};{look}" title="{told}"></span>')
        rows.append(
            f'<tr><td><span class="chip {style}" style="{look}"></span>{escape(name)}</td>'
            f'<td class="number">{format_seconds(seconds)}</td><td class="number">{seconds / whole:.1%}</td></tr>'
        )
    return f'<div class="parts">{"".join(bar)}</div><table>{"".join(rows)}</table>'


def _prediction(held: HeldRun) -> str:
    """A section of its own: every figure of the probe step, and what was noticed later."""
    rows = []
    for each in held.comparisons:
        mark = ' class="bound"' if each.is_outside else ""
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        rows.append(
            f"<tr{mark}><td>{escape(each.name)}</td>"
            f'<td class="number">{each.shown(each.predicted)}</td><td class="number">{each.shown(each.measured)}</td>'
            f'<td class="number">{ratio}</td><td>{escape(each.cause)}</td></tr>'
        )
    head = (
        '<tr><th></th><th class="number">predicted</th><th class="number">measured</th><th class="number">ratio</th>'
        "<th>what it may come from</th></tr>"
    )
    table = f"<table>{head}{''.join(rows)}</table>" if rows else "<p>The run ended before a step was compared.</p>"
    notes = "".join(f"<p>step {number}: {escape(text)}</p>" for number, text in held.notes)
    which = f"Step {held.probe_step} beside its prediction" if rows else "Prediction"
    told = f"Predicted: {format_seconds(held.estimate.seconds)} a step; the bound is {held.estimate.bound}."
    return f'<h2>{which}</h2><p class="quiet">{escape(told)}</p><div class="panel">{table}{notes}</div>'


def _largest(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def _memory_note(result: TrainingResult) -> str:
    note = (
        "Leased bytes of each tier, left after each step, right within the last one."
        " Of the process: left its peak so far, right what is resident."
    )
    return f"{note} On a CPU the device's bytes count inside the host's." if result.computes_on_host else note


def _run_table(result: TrainingResult, machine: Mapping[str, Any]) -> str:
    rows = [
        (name.removesuffix("_bytes"), format_bytes(value) if name.endswith("_bytes") else str(value))
        for name, value in machine.items()
        if value is not None
    ]
    training = result.recipe.training
    rows.append(("batch", f"{training.accumulation_steps} x {training.batch_size} x {training.sequence_length} tokens"))
    rows.append(("optimizer", f"{result.recipe.optimizer.name}, lr {result.recipe.optimizer.lr:g}"))
    cells = (f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


def _data(result: TrainingResult, picture: StepPicture, reports: Sequence[StepReport]) -> dict[str, Any]:
    names: dict[str, int] = {}
    return {
        "number": result.steps[-1].step,
        "seconds": picture.seconds,
        "lanes": _lanes(picture, names),
        "names": list(names),
        "shades": _shades(names),
        "memory": _memory(result, picture, reports),
        "losses": [[record.step, record.loss] for record in result.steps],
        "steps": [result.steps[0].step, result.steps[-1].step],
    }


def _lanes(picture: StepPicture, names: dict[str, int]) -> list[dict[str, Any]]:
    begin = picture.step.begin_seconds
    lanes = []
    for lane, spans in by_lane(picture.spans).items():
        for thread, of_thread in _by_thread(spans).items():
            rows: dict[int, list[list[float]]] = {}
            for row, span in Rows().place(of_thread):
                index = names.setdefault(span.name, len(names))
                at, duration = round(span.begin_seconds - begin, 7), round(span.end_seconds - span.begin_seconds, 7)
                rows.setdefault(row, []).append([at, duration, index, span.nbytes])
            label = lane.value if not thread else f"{lane.value} ({thread.removeprefix('zerooffload-')})"
            lanes.append({"lane": label, "style": _style(lane), "rows": list(rows.values())})
    return lanes


def _by_thread(spans: Iterable[Span]) -> dict[str, list[Span]]:
    threads: dict[str, list[Span]] = {}
    for span in spans:
        threads.setdefault(span.thread or "", []).append(span)
    return dict(sorted(threads.items()))


def _shades(names: Iterable[str]) -> list[float]:
    """Lighter ones for what a lane does beside its first kind of work; a name begins or ends with its kind."""
    second = ("backward", "gradient accumulation", "state read")
    third = ("recompute", "gradient norm", "checksum", "state write")
    shades = []
    for name in names:
        place = 2 if name.startswith(third) else 1 if name.startswith(second) or "optimizer state" in name else 0
        shades.append(_SHADES[place])
    return shades


def _memory(result: TrainingResult, picture: StepPicture, reports: Sequence[StepReport]) -> list[dict[str, Any]]:
    """For each tier, the window of parameters and the process: its budget, bytes by step, bytes in the last step."""
    numbers = [record.step for record in result.steps]
    begin = picture.step.begin_seconds
    tiers = reports[-1].tiers
    runs: dict[str, list[int]] = {
        tier.name: [report.tiers[place].leased_bytes for report in reports] for place, tier in enumerate(tiers)
    }
    runs["process"] = [report.process_peak_bytes for report in reports]
    budgets = {tier.name: tier.budget_bytes for tier in tiers}
    found = []
    for name in dict.fromkeys([*runs, *picture.levels]):
        run, levels = runs.get(name, []), picture.levels.get(name, [])
        if any(run) or any(level.nbytes for level in levels):
            by_step = [[number, nbytes] for number, nbytes in zip(numbers, run, strict=False)]
            in_step = [[max(0.0, round(level.seconds - begin, 7)), level.nbytes] for level in levels]
            found.append({"name": name, "budget": budgets.get(name), "run": by_step, "step": in_step})
    return found


def _style(lane: Lane) -> str:
    return lane.value.lower().replace(" ", "-")
