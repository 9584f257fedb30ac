"""The documentation as the tests read it: pages, what stands in them as code, and what the program really has."""

from __future__ import annotations

import contextlib
import io
import re
from functools import cache
from pathlib import Path

from ingot.cli.main import COMMANDS, main
from ingot.config import SETTINGS
from ingot.protocol.operations import OPERATIONS

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
SUBCOMMANDS = {
    "bench": ("serve", "speculate"),
    "cache": ("show", "explain", "clear", "export", "import", "list", "verify", "trim"),
    "service": ("install", "uninstall", "show"),
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
ADDRESS = re.compile(r"(?<![\w.])/(?:v1|v2|api|health)/[\w/{}-]*[\w}]")


def code(text: str) -> list[str]:
    """What stands between backticks, in indented blocks and in fences, a piece each; a line that goes on is one."""
    text = text.replace("\\\n", " ")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^(?: {4}|\t)(.*)$", rest, re.MULTILINE)
    return [*(line for block in fenced for line in block.splitlines()), *indented, *re.findall(r"`([^`]+)`", rest)]


def fences(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def flags(piece: str) -> set[str]:
    """The flags in a piece of code, without those that stand behind ` -- ` and are passed on to another program."""
    return set(FLAG.findall(piece.partition(" -- ")[0]))


def commands(piece: str) -> list[tuple[tuple[str, ...], str]]:
    """Each use of `ingot COMMAND ...` in a piece of code: its words up to the subcommand, and what follows."""
    found = []
    for name, rest in re.findall(r"(?:^|\s|bin/)ingot ([a-z]+)\b([^|;&]*)", piece):
        sub = next((word for word in SUBCOMMANDS.get(name, ()) if rest.split()[:1] == [word]), None)
        found.append(((name,) if sub is None else (name, sub), rest))
    return found


@cache
def flags_of(words: tuple[str, ...]) -> frozenset[str]:
    """The flags that `ingot WORDS --help` shows."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return frozenset(FLAG.findall(shown.getvalue()))


@cache
def all_flags() -> frozenset[str]:
    uses = [(name,) for name in COMMANDS] + [(name, sub) for name, subs in SUBCOMMANDS.items() for sub in subs]
    return frozenset().union(*(flags_of(use) for use in uses))


def addresses() -> set[str]:
    """Every path that is routed, with nameless places for what varies."""
    return {nameless(operation.path) for operation in OPERATIONS}


def nameless(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def variables() -> set[str]:
    """Every INGOT_ variable that a setting has or that the sources read."""
    sources = [*(ROOT / "ingot").rglob("*.py"), *(ROOT / "native" / "src").glob("*.cpp")]
    read = {name for path in sources for name in re.findall(r'"(INGOT_[A-Z_]+)"', path.read_text())}
    return read | {f"INGOT_{name.upper()}" for name in SETTINGS}
