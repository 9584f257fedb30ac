"""What the page's files may hold: nothing inline, nothing from elsewhere, nothing missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ingot.web
from ingot.http.endpoints.page import PAGE_PATHS

STATIC = Path(ingot.web.__file__).parent / "static"
PAGES = [name for name in PAGE_PATHS if name.endswith(".html")]
SOURCES = sorted(file for file in STATIC.iterdir() if file.is_file())
VENDORED = sorted(folder for folder in (STATIC / "vendor").iterdir())


def test_every_file_the_page_refers_to_is_there() -> None:
    names = {file.name for file in SOURCES}
    for page in PAGES:
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


def test_modules_tell_one_story_each() -> None:
    long = [file.name for file in SOURCES if file.suffix == ".js" and len(file.read_text().splitlines()) > 300]
    assert long == []


@pytest.mark.parametrize("folder", VENDORED, ids=lambda folder: folder.name)
def test_what_others_wrote_has_its_licence_and_calls_nobody(folder: Path) -> None:
    assert "Permission is hereby granted" in (folder / "LICENSE.txt").read_text()
    for file in folder.rglob("*"):
        assert file.is_dir() or file.suffix in {".js", ".css", ".woff2", ".txt"}
        if file.suffix in {".js", ".css"}:
            text = file.read_text()
            assert not re.search(r"innerHTML|document\.write|\beval\(|new Function|XMLHttpRequest", text)
            assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}
            assert {name for name in re.findall(r"url\(([^)]+)\)", text) if not (folder / name).is_file()} == set()


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_no_file_reaches_outside_or_parses_markup(file: Path) -> None:
    text = file.read_text(errors="replace")
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|setHTML"
    assert not re.search(forbidden, text)
    addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
    assert addresses == set()


@pytest.mark.parametrize("page", PAGES)
def test_no_page_holds_an_inline_script_or_style(page: str) -> None:
    html = (STATIC / page).read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", html)
