"""What fails once is tried once more, alone, and named; what fails twice fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STEADILY = Path(__file__).parents[2] / "tools" / "steadily.py"
RUN = "def test_runs(): assert True\n"
BAD = "def test_bad(): assert False\n"
TWICE = """
from pathlib import Path

def test_shy():
    seen = Path(__file__).with_suffix(".seen")
    shy, _ = not seen.exists(), seen.touch()
    assert not shy
"""


def steadily(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    few = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, str(STEADILY), "-q", "-p", "xdist", *arguments, "test_it.py"]
    return subprocess.run(command, cwd=folder, env=few, capture_output=True, text=True, timeout=120, check=False)


def test_what_passes_alone_is_named_and_refuses_nothing(tmp_path: Path) -> None:
    done = steadily(tmp_path, RUN + TWICE, "-n", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "unsteady: test_it.py::test_shy failed with others and passed alone"


def test_what_fails_twice_fails_even_beside_one_that_is_only_unsteady(tmp_path: Path) -> None:
    done = steadily(tmp_path, RUN + TWICE + BAD)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout.splitlines()[-1], "the second run has what failed in the first"
    assert "unsteady" not in done.stdout


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    many = "import pytest\n@pytest.mark.parametrize('number', range(6))\n" + BAD.replace("()", "(number)")
    done = steadily(tmp_path, many)
    assert done.returncode == 1
    assert "once more" not in done.stdout


def test_what_does_not_run_at_all_is_not_tried_again(tmp_path: Path) -> None:
    done = steadily(tmp_path, "import nothing_of_this_name\n")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "once more" not in done.stdout
