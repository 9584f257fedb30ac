"""Which tests run, and which may fail."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, waiting


class Case:
    def __init__(self, *marks: Any) -> None:
        self.marks = list(marks)

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark)


def quick(cases: list[Case], file: str) -> list[int]:
    made = conftest.pytest_pycollect_makeitem(SimpleNamespace(nodeid=file))  # type: ignore[arg-type]
    next(made)
    with pytest.raises(StopIteration) as ended:
        made.send(cases)
    assert ended.value.value is cases
    return [number for number, case in enumerate(cases) if case.get_closest_marker("slow") is None]


def test_each_test_of_a_file_begins_with_another_case_and_none_is_left_without() -> None:
    def cases(count: int) -> list[Case]:
        return [Case(pytest.mark.sampled(3).mark) for _ in range(count)]

    assert [quick(cases(7), "one") for _ in range(4)] == [[0, 3, 6], [1, 4], [2, 5], [0, 3, 6]]
    assert [quick(cases(2), "two") for _ in range(3)] == [[0], [1], [0]]
    assert [quick(cases(1), "three") for _ in range(2)] == [[0], [0]]


def test_what_is_slow_anyway_is_not_counted_and_what_is_not_sampled_stays_quick() -> None:
    slow, sampled = pytest.mark.slow.mark, pytest.mark.sampled(2).mark
    assert quick([Case(sampled, slow), Case(sampled), Case(sampled), Case(sampled)], "four") == [1, 3]
    assert quick([Case(), Case(), Case(slow)], "five") == [0, 1]


def pytest_run(folder: Path, text: str, unsteady: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest with this project's hooks over a file of tests and a list of unsteady ones."""
    (folder / "tests").mkdir()
    for module in (conftest, waiting):
        path = Path(str(module.__file__))
        (folder / "tests" / path.name).write_text(path.read_text())
    (folder / "tests/unsteady.toml").write_text(unsteady)
    (folder / "tests/test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    few = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", *arguments, "tests"]
    return subprocess.run(command, cwd=folder, env=few, capture_output=True, text=True, timeout=120, check=False)


LISTED = """
[[test]]
id = "tests/test_it.py::test_bad"
symptom = "it came too late"
date = 2026-11-18
"""
TWO = "def test_bad(): assert False\ndef test_good(): pass\n"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_listed_test_may_fail_and_is_named_at_the_end(tmp_path: Path, workers: str) -> None:
    done = pytest_run(tmp_path, TWO, LISTED, "-n", workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2026-11-18 tests/test_it.py::test_bad: it came too late (failed in this run)" in done.stdout
    assert "1 passed, 1 xfailed" in done.stdout


def test_what_is_not_listed_fails(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, TWO.replace("test_bad", "test_worse"), LISTED)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout


def test_the_parts_of_all_files_are_all_files() -> None:
    items = [SimpleNamespace(nodeid=f"tests/test_{number}.py::test_it") for number in range(40)]
    parts = []
    for number in range(3):
        part, left_out = [*items], []
        hook = SimpleNamespace(pytest_deselected=lambda items, left_out=left_out: left_out.extend(items))
        config = SimpleNamespace(getoption=lambda name, number=number: (number, 3), hook=hook)
        conftest.pytest_collection_modifyitems(config, part)  # type: ignore[arg-type]
        assert len(part) + len(left_out) == len(items)
        parts.append({item.nodeid for item in part})
    assert all(parts)
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(items)


def test_workers_begin_with_the_files_that_take_longest() -> None:
    files = ["tests/config/test_a.py", "tests/equality/test_b.py", "tests/engine/test_c.py", "tests/engine/test_d.py"]
    items = [SimpleNamespace(nodeid=f"{file}::test_{n}") for file, n in zip(files, (30, 2, 1, 3), strict=True)]
    items += [SimpleNamespace(nodeid=f"{files[3]}::test_{n}") for n in range(2)]
    ordered = conftest._longest_files_first(items)  # type: ignore[arg-type]
    assert [item.nodeid.partition("::")[0] for item in ordered] == [files[1], *[files[3]] * 3, files[2], files[0]]


@pytest.mark.parametrize(("chosen", "imported"), [("not slow", 1), ("not clients and not slow", 0)])
def test_a_file_of_which_nothing_is_left_is_not_imported(tmp_path: Path, chosen: str, imported: int) -> None:
    text = """
import pytest

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(False, reason=""),
]
raise SystemExit("imported")

def test_it(): pass
"""
    done = pytest_run(tmp_path, text, "test = []", "-m", chosen)
    assert ("imported" in done.stdout + done.stderr) == imported


def test_a_case_that_chooses_the_rules_of_gpus_is_not_run_by_each_of_them(tmp_path: Path) -> None:
    text = """
import pytest

@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize("device", ["here", "gpu"])
def test_it(rules, device): pass
"""
    done = pytest_run(tmp_path, text, "test = []")
    assert "3 passed, 1 deselected" in done.stdout, done.stdout


def test_the_list_of_unsteady_tests_is_short_and_young_and_names_tests_that_exist() -> None:
    assert len(conftest.UNSTEADY) <= 10
    for test, entry in conftest.UNSTEADY.items():
        file, *_, name = test.partition("[")[0].split("::")
        assert f"def {name}(" in (conftest.ROOT / file).read_text(), f"{test} does not exist"
        assert entry["symptom"]
        assert date.today() - entry["date"] <= timedelta(days=60), f"{test} has been unsteady for too long: fix it"
