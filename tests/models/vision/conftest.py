from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.vision.looking import CONFIGS, saved


@pytest.fixture(scope="session", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each family."""
    return saved(request.param, tmp_path_factory.mktemp("seeing") / request.param)
