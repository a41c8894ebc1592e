"""An HTML page taken apart, as a browser would."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "br", "img", "link", "input", "hr"}
_FETCHING = {"src", "href", "srcset", "data", "action", "poster", "background"}


@dataclass
class Page:
    """What a page holds.

    Attributes
    ----------
    text : str
        That a reader sees, scripts and styles left out.
    data : Any
        The JSON of the element "data".
    fetches : list[str]
        Attributes that would have a browser fetch something.
    tags : list[str]
        Of all elements, in their order.
    """

    text: str = ""
    data: Any = None
    fetches: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    code: str = ""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._open: list[str] = []
        self._is_data = False
        self._data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.page.tags.append(tag)
        self.page.fetches += [f"{name}={value}" for name, value in attrs if name in _FETCHING]
        if tag not in _VOID:
            self._open.append(tag)
        self._is_data = dict(attrs).get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> ends nothing"
        assert self._open.pop() == tag
        if self._is_data:
            self.page.data = json.loads(self._data)
            self._is_data = False

    def handle_data(self, data: str) -> None:
        if self._is_data:
            self._data += data
        elif self._open and self._open[-1] in ("script", "style"):
            self.page.code += data
        else:
            self.page.text += data

    def close(self) -> None:
        super().close()
        assert not self._open, f"{self._open} end nowhere"


def read_page(text: str) -> Page:
    """Take a page apart; its elements must be nested as they should."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader.page
