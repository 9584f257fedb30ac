import gc
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

# On CUDA, mlx multiplies float32 in fewer bits by default, and how they round depends on how many rows there are.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a `sampled` test one in so many is quick. The number shares no divisor with the count of values
    that vary fastest, so that each of them has its turn."""
    cases: Counter[tuple[str, str]] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            test = (str(item.path), item.name.partition("[")[0])
            if cases[test] % sampled.args[0] != 0:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1


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


@pytest.fixture
def reserved_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences reserve memory a page at a time, so that they outgrow it within few tokens."""
    from ingot.cache.pages import PAGE

    for module in ("ingot.cache.footprint", "ingot.engine.scheduler"):
        monkeypatch.setattr(f"{module}.CAPACITY_STEP", PAGE)
