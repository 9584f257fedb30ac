"""The recipes of CONTRIBUTING.md, followed as they are written in a copy of the package: what they add works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.recipe_checks import CHECKS

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
BLOCK = re.compile(r"^```(python|diff)\n(?:#|---) (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, in which every recipe has been followed. Unchanged files are links."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(ROOT / "ingot", folder / "ingot", copy_function=os.symlink)
    for title, text in RECIPES.items():
        for kind, path, block in BLOCK.findall(text):
            file = folder / path
            before = file.read_text() if file.exists() else ""
            after = f"{before}\n\n{block}" if kind == "python" else patched(before, block, f"{title}: {path}")
            file.unlink(missing_ok=True)
            file.write_text(after)
    return folder


def patched(text: str, diff: str, where: str) -> str:
    """`text` with the lines of a diff changed: those it removes or shows must be there once."""
    lines = diff.splitlines()
    old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(old) == 1, f"CONTRIBUTING.md, {where}: the file has {text.count(old)} times\n{old}"
    return text.replace(old, new)


def run(copy: Path, *arguments: str) -> str:
    paths = os.pathsep.join([str(copy), str(ROOT)])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INGOT_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "PYTHONPATH": paths, "XDG_CONFIG_HOME": str(copy)},
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def failures(copy: Path) -> dict[str, str]:
    """What went wrong where all that the recipes add was used, in one process."""
    found: dict[str, str] = json.loads(run(copy, "-m", "tests.docs.recipe_checks").splitlines()[-1])
    return found


@pytest.mark.parametrize("what", CHECKS)
def test_what_a_recipe_adds_works(failures: dict[str, str], what: str) -> None:
    assert failures[what] == ""


def test_a_command_that_a_recipe_adds_runs_and_is_listed(copy: Path) -> None:
    assert run(copy, "-m", "ingot", "hello", "--name", "you") == "hello, you"
    assert "hello    say hello" in run(copy, "-m", "ingot", "--help")


def test_every_block_of_a_recipe_is_followed() -> None:
    blocks = [block for text in RECIPES.values() for block in re.findall(r"^```", text, re.MULTILINE)]
    assert len(blocks) == 2 * sum(len(BLOCK.findall(text)) for text in RECIPES.values()) > 20
