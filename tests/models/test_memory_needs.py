"""What is said of a model's memory before it is loaded, against what it takes once it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from bench import random_models
from ingot.cli.models import describe_needs
from ingot.config import DEFAULT_MODEL, Settings
from ingot.kernels.device import Device
from ingot.models.adapter import load_model_adapter
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import no_progress
from ingot.models.memory_needs import MemoryNeeds, memory_needs
from ingot.upstream import MultiLinear, QuantizedMultiLinear
from tests.engines import GPU
from tests.memory import settled
from tests.models.gguf.making import CONTEXT, as_q4_k_m, tiny_model
from tests.models.gguf.test_importer import converted
from tests.models.layers import family_configs
from tests.models.vision import looking as qwens
from tests.models.vision import tiny_families as tiled

CPU = Device("cpu", "a CPU", 1 << 34)


def needs_of(path: Path, device: Device) -> MemoryNeeds:
    found = memory_needs(path, device)
    assert found is not None
    return found


def assert_true(folder: Path, device: Device, *others: Path) -> None:
    """Of a folder, and of other files with the same model."""
    adapter = load_model_adapter(folder, device)
    for path in (folder, *others):
        found = needs_of(path, device)
        assert found.weights == pytest.approx(adapter.weight_bytes, rel=0.03)
        assert found.per_token == adapter.footprint.token
        assert found.context == adapter.context


def test_it_is_true_of_the_default_model() -> None:
    folder = ensure_packaged_model(DEFAULT_MODEL, Settings(), no_progress)
    found = needs_of(folder, CPU)
    assert_true(folder, CPU)
    assert found.at_full_context == found.per_token * found.context


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_it_is_true_of_a_q4_k_m_file_before_and_after_it_is_converted(
    device: Device, architecture: str, tmp_path: Path
) -> None:
    folder = converted(as_q4_k_m(tiny_model(architecture)), tmp_path)
    assert_true(folder, device, tmp_path / "tiny.gguf")


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q8_0, Kind.BF16, Kind.F32, Kind.Q3_K], ids=lambda kind: kind.name)
def test_it_is_true_of_other_formats(kind: Kind, tmp_path: Path) -> None:
    folder = converted(tiny_model("llama", kinds=[kind]), tmp_path)
    assert_true(folder, CPU, tmp_path / "tiny.gguf")


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_what_a_model_sees_with_is_counted_and_told_apart(device: Device, family: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    folder = (qwens if family.startswith("qwen") else tiled).saved(family, tmp_path / family)
    found = needs_of(folder, device)
    assert found.weights == pytest.approx(load_model_adapter(folder, device, with_vision=True).weight_bytes, rel=0.03)
    assert found.weights - found.tower == pytest.approx(load_model_adapter(folder, device).weight_bytes, rel=0.03)
    assert "--text-only leaves out" in describe_needs(found) and "--text-only" not in describe_needs(
        replace(found, tower=0)
    )


def test_windows_grow_no_further_than_they_see(tmp_path: Path) -> None:
    converted(tiny_model("gemma3"), tmp_path)
    found = needs_of(tmp_path / "tiny.gguf", CPU)
    assert found.per_token * CONTEXT < found.at_full_context < 2 * found.per_token * CONTEXT


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "deepseek_v32", "gemma3n", "gemma4", "longcat_flash", "mimo_v2_flash", "youtu_llm"]
)
def test_it_is_true_of_keys_and_values_that_are_stored_otherwise_than_a_model_writes_them(
    family: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(family_configs.config(family)))
    weights = dict(tree_flatten(family_configs.build(family).parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    assert needs_of(tmp_path, CPU).per_token == load_model_adapter(tmp_path, CPU).footprint.token


@pytest.mark.cpus
def test_quantised_weights_of_each_latent_head_become_plain_and_are_counted_so(tmp_path: Path) -> None:
    sizes = {"qk_nope_head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 32, "vocab_size": 96}
    packing = {"group_size": 32, "bits": 4}
    config = {**family_configs.config("deepseek_v3"), **sizes}
    model = random_models.build(config, dtype=mx.bfloat16)
    nn.quantize(model, **packing, class_predicate=lambda path, module: isinstance(module, MultiLinear))
    assert any(isinstance(module, QuantizedMultiLinear) for module in model.modules())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": packing}))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    adapter = load_model_adapter(tmp_path, CPU)
    assert not any(isinstance(module, QuantizedMultiLinear) for module in adapter.model.modules())
    assert needs_of(tmp_path, CPU).weights == pytest.approx(adapter.weight_bytes, rel=0.03)


def test_nothing_is_read_of_the_weights(tmp_path: Path) -> None:
    folder = converted(as_q4_k_m(tiny_model("llama")), tmp_path)
    before = settled()
    needs_of(folder, CPU)
    assert mx.get_peak_memory() - before < 1 << 14


def test_what_is_no_model_has_no_needs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert memory_needs(tmp_path, CPU) is None
    (tmp_path / "some.gguf").write_bytes(bytes(7))
    assert memory_needs(tmp_path / "some.gguf", CPU) is None
