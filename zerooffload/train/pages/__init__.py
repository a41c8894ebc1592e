"""Pages for people: templates whose places are filled, and what they have in common.

A page is one file. It fetches nothing, and forbids itself to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files


def fill(template: str, places: Mapping[str, str]) -> str:
    """A page with `{{name}}` replaced by `places[name]`, or by what all pages have: `look`, and `lanes_script`.

    The script draws the lanes of a step from the JSON in the element "data": `seconds` of the step; `lanes`, each with
    `lane`, `style` and `rows` of spans `[begin, seconds, number of its name, bytes]`; `names` and their `shades`.
    """
    all_places = {"look": _text_of("look.css"), "lanes_script": _text_of("lanes.js"), **places}
    head, *rest = _text_of(template).split("{{")
    filled = [head]
    for piece in rest:
        name, _, text = piece.partition("}}")
        filled += [all_places[name], text]
    return "".join(filled)


def script_text(data: object) -> str:
    """JSON that can end neither its script element nor a comment, whatever names it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _text_of(name: str) -> str:
    return files("zerooffload.train.pages").joinpath(name).read_text(encoding="utf-8")
