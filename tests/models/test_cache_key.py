"""Which model this is, by its files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from ingot.models import cache_key
from ingot.models.cache_key import model_digest, remembered_digest


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


def test_a_digest_that_this_server_did_not_seal_is_not_believed(folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "digests.json"
    remembered_digest(folder, memory, b"theirs")
    [[name, entry]] = json.loads(memory.read_text()).items()
    memory.write_text(json.dumps({name: [entry[0], "0" * 32, entry[2]]}))
    for secret in (b"theirs", SECRET):
        assert remembered_digest(folder, memory, secret) == model_digest(folder)


@pytest.mark.parametrize("held", ["", "[]", "nothing", '{"x": 1}', '{"PATH": [1]}', '{"PATH": {}}'])
def test_a_memory_of_anything_is_no_memory(folder: Path, tmp_path: Path, held: str) -> None:
    memory = tmp_path / "digests.json"
    memory.write_text(held.replace("PATH", str(folder.resolve())))
    assert remembered_digest(folder, memory, SECRET) == model_digest(folder)
    assert remembered_digest(folder, tmp_path / "no" / "such" / "folder", SECRET) == model_digest(folder)
