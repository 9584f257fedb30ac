"""The documentation is true: its commands, flags, addresses, variables, paths and links exist."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

from bench.__main__ import SUBJECTS
from ingot.cli.main import COMMANDS, main
from ingot.config.foreign import TABLE, foreign_rows
from tests.docs.pages import (
    ADDRESS,
    FLAG,
    GUIDES,
    PAGES,
    ROOT,
    addresses,
    all_flags,
    code,
    commands,
    fences,
    flags,
    flags_of,
    guide_commands,
    make_targets,
    module_file,
    module_flags,
    modules,
    nameless,
    variables,
)
from tests.http.asgi import call
from tests.http.scripted import ScriptedEngine, build_app, settings
from tools import coming_from

FOREIGN = {
    "--add-host": "docker",
    "--find-links": "pip and uv",
    "--force": "pipx",
    **dict.fromkeys(("--retry", "--retry-delay", "--retry-connrefused"), "curl"),
    "--now": "systemctl",
    "--pip-args": "pipx",
    "--python": "uv",
    "--manylinux": "tools/package",
    "--vllm-mlx": "bench",
    **dict.fromkeys(("--env", "--hostfile"), "mlx.launch"),
    **dict.fromkeys(("--routing-key-override", "--routing-key-headers", "--assignment-mode"), "smg"),
}
"""Flags of other programs, and of the benchmarks that belong to a clone."""
TAKES_FOREIGN_FLAGS = ("serve", "bench", "chat", "launch", "replay")
REFUSED = {"/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"}

GENERATED = {"dist/", "ingot/cli/NAME.py"}
"""Made by a build, or by a reader."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def bench_flags() -> set[str]:
    return {flag for path in (ROOT / "bench").rglob("*.py") for flag in FLAG.findall(path.read_text())}


SCREEN = 60  # lines
KNOWN_WORDS = ("speculative decoding", "KV cache", "quantised", "images", "video", "speech", "prefix", "long prompts")
NO_SCRIPT = ("/v1/audio/",)
"""Where the scripted engine has no answer."""


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_fits_on_a_screen_and_needs_no_clone(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert len(text.splitlines()) <= SCREEN and "python -m" not in text
    assert f"docs/{name}.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("word", KNOWN_WORDS)
def test_the_words_that_readers_search_for_are_in_the_readme_and_in_a_guide(word: str) -> None:
    guides = [(ROOT / "docs" / f"{name}.md").read_text().lower() for name in GUIDES]
    assert word.lower() in " ".join((ROOT / "README.md").read_text().lower().split())
    assert any(word.lower() in " ".join(text.split()) for text in guides)


@pytest.mark.parametrize(
    ("variables", "words"),
    [one for one in guide_commands("ingot") if one[1][:1] == ["serve"] and "--help" not in one[1]],
    ids=str,
)
def test_the_settings_of_every_server_in_a_guide_are_good(
    variables: dict[str, str], words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "dense").symlink_to(ROOT / "foundry" / "models" / "dense")
    home = {"HOME": tmp_path, "XDG_CONFIG_HOME": tmp_path, "INGOT_MODELS_DIR": tmp_path / "models"}
    for name, value in {**home, **variables}.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "system-prompt.txt").write_text("Be brief.")
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--print-config"]) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_request_in_a_guide_is_answered() -> None:
    answered = 0
    for _, words in guide_commands("curl"):
        address = next(word for word in words if word.startswith("http://127.0.0.1:8000"))
        path = address.removeprefix("http://127.0.0.1:8000")
        body = words[words.index("-d") + 1] if "-d" in words else None
        if path.startswith(NO_SCRIPT) or (body or "").startswith("@"):
            continue
        assert body is None or "Content-Type: application/json" in words, words
        method, more = ("GET", {}) if body is None else ("POST", {"body": json.loads(body)})
        made = await call(build_app(ScriptedEngine(), settings(specprefill=True)), method, path, **more)
        assert made.status == 200, (words, made.body)
        answered += 1
    assert answered >= 8


