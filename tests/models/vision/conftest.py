from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.models.vision.looking import CONFIGS, saved
from tests.models.vision.tiny_families import small_upstream


@pytest.fixture(scope="session", autouse=True)
def small_sizes() -> Iterator[None]:
    if find_spec("mlx_vlm") is None:
        yield
        return
    with small_upstream():
        yield


@pytest.fixture(scope="session", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each family."""
    return saved(request.param, tmp_path_factory.mktemp("seeing") / request.param)
