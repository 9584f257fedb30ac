"""Files of every architecture compute what the models compute that they were made of."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from ingot.errors import ModelError
from ingot.models.files.progress import no_progress
from ingot.models.gguf.architectures import ARCHITECTURES
from ingot.models.gguf.importer import convert_gguf
from ingot.models.gguf.weights import read_referenced_tensors, references_in
from tests.models.gguf.making import TinyModel, byte_level_vocabulary, random_rows
from tests.models.gguf.published import FAMILIES, as_gguf, random_model
from tests.models.gguf.test_moe_architectures import imported, logits_of

mx = pytest.importorskip("mlx.core")


def made(family: str, folder: Path, kind: Kind = Kind.F32, **changes: object) -> TinyModel:
    config, weights = random_model(family, folder / "original", **changes)
    return as_gguf(family, config, weights, lambda name: kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_model_computes_what_its_original_computes(family: str, tmp_path: Path) -> None:
    model = made(family, tmp_path)
    np.testing.assert_allclose(logits_of(imported(model, tmp_path)), logits_of(tmp_path / "original"), atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_compute_what_their_values_compute(family: str, tmp_path: Path) -> None:
    model = made(family, tmp_path, Kind.Q8_0)
    plain = {
        name: (Kind.F32, shape, model.dense(name)) if kind == Kind.Q8_0 else (kind, shape, raw)
        for name, (kind, shape, raw) in model.tensors.items()
    }
    (tmp_path / "dense").mkdir()
    expected = logits_of(imported(TinyModel(model.metadata, plain), tmp_path / "dense"))
    moved = logits_of(imported(model, tmp_path)) - expected
    assert np.abs(moved).max() < 4e-2 * np.abs(expected).max()  # embeddings are float16, as their scales are


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_that_stay_in_the_file_are_what_converting_writes(family: str, tmp_path: Path) -> None:
    source = made(family, tmp_path, Kind.Q8_0).write(tmp_path / "tiny.gguf")
    stored: dict[str, dict[str, object]] = {}
    for name, in_place in (("copy", False), ("in place", True)):
        (tmp_path / name).mkdir()
        convert_gguf(source, tmp_path / name, no_progress, in_place=in_place)
        stored[name] = dict(mx.load(str(tmp_path / name / "model.safetensors")))
    references = references_in(tmp_path / "in place")
    assert references is not None
    read = read_referenced_tensors(references)
    assert stored["copy"].keys() == stored["in place"].keys() | read.keys()
    for name, array in read.items():
        assert mx.array_equal(array, stored["copy"][name]), name


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_columns_of_blocks_move_with_their_heads(kind: Kind, tmp_path: Path) -> None:
    """Qwen 3.5 has the values of a key head side by side; files do not."""
    model = made("qwen3_5", tmp_path, linear_num_value_heads=8)
    name = "blk.0.ssm_out.weight"
    _, shape, _ = model.tensors[name]
    raw = random_rows(np.random.default_rng(3), kind, *shape, 0.1)
    model.tensors[name] = (kind, shape, raw)
    dense = TinyModel(model.metadata, {**model.tensors, name: (Kind.F32, shape, model.dense(name))})
    (tmp_path / "dense").mkdir()
    expected = logits_of(imported(dense, tmp_path / "dense"))
    assert np.abs(logits_of(imported(model, tmp_path)) - expected).max() < 1e-2 * np.abs(expected).max()


def test_a_setting_that_the_model_cannot_honour_is_refused(tmp_path: Path) -> None:
    for family, change, reason in (
        ("granite", {"granite.attention.sliding_window": 64}, "sliding-window attention is not supported"),
        ("glm4", {"glm4.rope.scaling.type": "yarn", "glm4.rope.scaling.factor": 4.0}, "scales rotary positions"),
        ("qwen3_5", {"qwen35.attention.recurrent_layers": [True] * 4}, "recurrent_layers is irregular"),
        ("nemotron_h", {"nemotron_h.feed_forward_length": [0, 0, 96, 0, 64]}, "differs between layers"),
        ("lfm2_moe", {"lfm2moe.expert_gating_func": 1}, "expert_gating_func is 1"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": 3}, "sliding_window_pattern is 3"),
    ):
        folder = tmp_path / family
        folder.mkdir()
        model = made(family, folder)
        with pytest.raises(ModelError, match=reason):
            imported(TinyModel({**model.metadata, **change}, model.tensors), folder)


def test_the_documents_list_every_architecture() -> None:
    listed = (
        (Path(__file__).parents[3] / "docs" / "models.md").read_text().split("architectures are ")[1].split(". ")[0]
    )
    assert set(re.findall(r"[\w-]+", listed)) >= ARCHITECTURES.keys()


def test_a_model_without_windows_has_the_context_within_which_they_change_nothing(tmp_path: Path) -> None:
    model = made("gemma2", tmp_path)
    model.metadata |= {"gemma2.attention.sliding_window": 100, **byte_level_vocabulary()}
    assert '"max_position_embeddings": 100' in (imported(model, tmp_path) / "config.json").read_text()
