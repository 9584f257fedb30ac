from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.models.experts.mixtures import LOADED


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    """No thread reads for a model that is gone."""
    before = set(threading.enumerate())
    yield
    while LOADED:
        LOADED.pop().close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("experts")]