def test_the_body_that_the_guide_to_vision_writes_is_a_request(tmp_path: Path) -> None:
    (block,) = fences((ROOT / "docs" / "vision.md").read_text(), "sh")
    (tmp_path / "photo.png").write_bytes(bytes(range(256)))
    subprocess.run(["sh", "-c", block.partition("curl ")[0]], cwd=tmp_path, check=True, timeout=60)
    (message,) = json.loads((tmp_path / "request.json").read_text())["messages"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]
    assert message["content"][1]["image_url"]["url"].startswith("data:image/png;base64,AAEC")


def test_the_page_of_other_servers_flags_is_what_their_table_makes() -> None:
    table = tomllib.loads(TABLE.read_text())
    assert coming_from.PAGE.read_text() == coming_from.write_page(table), "run `python -m tools.coming_from`"


@pages
def test_every_command_on_a_page_exists_and_takes_its_flags(page: Path) -> None:
    for piece in code(page.read_text()):
        for words, rest in commands(piece):
            assert words[0] in COMMANDS, piece
            theirs = foreign_rows() if words[0] in TAKES_FOREIGN_FLAGS else ()
            assert flags(rest) <= flags_of(words) | set(theirs), piece


@pages
def test_every_make_target_on_a_page_exists(page: Path) -> None:
    named = {name for piece in code(page.read_text()) for name in re.findall(r"^make ([a-z-]+)", piece)}
    assert named <= make_targets()


@pages
def test_every_module_that_a_page_runs_exists_and_takes_its_flags(page: Path) -> None:
    for piece in code(page.read_text()):
        for module, rest in modules(piece):
            file = module_file(module)
            assert file is not None, piece
            assert flags(rest) <= module_flags(file) | {"--help"}, piece


@pages
def test_every_test_that_a_page_runs_is_there(page: Path) -> None:
    for piece in code(page.read_text()):
        if piece.startswith(("pytest ", "make test ")):
            missing = [path for path in re.findall(r"tests/[\w/.]*", piece) if not (ROOT / path).exists()]
            assert not missing, piece


def test_make_bench_knows_every_benchmark_that_a_page_runs() -> None:
    named = {module for page in PAGES for piece in code(page.read_text()) for module, _ in modules(piece)}
    assert {name.split(".")[1] for name in named if name.startswith("bench.")} <= set(SUBJECTS)


@pages
def test_every_flag_on_a_page_exists(page: Path) -> None:
    named = {flag for piece in code(page.read_text()) for flag in flags(piece)}
    assert named <= all_flags() | bench_flags() | FOREIGN.keys()


@pages
def test_every_address_on_a_page_is_routed(page: Path) -> None:
    named = {nameless(address) for piece in code(page.read_text()) for address in ADDRESS.findall(piece)}
    assert named <= addresses() | REFUSED


@pages
def test_every_variable_on_a_page_is_read(page: Path) -> None:
    assert set(re.findall(r"INGOT_[A-Z][A-Z_]*[A-Z]", page.read_text())) <= variables()


@pages
def test_every_link_on_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_every_link_to_a_heading_leads_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text())
    assert not [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)]


def paths(text: str) -> set[str]:
    """What is in backticks and looks like a file or a folder of this repository."""
    return set(re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|cpp|h|md|json|toml))?|[a-z_]+\.py)`", text))


@cache
def packages() -> list[Path]:
    return [folder for folder in (ROOT / "ingot").rglob("*") if folder.is_dir()]


@pages
def test_every_path_on_a_page_is_there(page: Path) -> None:
    named = paths(page.read_text()) - GENERATED
    missing = [
        path
        for path in sorted(named)
        if not any((folder / path).exists() for folder in (ROOT, ROOT / "ingot", page.parent))
        and not ("/" not in path.rstrip("/") and any((package / path).exists() for package in packages()))
    ]
    assert not missing


def test_every_module_that_the_table_of_packages_names_is_in_its_package() -> None:
    rows = re.findall(r"^\| `(ingot/\w+)/` \| (.*) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    named = [ROOT / package / name for package, text in rows for name in re.findall(r"`(\w+)/?`", text)]
    assert len(named) > 40
    assert not [str(path) for path in named if not (path.is_dir() or path.with_suffix(".py").is_file())]
