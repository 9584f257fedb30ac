"""What tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native


@pytest.fixture
def one_path() -> Iterator[None]:
    """Compute a row the same way however many there are."""
    native.use_one_path()
    yield
    native.use_one_path(False)
