"""Where states are kept in files, and where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.config import Settings
from ingot.errors import ConfigError
from ingot.models.kept_files import open_disk

NOTHING: Any = None
"""Of the model, nothing is looked at before the folder is found fit."""


def refused(folder: Path, key: Path) -> str:
    with pytest.raises(ConfigError) as found:
        open_disk(Settings(cache_dir=folder, archive_key_file=key), NOTHING, NOTHING, NOTHING)
    return found.value.message


def test_a_folder_that_others_may_write_to_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(0o777)
    said = refused(folder, tmp_path / "key")
    assert said.startswith(f"cache_dir {folder} cannot be used: other users may write to it: run chmod go-w {folder}")
    assert list(folder.iterdir()) == []


def test_records_are_not_kept_without_a_key_that_can_be_relied_on(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 64)
    key.chmod(0o644)
    said = refused(tmp_path / "kept", key)
    assert f"archive_key_file {key}: other users may read it; run chmod 600 on it" in said
