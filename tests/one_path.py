"""For tests of equality, which holds where a token is computed in one way, however many are computed with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native


@pytest.fixture(autouse=True, scope="module")
def one_path() -> Iterator[None]:
    native.use_one_path()
    yield
    native.use_one_path(False)
