"""Which model this is, by its files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ingot.config import Settings
from ingot.errors import ConfigError
from ingot.models import cache_key
from ingot.models.cache_key import model_digest, open_disk_cache, remembered_digest, weights_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return made


SECRET = b"ours"


def refuse(folder: Path) -> str:
    raise AssertionError("the weights were read again")


def test_weights_are_read_once_for_many_starts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "digests.json"
    found = remembered_digest(folder, memory, SECRET)
    assert found == model_digest(folder)
    monkeypatch.setattr(cache_key, "model_digest", refuse)
    assert remembered_digest(folder, memory, SECRET) == found
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600


def test_a_file_that_changed_is_read_again(folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "digests.json"
    before = remembered_digest(folder, memory, SECRET)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(1, 1))
    model_digest.cache_clear()
    assert remembered_digest(folder, memory, SECRET) != before


def test_a_fingerprint_of_weights_reads_little_and_tells_models_apart(folder: Path) -> None:
    weights, dice = folder / "model.safetensors", Random(1)
    weights.write_bytes(dice.randbytes(3 << 20))
    before = weights_fingerprint(folder)
    os.utime(weights, ns=(1, 1))
    assert weights_fingerprint(folder) == before
    begin = weights.read_bytes()[: cache_key.FIRST_BYTES]
    weights.write_bytes(begin + dice.randbytes(2 << 20))
    retrained = weights_fingerprint(folder)
    (folder / "config.json").write_text('{"rope_theta": 1}')
    assert len({before, retrained, weights_fingerprint(folder)}) == 3


def test_a_digest_that_this_server_did_not_seal_is_not_believed(folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "digests.json"
    remembered_digest(folder, memory, b"theirs")
    [[name, entry]] = json.loads(memory.read_text()).items()
    memory.write_text(json.dumps({name: [entry[0], "0" * 32, entry[2]]}))
    for secret in (b"theirs", SECRET):
        assert remembered_digest(folder, memory, secret) == model_digest(folder)


@pytest.mark.parametrize("content", ["", "[]", "nothing", '{"x": 1}', '{"PATH": [1]}', '{"PATH": {}}'])
def test_a_memory_of_anything_is_no_memory(folder: Path, tmp_path: Path, content: str) -> None:
    memory = tmp_path / "digests.json"
    memory.write_text(content.replace("PATH", str(folder.resolve())))
    assert remembered_digest(folder, memory, SECRET) == model_digest(folder)
    assert remembered_digest(folder, tmp_path / "no" / "such" / "folder", SECRET) == model_digest(folder)


NOTHING: Any = None
"""Of the model, nothing is looked at before the folder is found fit."""


def refused(folder: Path, key: Path) -> str:
    with pytest.raises(ConfigError) as found:
        open_disk_cache(Settings(cache_dir=folder, archive_key_file=key), NOTHING, NOTHING, NOTHING)
    return found.value.message


def test_a_folder_that_others_may_write_to_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(0o777)
    error = refused(folder, tmp_path / "key")
    assert error.startswith(f"cache_dir {folder} cannot be used: other users may write to it: run chmod go-w {folder}")
    assert list(folder.iterdir()) == []


def test_records_are_not_kept_without_a_key_that_can_be_relied_on(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 64)
    key.chmod(0o644)
    error = refused(tmp_path / "kept", key)
    assert f"archive_key_file {key}: other users may read it; run chmod 600 on it" in error
