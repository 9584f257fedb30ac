"""The documentation as the tests read it: pages, the code in them, and the commands and flags that exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

from ingot.cli.main import COMMANDS, main
from ingot.config import SETTINGS
from ingot.config.foreign import foreign_rows
from ingot.protocol.operations import OPERATIONS

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
GUIDES = (
    *("install", "serve", "connect", "choose", "tune", "operate", "scale"),
    *("vision", "speech", "speculation", "long-prompts", "kv-cache"),
)
"""The pages of one screen each, which are there in every language."""
LANGUAGES = ("es", "fr", "zh")
SUBCOMMANDS = {
    "bench": ("serve", "speculate", "peers"),
    "cache": ("show", "explain", "clear", "export", "import", "list", "verify", "trim"),
    "service": ("install", "uninstall", "show"),
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
ADDRESS = re.compile(r"(?<![\w.])/(?:v1|v2|api|health)/[\w/{}-]*[\w}]")


def code(text: str) -> list[str]:
    """The code between backticks, and each line of indented blocks and fences; a continued line is one."""
    rest = re.sub(r"^```\w*\n.*?^```", "", text.replace("\\\n", " "), flags=re.MULTILINE | re.DOTALL)
    return [*blocks(text), *re.findall(r"`([^`]+)`", rest)]


def blocks(text: str) -> list[str]:
    """The lines of fences, then those of indented blocks."""
    text = text.replace("\\\n", " ")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [
        *(line for block in fenced for line in block.splitlines()),
        *re.findall(r"^(?: {4}|\t)(.*)$", rest, re.MULTILINE),
    ]


def guide_commands(program: str) -> list[tuple[dict[str, str], list[str]]]:
    """Every command of the guides' blocks that runs `program`, loops aside: its variables, and its words."""
    found = []
    for name in GUIDES:
        for line in blocks((ROOT / "docs" / f"{name}.md").read_text()):
            words = shlex.split(line.rstrip("& "), comments=True) if re.search(rf"(?:^|\s){program} ", line) else []
            variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
            if words[len(variables) : len(variables) + 1] == [program] and "$" not in line:
                found.append((variables, words[len(variables) + 1 :]))
    return found


def fences(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def flags(piece: str) -> set[str]:
    """The flags in a piece of code, except those after ` -- `, which are another program's."""
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
    return frozenset(foreign_rows()).union(*(flags_of(use) for use in uses))


def make_targets() -> set[str]:
    [phony] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(phony.split())


def modules(piece: str) -> list[tuple[str, str]]:
    """Each `python -m MODULE ...` of this repository in a piece of code, and each `make bench ARGS=...`: the module and
    what follows."""
    found = re.findall(r"python -m ((?:bench|foundry|ingot)(?:\.\w+)*)([^|;&]*)", piece)
    for arguments in re.findall(r"make bench ARGS='?([^']*)", piece):
        subject, _, rest = arguments.partition(" ")
        found.append((f"bench.{subject.replace('-', '_')}", rest))
    return found


@cache
def module_file(module: str) -> Path | None:
    """The file that `python -m MODULE` runs."""
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()), None)


@cache
def module_flags(file: Path) -> frozenset[str]:
    """The flags that a module has, or a module of the same top-level package that it imports."""
    text = file.read_text()
    found = set(FLAG.findall(text))
    for package, names in re.findall(r"^from (bench(?:\.\w+)*) import (.*)$", text, re.MULTILINE):
        for module in (package, *(f"{package}.{name.strip()}" for name in names.split(","))):
            if (imported := module_file(module)) is not None and imported != file:
                found |= module_flags(imported)
    return frozenset(found)


def addresses() -> set[str]:
    """Every path that is routed, without the names of its parameters."""
    return {nameless(operation.path) for operation in OPERATIONS}


def nameless(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


@cache
def variables() -> set[str]:
    """Every INGOT_ variable of a setting, and every other one that the sources read."""
    sources = [*(ROOT / "ingot").rglob("*.py"), *(ROOT / "native" / "src").glob("*.cpp")]
    read = {name for path in sources for name in re.findall(r'"(INGOT_[A-Z_]+)"', path.read_text())}
    theirs = {flag.removeprefix("--").replace("-", "_") for flag in foreign_rows() if flag.startswith("--")}
    return read | {f"INGOT_{name.upper()}" for name in (*SETTINGS, *theirs)}
