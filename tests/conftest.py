import gc
import os
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
    """Of the cases of a `sampled` test one in so many is quick. The number divides no parameter's count of values, so
    that each value has its turn."""
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


@pytest.fixture
def reserved_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences reserve memory a page at a time, so that they outgrow it within few tokens."""
    from ingot.cache.pages import PAGE

    for module in ("ingot.cache.footprint", "ingot.engine.scheduler"):
        monkeypatch.setattr(f"{module}.CAPACITY_STEP", PAGE)
