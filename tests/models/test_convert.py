"""Taking a head from where somebody says it is."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ingot.config import Settings
from ingot.errors import ModelError
from ingot.models.convert import find_head_elsewhere, is_quantized_config, write_head
from ingot.models.draft_heads.checkpoint import HeadSource, find_head_in, stored_head_tensors
from ingot.models.draft_heads.mtp import build_mtp_head
from ingot.models.files import hub
from ingot.models.files.progress import no_progress
from tests.models.draft_heads.making import FAMILIES, differences, in_eight_bits, make, named, write, write_shards


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that has one checkpoint, and what was fetched of it."""
    made = make("qwen3_5")
    shards = {"model-1.safetensors": made.base, "model-2.safetensors": named(made, differences(made.head))}
    there = write_shards(tmp_path / "there", made.config, shards)
    fetched: list[str] = []

    def fetch(repo: str, settings: Settings, progress: Any, patterns: Sequence[str] = hub.HUB_PATTERNS) -> Path:
        here = tmp_path / "here"
        here.mkdir(exist_ok=True)
        for file in sorted(there.iterdir()):
            if any(fnmatchcase(file.name, pattern) for pattern in patterns):
                (here / file.name).write_bytes(file.read_bytes())
                fetched.append(file.name)
        return here

    monkeypatch.setattr(hub, "fetch_from_hub", fetch)
    return fetched


def test_of_a_checkpoint_on_the_hub_only_files_that_hold_the_head_are_fetched(fetched: list[str]) -> None:
    made = make("qwen3_5")
    found = find_head_elsewhere("org/name", made.config, Settings(), no_progress)
    assert [file.name for file in found.files] == ["model-2.safetensors"]
    assert "model-1.safetensors" not in fetched
    assert isinstance(found, HeadSource)
    build_mtp_head(found, made.config)
    assert mx.allclose(stored_head_tensors(found)["norm.weight"], made.head["norm.weight"], atol=1e-6)


def test_a_head_may_be_a_file(tmp_path: Path) -> None:
    made = make("qwen3_5")
    write(tmp_path, made.config, files={"anything.safetensors": made.head})
    found = find_head_elsewhere(str(tmp_path / "anything.safetensors"), made.config, Settings(), no_progress)
    assert found.nbytes == sum(array.nbytes for array in made.head.values())


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file or folder '\./nowhere'"):
        find_head_elsewhere("./nowhere", {"model_type": "qwen3_5"}, Settings(), no_progress)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_was_written_is_the_one_that_was_read(family: str, tmp_path: Path) -> None:
    made = make(family)
    write(tmp_path, made.config, files={"one.safetensors": named(made)})
    first = find_head_in(tmp_path / "one.safetensors", made.config)
    assert first is not None
    write_head(first, tmp_path / "two.safetensors")
    second = find_head_in(tmp_path / "two.safetensors", made.config)
    assert second is not None
    build_mtp_head(second, made.config)
    before, after = stored_head_tensors(first), stored_head_tensors(second)
    assert before.keys() == after.keys()
    assert all(mx.allclose(after[name], before[name], rtol=0.01, atol=0.01) for name in before)
    wide = {name for name, array in after.items() if array.dtype == mx.float32}
    assert all("bias" in name for name in wide)


def test_a_head_in_eight_bits_stays_as_it_was_published(tmp_path: Path) -> None:
    made = make("deepseek_v3")
    stored, _ = in_eight_bits(made.head)
    write(tmp_path, made.config, files={"one.safetensors": named(made, stored)})
    first = find_head_in(tmp_path / "one.safetensors", made.config)
    assert first is not None
    write_head(first, tmp_path / "two.safetensors")
    second = find_head_in(tmp_path / "two.safetensors", made.config)
    assert second is not None
    build_mtp_head(second, made.config)
    after = stored_head_tensors(second)
    changed = [name for name in stored if "proj" in name and not mx.array_equal(after[name], stored[name])]
    assert not [name for name in changed if stored[name].dtype == mx.uint8 or name.endswith("scale_inv")]


@pytest.mark.parametrize(
    ("config", "packed"),
    [
        ({}, False),
        ({"quantization": {"bits": 4}}, True),
        ({"quantization_config": {"quant_method": "awq"}}, True),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, False),
        ({"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"}}, True),
    ],
)
def test_what_is_unpacked_when_it_is_loaded_can_be_packed(config: dict[str, Any], packed: bool) -> None:
    assert is_quantized_config(config) == packed
