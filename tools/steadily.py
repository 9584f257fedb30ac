"""`python tools/steadily.py ARGUMENTS` runs pytest with them. If few tests fail, they are tried once more, alone.

A test that fails with others and passes alone is unsteady: it does not fail the run, but is named at the end.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST = 5
"""More failures than this are not an accident."""
ALONE = ("-n", "0", "--last-failed", "--last-failed-no-failures", "none")


class Failures:
    """A plugin that collects failed tests of all worker processes."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = None


def main(arguments: list[str]) -> int:
    sys.path[0] = str(Path.cwd())  # as `python -m pytest` has it
    failures = Failures()
    status = int(pytest.main(arguments, plugins=[failures]))
    if status != pytest.ExitCode.TESTS_FAILED or len(failures.tests) > MOST:
        return status
    print(f"\n{len(failures.tests)} failed: once more, alone", flush=True)
    status = subprocess.run([sys.executable, "-m", "pytest", *arguments, *ALONE], check=False).returncode
    if status == 0:
        for test in failures.tests:
            print(f"unsteady: {test} failed with others and passed alone")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
