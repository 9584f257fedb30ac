"""The sentences of the pages: those that their code passes to `t`, and those that are written in them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import ingot.web
from ingot.http.endpoints.page import PAGE_PATHS

STATIC = Path(ingot.web.__file__).parent / "static"
CALL = re.compile(r"(?<![\w.])t\(\s*'((?:[^'\\]|\\.)*)'")
SPOKEN = {"aria-label", "title", "placeholder"}
SAME_EVERYWHERE = re.compile(r"ingot|[\W\d]*|A|B|API|Esc|Enter|Shift|\{.*\}", re.DOTALL)
"""What is no sentence: names, keys and JSON."""


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.tag = ""

    def handle_data(self, data: str) -> None:
        if self.tag != "noscript":  # what it says is read where no script translates
            self.add(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tag = tag
        for name, value in attrs:
            if name in SPOKEN and value:
                self.add(value)

    def add(self, text: str) -> None:
        text = " ".join(text.split())
        if not SAME_EVERYWHERE.fullmatch(text):
            self.found.add(text)


def sentences() -> set[str]:
    found = {text.replace("\\'", "'") for file in STATIC.glob("*.js") for text in CALL.findall(file.read_text())}
    for path in PAGE_PATHS:
        if path.endswith(".html"):
            page = Page()
            page.feed((STATIC / path).read_text())
            found |= page.found
    return found
