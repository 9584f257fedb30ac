from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import ModelError
from ingot.models.pooling_models.sentence_transformers import (
    POOLING_FLAGS,
    DenseStep,
    NormalizeStep,
    read_pooling_recipe,
)
from tests.encoders import write_sentence_files

MEAN = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_without_files_the_usual_pooling_is_used_with_a_note(tmp_path: Path) -> None:
    recipe = read_pooling_recipe(tmp_path, usual="lasttoken")
    assert (recipe.pooling, recipe.unit, recipe.length) == (("lasttoken",), True, None)
    assert "may be wrong" in recipe.notes[0]


@pytest.mark.parametrize(("flag", "mode"), POOLING_FLAGS.items())
def test_each_pooling_is_read_by_its_flag_and_by_its_newer_name(tmp_path: Path, flag: str, mode: str) -> None:
    write_sentence_files(tmp_path, {name: name == flag for name in POOLING_FLAGS})
    assert read_pooling_recipe(tmp_path, usual="mean").pooling == (mode,)
    write_sentence_files(tmp_path, {"pooling_mode": mode, "embedding_dimension": 16})
    assert read_pooling_recipe(tmp_path, usual="mean").pooling == (mode,)


def test_vectors_are_only_scaled_where_the_files_say_so(tmp_path: Path) -> None:
    write_sentence_files(tmp_path, MEAN, modules=())
    assert not read_pooling_recipe(tmp_path, usual="mean").unit


def test_newer_paths_of_the_modules_classes_are_known(tmp_path: Path) -> None:
    write_sentence_files(tmp_path, MEAN)
    kinds = ["base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling"]
    listed = [
        {"path": "" if n == 0 else "1_Pooling", "type": f"sentence_transformers.{k}"} for n, k in enumerate(kinds)
    ]
    write(tmp_path / "modules.json", listed)
    assert read_pooling_recipe(tmp_path, usual="cls").pooling == ("mean",)


def test_a_dense_layer_is_described(tmp_path: Path) -> None:
    write_sentence_files(tmp_path, MEAN, modules=("Dense", "Normalize"))
    write(tmp_path / "2_Dense" / "config.json", {"in_features": 16, "out_features": 8, "bias": False})
    (dense, last) = read_pooling_recipe(tmp_path, usual="mean").steps
    assert isinstance(dense, DenseStep) and (dense.inputs, dense.outputs, dense.bias) == (16, 8, False)
    assert last == NormalizeStep()


def test_length_case_and_prompts_are_read(tmp_path: Path) -> None:
    write_sentence_files(tmp_path, MEAN)
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 77, "do_lower_case": True})
    library = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}
    write(tmp_path / "config_sentence_transformers.json", library)
    recipe = read_pooling_recipe(tmp_path, usual="mean")
    assert (recipe.length, recipe.lower_case) == (77, True)
    assert (recipe.prompts, recipe.default_prompt) == ({"query": "Q: ", "document": ""}, "query")


def test_a_pooling_without_its_file_is_noted(tmp_path: Path) -> None:
    write_sentence_files(tmp_path, MEAN)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    recipe = read_pooling_recipe(tmp_path, usual="lasttoken")
    assert recipe.pooling == ("lasttoken",) and "1_Pooling/config.json is missing" in recipe.notes[0]


@pytest.mark.parametrize(
    ("pooling", "modules", "named"),
    [
        ({"pooling_mode_attention": True}, (), "pooling_mode_attention"),
        ({"pooling_mode": "attentive"}, (), "attentive"),
        ({"pooling_mode_mean_tokens": False}, (), "no pooling"),
        (MEAN, ("WeightedLayerPooling",), "WeightedLayerPooling"),
        (MEAN, ("Dense",), "in_features"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, pooling: dict[str, Any], modules: tuple[str, ...], named: str
) -> None:
    write_sentence_files(tmp_path, pooling, modules=modules)
    with pytest.raises(ModelError, match=named):
        read_pooling_recipe(tmp_path, usual="mean")


def test_pooling_that_leaves_prompts_out_is_refused_where_there_are_any(tmp_path: Path) -> None:
    write_sentence_files(tmp_path, MEAN | {"include_prompt": False})
    assert read_pooling_recipe(tmp_path, usual="mean").pooling == ("mean",)
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "Q: "}})
    with pytest.raises(ModelError, match="leaves its prompts out"):
        read_pooling_recipe(tmp_path, usual="mean")


@pytest.mark.parametrize("name", ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"])
@pytest.mark.parametrize("text", ["{", "3", '"x"'])
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    write_sentence_files(tmp_path, MEAN)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=name):
        read_pooling_recipe(tmp_path, usual="mean")
