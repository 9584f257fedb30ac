"""What the page's files may hold: nothing inline, nothing from elsewhere, nothing missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ingot.web

STATIC = Path(ingot.web.__file__).parent / "static"
SOURCES = sorted(STATIC.iterdir())


def test_every_file_the_page_refers_to_is_there() -> None:
    names = {file.name for file in SOURCES}
    html = (STATIC / "index.html").read_text()
    assert set(re.findall(r'(?:src|href)="static/([^"]+)"', html)) <= names
    for file in SOURCES:
        if file.suffix == ".js":
            assert set(re.findall(r"from '\./([^']+)'", file.read_text())) <= names
    drawings = set(re.findall(r'id="icon-(\w+)"', html))
    code = "".join(file.read_text() for file in SOURCES)
    assert set(re.findall(r"(?:icon|iconButton)\('(\w+)'", code)) <= drawings


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_no_file_reaches_outside_or_parses_markup(file: Path) -> None:
    text = file.read_text()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|setHTML"
    assert not re.search(forbidden, text)
    addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
    assert addresses == set()


def test_the_page_holds_no_inline_script_or_style() -> None:
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", html)
