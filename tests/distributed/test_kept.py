"""What ranks keep of prompts is as good as what one process keeps, whatever it is put into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.config import Settings
from ingot.engine import condensing
from tests import tiny
from tests.distributed import groups, keeping

CONFIGS: dict[str, dict[str, Any]] = {
    "wide": {**tiny.CONFIGS["llama"], "head_dim": 32},
    "deep": {**tiny.CONFIGS["llama"], "model_type": "qwen2", "head_dim": 32, "hidden_size": 128},
}
ASKED = {"max_sequences": 8, "memory": "1GB", "deterministic": True, "speculate": "off"}
DISK = {**ASKED, "cache_disk_free_gb": 0.0}
CODED = {**ASKED, "cache_codec": "affine8", "cache_memory": "1MB"}


def group(kind: str, way: str, games: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What two ranks give, of one model, asked for different things one after another."""
    groups.write_model(folder, CONFIGS[kind])
    asked = [(str(folder), {**game, f"{way}_parallel_size": 2}) for game in games]
    said = groups.run("tests.ranks.keeping", [json.dumps(asked)], 2, folder)
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.parametrize(
    ("kind", "way"), [("wide", "tensor"), pytest.param("deep", "pipeline", marks=pytest.mark.slow)]
)
def test_records_in_fewer_bits_are_gone_on_from_as_by_one_process(
    kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [together] = group(
        kind, way, [{**CODED, "cache_memory": "500KB"}], tmp_path
    )  # each has half of the heads or layers
    for name, value in keeping.ENCOURAGED.items():
        monkeypatch.setattr(condensing, name, value)
    alone = keeping.played(tmp_path, Settings(**CODED))
    assert together["texts"] == alone.texts
    assert any(codec == "affine8" and matched for codec, matched, _ in together["taken"])


@pytest.mark.parametrize(
    ("kind", "way"), [("wide", "tensor"), pytest.param("deep", "pipeline", marks=pytest.mark.slow)]
)
def test_a_group_that_is_started_again_goes_on_from_what_it_wrote(kind: str, way: str, tmp_path: Path) -> None:
    game = {**DISK, "cache_dir": str(tmp_path / "kept")}
    first, second = group(kind, way, [game, game], tmp_path)
    alone = keeping.played(tmp_path, Settings(**ASKED))
    assert first["texts"] == second["texts"] == alone.texts
    assert not any(read for _, _, read in first["taken"])
    assert [read for _, _, read in second["taken"][:4]] == [299] * 4
