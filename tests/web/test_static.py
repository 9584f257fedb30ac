"""What the page's files may hold: nothing inline, nothing from elsewhere, nothing missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ingot.web
from ingot.http.endpoints.page import PAGE_PATHS

STATIC = Path(ingot.web.__file__).parent / "static"
SOURCES = sorted(STATIC.iterdir())


def test_every_file_the_page_refers_to_is_there() -> None:
    names = {file.name for file in SOURCES}
    for page in PAGE_PATHS:
        html = (STATIC / page).read_text()
        assert set(re.findall(r'(?:src|href)="static/([^"]+)"', html)) <= names
        code = "".join(file.read_text() for file in modules_of(html))
        assert set(re.findall(r"(?:icon|iconButton)\('(\w+)'", code)) <= set(re.findall(r'id="icon-(\w+)"', html))


def modules_of(html: str) -> set[Path]:
    """The modules that a page loads, and those that they import."""
    found: set[Path] = set()
    waiting = [STATIC / name for name in re.findall(r'src="static/([^"]+)"', html)]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += [STATIC / name for name in re.findall(r"from '\./([^']+)'", module.read_text())]
    return found


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_no_file_reaches_outside_or_parses_markup(file: Path) -> None:
    text = file.read_text()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|setHTML"
    assert not re.search(forbidden, text)
    addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
    assert addresses == set()


@pytest.mark.parametrize("page", PAGE_PATHS)
def test_no_page_holds_an_inline_script_or_style(page: str) -> None:
    html = (STATIC / page).read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", html)
