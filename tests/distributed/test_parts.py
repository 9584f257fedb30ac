"""Records on disk whose parts several ranks have: all of them, or none. See `echo`."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foundry.package import MODELS
from ingot.cache.disk.index import DiskEntry
from ingot.cache.disk.record_file import RecordHeader
from ingot.cache.disk.store import RecordStore
from ingot.config import Settings
from ingot.engine.engine import Engine
from tests import tiny
from tests.distributed import echo, groups, keeping
from tests.distributed.echo import leading
from tests.distributed.serving import wait_until

CONFIGS: dict[str, dict[str, Any]] = {
    "wide": {**tiny.CONFIGS["llama"], "head_dim": 32},
    "hybrid": {**tiny.CONFIGS["hybrid"], "model_type": "qwen3_5"},
}
ASKED = {
    "tensor_parallel_size": 2,
    "max_sequences": 8,
    "memory": "1GB",
    "deterministic": True,
    "speculate": "off",
    "cache_disk_free_gb": 0.0,
}
PROMPTS = 2


class World:
    """A model, a folder for what is kept of it, and as many lives of a group as a test asks for."""

    def __init__(self, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> None:
        self._model, self._patches = MODELS / "hybrid" if kind == "with a head" else folder, monkeypatch
        if self._model == folder:
            groups.write_model(folder, CONFIGS[kind])
        self.kept = folder / "kept"
        self.settings = Settings(
            **{**ASKED, **asked, "cache_dir": self.kept, "archive_key_file": self.kept.parent / "key"}
        )

    def life(self) -> keeping.Kept:
        """What is answered, and that who follows computes what rank 0 does."""
        with self._patches.context() as patched, leading(self._model, self.settings, patched) as (engine, received):
            kept = self._lived(engine)
        received.check()
        return kept

    def _lived(self, engine: Engine) -> keeping.Kept:
        return keeping.play(engine, PROMPTS)

    def files(self, part: str = echo.OTHER_PART) -> list[Path]:
        homes = [about.parent for about in self.kept.glob("*/about.json") if _part(about) == part]
        return sorted(file for home in homes for file in home.glob("*.safetensors"))

    @property
    def parts(self) -> set[str]:
        return {_part(about) for about in self.kept.glob("*/about.json")}


def _part(about: Path) -> str:
    return str(json.loads(about.read_text())["part"])


def reads(kept: keeping.Kept) -> list[int]:
    """Tokens that were read for each of the prompts when they came first."""
    return [read for _, _, read in kept.taken[:PROMPTS]]


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("wide", {}),
        ("hybrid", {}),
        ("wide", {"cache_codec": "affine8"}),
        ("with a head", {"speculate": "mtp", "speculate_tokens": 2}),
    ],
)
def test_what_was_written_is_taken_over_after_a_restart(
    kind: str, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, kind, monkeypatch, **asked)
    first, second = world.life(), world.life()
    assert first.texts == second.texts
    assert reads(first) == [0] * PROMPTS and reads(second) == [299] * PROMPTS
    own = (world.parts - {echo.OTHER_PART}).pop()
    assert len(world.files()) == len(world.files(own)) > 0


def test_live_pages_in_fewer_bits_are_written_as_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, "wide", monkeypatch, kv_codec="affine8")
    first, second = world.life(), world.life()
    assert first.texts == second.texts and reads(second) == [299] * PROMPTS


def test_a_rank_without_its_parts_makes_them_a_miss_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, "hybrid", monkeypatch)
    first = world.life()
    for file in world.files():
        file.unlink()
    second = world.life()
    assert first.texts == second.texts and reads(second) == [0] * PROMPTS
    assert reads(world.life()) == [299] * PROMPTS, "what was computed once more is not kept once more"


def test_a_rank_whose_parts_are_damaged_makes_them_a_miss_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, "wide", monkeypatch)
    first = world.life()
    for file in world.files():
        with file.open("r+b") as opened:
            opened.seek(-5, os.SEEK_END)
            opened.write(b"wrong")
    second = world.life()
    assert first.texts == second.texts and reads(second) == [0] * PROMPTS


def test_a_rank_that_cannot_write_leaves_a_miss_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, "wide", monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr("ingot.cache.disk.store.RecordStore.write", written_by_rank_0_alone)
        first = world.life()
    assert not world.files()
    second = world.life()
    assert first.texts == second.texts and reads(second) == [0] * PROMPTS


def written_by_rank_0_alone(
    store: RecordStore, header: RecordHeader, data: Sequence[bytes | memoryview], entry: DiskEntry | None = None
) -> DiskEntry:
    if store.key["part"] == echo.OTHER_PART:
        raise OSError(errno.ENOSPC, "no room on this drive")
    return WRITE(store, header, data, entry)


WRITE = RecordStore.write


def test_files_of_another_layout_are_a_miss_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, "wide", monkeypatch)
    first = world.life()
    before = {file: file.stat().st_mtime_ns for file in world.files()}
    with monkeypatch.context() as patched:
        patched.setattr(echo, "OTHER_PART", "pipeline, rank 1 of 2")
        second = world.life()
    assert first.texts == second.texts and reads(second) == [0] * PROMPTS
    assert before and {file: file.stat().st_mtime_ns for file in world.files()} == before


def test_an_answer_that_does_not_come_is_waited_for_no_longer_than_a_slow_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, "wide", monkeypatch)
    first = world.life()
    monkeypatch.setattr("ingot.engine.offload.ONLOAD_PATIENCE_S", 0.05)
    monkeypatch.setattr("ingot.distributed.follower.FollowerFiles.finished_reads", lambda files: iter(()))
    second = world.life()
    assert first.texts == second.texts and reads(second) == [0] * PROMPTS


def test_what_a_tenant_clears_is_gone_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, "wide", monkeypatch)
    world.life()
    assert world.files()

    def cleared(engine: Engine) -> keeping.Kept:
        assert engine.kept.clear("") > 0
        wait_until(lambda: not world.files())
        return keeping.play(engine, PROMPTS)

    monkeypatch.setattr(world, "_lived", cleared)
    assert reads(world.life()) == [0] * PROMPTS
