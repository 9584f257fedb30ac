import gc
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.waiting import WAIT_S

# On CUDA, mlx multiplies float32 in fewer bits by default, and how they round depends on how many rows there are.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# Whatever was measured on this machine, tests run all of ours.
os.environ.setdefault("INGOT_MEASURED", "ignore")


def ignore_signals_alone() -> None:
    """Whoever starts the tests may have them ignore signals: `nohup`, shells in the background, CI systems.

    What is ignored is inherited, and a handler is not: with one that does nothing the tests go on ignoring a signal,
    and what they start does not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


ignore_signals_alone()

# Shared machines are noisy: a slow example is no failure, and every run tries the same ones: few of them, or as many as
# `--hypothesis-profile=thorough` asks for.
for profile, examples in (("quick", 25), ("thorough", 200)):
    settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile("quick")
# Hypothesis tries the constants of all modules that are imported, too: then examples depend on which tests ran before.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

# httpx gives up after five seconds, which a busy machine may take.
for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, WAIT_S)


ROOT = Path(__file__).parents[1]
RULES = ("cpu", "cuda", "metal")
SLOW_FOLDERS = ("tests/bench/", "tests/foundry/")
"""Tests of what is not the product."""
WHOLE_FILE = re.compile(r"^pytestmark = (\[$.*?^\]|.*?$)", re.MULTILINE | re.DOTALL)
"""The marks of all tests of a file."""
SECONDS_OF_A_TEST = {
    "equality": 1.5,
    "distributed": 1.0,
    "web": 0.5,
    "engine": 0.3,
    "models": 0.2,
    "kernels": 0.2,
    "cli": 0.1,
}
"""About, by the first folder below tests/."""
_sampled: Counter[str] = Counter()
"""How many tests were sampled so far, by their file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=read_part, help="of the files of tests only the K-th part of N: --part K/N")


def read_part(text: str) -> tuple[int, int]:
    number, parts = (int(each) for each in text.split("/"))
    if not 0 <= number < parts:
        raise ValueError(text)
    return number, parts


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which `-m` leaves no test is not imported, nor are the clients and the frameworks that it needs."""
    excluded = re.findall(r"(?:^| and )not (\w+)(?= and |$)", config.option.markexpr)
    path = collection_path.relative_to(ROOT).as_posix() if collection_path.is_relative_to(ROOT) else ""
    if "slow" in excluded and f"{path}/".startswith(SLOW_FOLDERS):
        return True
    if not excluded or not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    marks = WHOLE_FILE.search(collection_path.read_text())
    return True if marks and {*re.findall(r"pytest\.mark\.(\w+)", marks[0])} & {*excluded} else None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Of the cases of a `sampled` test one in so many is quick, counted from another case in each test of a file. The
    number shares no divisor with the count of values that vary fastest, so that each value has its turn."""
    made = yield
    cases = [case for case in made if not case.get_closest_marker("slow")] if isinstance(made, list) else []
    sampled = next((mark for case in cases if (mark := case.get_closest_marker("sampled"))), None)
    if sampled is not None:
        [every], first = sampled.args, _sampled[collector.nodeid]
        _sampled[collector.nodeid] += len(cases) > 1
        for number, case in enumerate(cases):
            if number % every != first % min(every, len(cases)):
                case.add_marker(pytest.mark.slow)
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW_FOLDERS):
            item.add_marker(pytest.mark.slow)
    part = config.getoption("--part")
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        runs = not _chooses_its_rules(item) and (part is None or _is_in_part(item, *part))
        (kept if runs else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = _longest_files_first(kept) if hasattr(config, "workerinput") else kept


def _longest_files_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """So that no worker begins a long file when the others have nothing left to do."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for item in items:
        file = item.nodeid.partition("::")[0]
        seconds[file] += SECONDS_OF_A_TEST.get(file.split("/")[1], 0.02)
    order = {file: place for place, file in enumerate(sorted(seconds, key=seconds.__getitem__, reverse=True))}
    return sorted(items, key=lambda item: order[item.nodeid.partition("::")[0]])


def _is_in_part(item: pytest.Item, number: int, parts: int) -> bool:
    return crc32(item.nodeid.partition("::")[0].encode()) % parts == number


def _chooses_its_rules(item: pytest.Item) -> bool:
    """Whether the rules that it is to be run by mean nothing to it."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("rules", "cpu") == "cpu":
        return False
    chosen = any(type(value).__name__ == "Device" for value in callspec.params.values())
    return chosen or "gpu" in item.name or item.get_closest_marker("cpus") is not None


def read_unsteady_tests() -> dict[str, dict[str, Any]]:
    """The tests that may fail without stopping a change, by their id: what was seen, and when."""
    return {entry["id"]: entry for entry in tomllib.loads((ROOT / "tests/unsteady.toml").read_text())["test"]}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure of a test in `unsteady.toml` counts as an expected one."""
    report = yield
    entry = UNSTEADY.get(item.nodeid) or UNSTEADY.get(item.nodeid.partition("[")[0])
    if entry is not None and report.failed:
        report.outcome, report.wasxfail = "skipped", f"unsteady since {entry['date']}: {entry['symptom']}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not UNSTEADY:
        return
    failed = [report.nodeid for report in terminalreporter.stats.get("xfailed", ())]
    terminalreporter.section(f"{len(UNSTEADY)} unsteady tests, to be fixed")
    for test, entry in UNSTEADY.items():
        note = " (failed in this run)" if any(each.startswith(test) for each in failed) else ""
        terminalreporter.line(f"{entry['date']} {test}: {entry['symptom']}{note}")


UNSTEADY = read_unsteady_tests()


def pytest_collection_finish() -> None:
    """What was imported stays: nobody has to look through it for garbage again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test marked `alone` counts what its whole process holds: threads of tests before it must not be in there."""
    if pyfuncitem.get_closest_marker("alone") is None or "INGOT_TEST_ALONE" in os.environ:
        return None
    test = [str(pyfuncitem.path) + "::" + pyfuncitem.name, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *test],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, "INGOT_TEST_ALONE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    return True


@pytest.fixture(autouse=True, scope="module")
def paths_of_this_file() -> Iterator[None]:
    """The path that tests choose for all of their process ends with their file, whatever order files run in. Caches and
    modules that a file leaves behind are not looked through for garbage again."""
    yield
    gc.collect()
    gc.freeze()
    if (native := sys.modules.get("ingot.kernels.cpu.native")) is not None:
        native.use_one_path(False)


@pytest.fixture(scope="module", params=[os.environ.get("INGOT_AS")] if "INGOT_AS" in os.environ else RULES)
def rules(request: pytest.FixtureRequest) -> Iterator[str]:
    """What a file loads follows the rules of each kind of device in turn, on a machine without a GPU. A fixture that
    loads something and lasts as long as the file has to ask for this one."""
    from tests.engines import acting_as

    with acting_as(request.param):
        yield request.param


@pytest.fixture
def reserved_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences reserve memory a page at a time, so that they outgrow it within few tokens."""
    from ingot.cache.pages import PAGE

    monkeypatch.setattr("ingot.cache.footprint.CAPACITY_STEP", PAGE)
    monkeypatch.setattr("ingot.engine.scheduler.CAPACITY_STEP", 4)  # how far ahead
