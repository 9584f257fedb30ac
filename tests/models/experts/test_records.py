"""Folders whose experts lie beside each other: the same model, read in fewer pieces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from ingot.errors import ConfigError, ModelError
from ingot.models.convert import Conversion
from ingot.models.experts.files import ExpertFiles
from ingot.models.experts.records import write_expert_records
from ingot.models.files.drive_speed import ALIGNED
from ingot.models.files.folder_checks import read_safetensors_header
from ingot.models.files.progress import no_progress
from tests.launches import prompt_logits
from tests.models.experts.mixtures import PACKINGS, PROMPT, loaded, saved, store_of
from tests.one_path import one_path
from tests.test_upstream import save_mixture

__all__ = ["one_path"]
pytestmark = pytest.mark.usefixtures("rules")


def with_records(folder: Path, target: Path) -> Path:
    target.mkdir()
    shutil.copyfile(folder / "config.json", target / "config.json")
    write_expert_records(folder, target, no_progress)
    return target


@pytest.mark.parametrize(("family", "packing"), [("qwen3_moe", "4 bits"), ("gpt_oss", "mxfp4"), ("mixtral", "32 bits")])
def test_it_is_the_same_model_with_some_of_its_experts_in_memory_and_with_all(
    family: str, packing: str, rules: str, tmp_path: Path
) -> None:
    folder = saved(family, tmp_path / "before", PACKINGS[packing])
    records = with_records(folder, tmp_path / "after")
    for share in (None, 0.4) if rules != "cuda" else (0.4,):
        found = [loaded(each, share) for each in (folder, records)]
        assert mx.array_equal(*[prompt_logits(adapter, PROMPT) for adapter in found])
        for adapter in found:
            adapter.close()


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_experts_in_the_formats_of_others_are_laid_out_in_mlxs(method: str, tmp_path: Path) -> None:
    folder, target = tmp_path / "model", tmp_path / "records"
    folder.mkdir()
    save_mixture(method, folder)
    with pytest.raises(ModelError, match="`ingot convert --experts`"):
        loaded(folder, 0.8)
    Conversion(folder, "model", None, None, records=True).run(target, no_progress)
    adapter = loaded(target, 0.8)
    assert store_of(adapter).share < 1
    assert mx.allclose(prompt_logits(adapter, PROMPT), prompt_logits(loaded(folder), PROMPT), atol=1e-4).item()


def test_one_read_brings_an_expert_from_where_a_page_begins(tmp_path: Path) -> None:
    records = with_records(saved("qwen3_moe", tmp_path / "before", PACKINGS["4 bits"]), tmp_path / "after")
    adapter = loaded(records, 0.4)
    for layer in store_of(adapter).layers:
        for expert in range(layer.stored.count):
            [(run, parts)] = layer.stored.runs_of(expert)
            assert (run.offset % ALIGNED, run.size, len(parts)) == (0, layer.stored.bytes_of_one, 9)


def test_what_is_no_expert_is_there_as_it_was(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path / "before")
    records = with_records(folder, tmp_path / "after")
    before = mx.load(str(folder / "model.safetensors"))
    rest = mx.load(str(records / "model.safetensors"))
    assert isinstance(before, dict) and isinstance(rest, dict)
    assert {name for name in before if "switch_mlp" not in name} == rest.keys()
    assert all(mx.array_equal(array, before[name]) for name, array in rest.items())


def test_a_model_without_experts_is_refused_and_so_is_one_that_has_records(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no mixture of experts"):
        with_records(saved("llama", tmp_path / "llama"), tmp_path / "a")
    records = with_records(saved("qwen3_moe", tmp_path / "mixture"), tmp_path / "b")
    with pytest.raises(ConfigError, match="already"):
        with_records(records, tmp_path / "c")


def test_a_layout_that_does_not_fit_its_records_is_an_error_in_words(tmp_path: Path) -> None:
    records = with_records(saved("qwen3_moe", tmp_path / "mixture"), tmp_path / "records")
    file = records / "model-experts-00000.safetensors"
    found, whole = read_safetensors_header(file), file.read_bytes()
    [tensor] = found.values()
    header = json.loads(whole[8 : tensor.offset])
    changed = header["__metadata__"]["expert_records"].replace("[32, 64]", "[32, 6400]")
    header["__metadata__"]["expert_records"] = changed
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[tensor.offset :])
    with pytest.raises(ModelError, match="model-experts-00000"):
        ExpertFiles(records)
    with pytest.raises(ModelError):
        loaded(records)
