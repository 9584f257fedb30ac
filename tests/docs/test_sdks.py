"""The blocks of docs/agents.md that are programs: each is one, and says what the server answered."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.config import Settings
from tests.clients.agents import HERE, NOT_INSTALLED, PYTHON
from tests.docs.pages import ROOT, fences
from tests.http.running import running
from tests.http.scripted import ScriptedEngine, settings

PAGE = (ROOT / "docs" / "agents.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ADDRESS = f"http://127.0.0.1:{Settings().port}"
PACKAGES = {"The OpenAI SDK": "openai", "The Anthropic SDK": "anthropic", "LangChain": "langchain_openai"}
NODE_PACKAGES = {"The OpenAI SDK": "openai", "The Anthropic SDK": "@anthropic-ai/sdk"}
ANSWER = "Hello, world"

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ScriptedEngine(), settings()) as url:
        yield url


def block(title: str, language: str) -> str:
    (found,) = fences(SECTIONS[title], language)
    return found


def python_with(package: str) -> str | None:
    """An interpreter that has the package: this one, or that of the other projects' clients."""
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    return str(PYTHON) if PYTHON.exists() else None


def output_of(command: list[str], folder: Path) -> str:
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


@pytest.mark.parametrize("title", PACKAGES)
def test_a_python_block_is_python_that_asks_our_address(title: str) -> None:
    text = block(title, "python")
    assert ast.parse(text).body
    assert ADDRESS in text and PACKAGES[title] in text


@pytest.mark.parametrize("title", PACKAGES)
def test_a_python_block_prints_the_answer(title: str, url: str, tmp_path: Path) -> None:
    python = python_with(PACKAGES[title])
    if python is None:
        pytest.skip(f"{PACKAGES[title]} is not installed")
    program = tmp_path / "program.py"
    program.write_text(block(title, "python").replace(ADDRESS, url))
    assert output_of([python, str(program)], tmp_path) == ANSWER


@needs_node
@pytest.mark.parametrize("title", NODE_PACKAGES)
def test_a_javascript_block_is_a_module_that_asks_our_address(title: str, tmp_path: Path) -> None:
    text = block(title, "js")
    assert ADDRESS in text and f'from "{NODE_PACKAGES[title]}"' in text
    program = tmp_path / "program.mjs"
    program.write_text(text)
    output_of(["node", "--check", str(program)], tmp_path)


@needs_node
@pytest.mark.parametrize("title", NODE_PACKAGES)
def test_a_javascript_block_prints_the_answer(title: str, url: str, tmp_path: Path) -> None:
    packages = HERE / "node_modules"
    if not (packages / NODE_PACKAGES[title]).is_dir():
        pytest.skip(NOT_INSTALLED)
    (tmp_path / "node_modules").symlink_to(packages.resolve())
    program = tmp_path / "program.mjs"
    program.write_text(block(title, "js").replace(ADDRESS, url))
    assert output_of(["node", str(program)], tmp_path) == ANSWER
