"""Whether the workflows and the pages on installing and releasing name what there is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.version import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_there_is(workflow: Path) -> None:
    lines = [step["run"] for step in steps(workflow) if "run" in step]
    for target in re.findall(r"\bmake ([a-z-]+)", "\n".join(lines)):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    for tool in re.findall(r"\btools/[a-z-]+", "\n".join(lines)):
        assert os.access(ROOT / tool, os.X_OK), tool


def test_a_release_installs_what_it_built_before_it_is_drafted() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    lines = [step.get("run") for step in jobs["wheels"]["steps"]]
    assert lines.index("make packages ARGS=--manylinux") < lines.index("make test-packages")
    assert "wheels" in jobs["draft"]["needs"]


def test_a_version_has_its_part_of_the_changelog(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "changes", tmp_path / "tools")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changes\n\n## Unreleased\n\n## 1.2.0 - today\n\n- One.\n\n## 1.2\n\n- Two.\n"
    )

    def changes(version: str) -> tuple[int, str]:
        done = subprocess.run([tmp_path / "tools" / "changes", version], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.strip()

    assert changes("1.2.0") == (0, "- One.")
    assert changes("1.2") == (0, "- Two.")
    assert changes("Unreleased") == (1, "")
    assert changes("1.3.0") == (1, "")


@pytest.mark.parametrize("folder", ["docs", "ingot", "deploy", "README.md", "CONTRIBUTING.md"])
def test_nothing_tells_users_to_install_another_project_of_that_name(folder: str) -> None:
    root = ROOT / folder
    files = [root] if root.is_file() else [*root.rglob("*.py"), *root.rglob("*.md"), *root.rglob("*.y*ml")]
    wrong = re.compile(r"install[^\n|]*[ '\"]ingot(\[|['\"]?\s*$|==)", re.MULTILINE)
    assert files and [str(file) for file in files if wrong.search(file.read_text())] == []


def test_the_page_on_installing_names_the_files_of_this_version_and_extras_that_exist() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"ingot_mlx-([\d.]+)-py3", page)) == {__version__}
    assert set(re.findall(r"ingot_native-([\d.]+)-", page)) == {__version__}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\.whl\[([a-z]+)\]", page)) == {"cpu", "cuda"} <= extras.keys()
