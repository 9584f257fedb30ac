"""The documentation is true: its commands, flags, addresses, variables, paths and links exist."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from bench.__main__ import SUBJECTS
from ingot.cli.main import COMMANDS
from ingot.config.foreign import TABLE, foreign_rows
from tests.docs.pages import (
    ADDRESS,
    FLAG,
    PAGES,
    ROOT,
    addresses,
    all_flags,
    code,
    commands,
    flags,
    flags_of,
    make_targets,
    module_file,
    module_flags,
    modules,
    nameless,
    variables,
)
from tools import coming_from

FOREIGN = {
    "--add-host": "docker",
    "--find-links": "pip and uv",
    "--force": "pipx",
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
