"""How the page's files are handed out, and what they may hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from ingot.web import page

SOURCES = sorted(page.STATIC.iterdir())


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=page.routes()))


def test_every_file_is_served_with_its_type_under_the_strict_policy(client: TestClient) -> None:
    for file in SOURCES:
        answer = client.get("/" if file.name == "index.html" else f"/static/{file.name}")
        assert answer.status_code == 200
        assert answer.content == file.read_bytes()
        assert answer.headers["content-type"] == page.MEDIA_TYPES[file.suffix]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == (
            "default-src 'self'; script-src 'self'; style-src 'self'; object-src 'none'; base-uri 'none'; "
            "frame-ancestors 'none'"
        )


def test_an_unchanged_file_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/static/app.js").headers["etag"]
    again = client.get("/static/app.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == tag


@pytest.mark.parametrize("path", ["/static/", "/static/..%2fpage.py", "/static/../page.py", "/static/none.js"])
def test_no_other_path_leads_anywhere(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_every_file_the_page_refers_to_is_there() -> None:
    names = {file.name for file in SOURCES}
    html = (page.STATIC / "index.html").read_text()
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
    html = (page.STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", html)
