"""What becomes of the blocks of a GGUF file's K formats on each device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels import native
from ingot.kernels.device import Device
from ingot.models.adapter import Adapter, load
from ingot.models.gguf import weights
from ingot.models.gguf.quant_types import BLOCK_BITS
from ingot.models.layers.modules import PackedEmbedding, PackedLinear, parameters
from tests.engines import GPU
from tests.launches import prompt_logits
from tests.models.gguf.making import TinyModel, as_q4_k_m, random_rows, tiny_model
from tests.models.gguf.test_importer import TOKENS, converted, expected_logits

CPU = Device("cpu", "a CPU", 1 << 34)
KINDS = pytest.mark.parametrize("kind", sorted(BLOCK_BITS), ids=lambda kind: kind.name)
GPU_GROWTH = 1.3
"""How much more than in its file a Q4_K_M model takes in MLX's forms: 5 bits for 4.5, and 9 for 6.6."""


def file_bytes(model: TinyModel) -> int:
    return sum(raw.nbytes for _, _, raw in model.tensors.values())


def logits(adapter: Adapter) -> np.ndarray:
    return np.array(prompt_logits(adapter, TOKENS).astype(mx.float32))


def layer(kind: Kind, rows: int = 40, columns: int = 512, *, cls: type = nn.Linear) -> tuple[Any, np.ndarray]:
    """A layer of random blocks, and its weights."""
    raw = random_rows(np.random.default_rng(kind), kind, rows, columns)
    given = nn.Linear(columns, rows, bias=False) if cls is nn.Linear else nn.Embedding(rows, columns)
    held = {nn.Linear: weights.BlockLinear, nn.Embedding: weights.BlockEmbedding}[cls](given, kind)
    assert held.weight.shape == raw.shape
    held.weight = mx.array(raw)
    return held, dequantize(raw, kind)


def unpacked(module: Any) -> np.ndarray:
    return np.array(mx.dequantize(module.weight, module.scales, module.biases, 32, module.bits).astype(mx.float32))


@pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_q4_k_m_file_takes_as_much_memory_as_in_the_file_and_a_tenth_at_most(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    model = as_q4_k_m(tiny_model(architecture, tied=tied))
    adapter = load(converted(model, tmp_path), CPU)
    assert adapter.weight_bytes <= 1.1 * file_bytes(model)
    head = adapter.model.model.embed_tokens if tied else adapter.model.lm_head
    assert isinstance(head, PackedEmbedding if tied else PackedLinear) and head.mode == "Q6_K"


@pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
@KINDS
def test_a_model_of_each_format_takes_as_much_memory_and_a_tenth_at_most(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("llama", kinds=[kind])
    assert load(converted(model, tmp_path), CPU).weight_bytes <= 1.1 * file_bytes(model)


@pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_q4_k_m_model_computes_what_its_dense_weights_compute(architecture: str, tmp_path: Path) -> None:
    model = as_q4_k_m(tiny_model(architecture))
    folder = converted(model, tmp_path)
    expected = expected_logits(model, folder)
    for adapter, bound in ((load(folder, CPU), 0.04), (load(folder, CPU, dtype="float32"), 1e-4)):
        assert np.linalg.norm(logits(adapter) - expected) <= bound * np.linalg.norm(expected)
        assert repr(adapter.model)


def test_on_gpus_a_q4_k_m_model_is_in_mlx_forms_with_factors_of_16_bits(tmp_path: Path) -> None:
    model = as_q4_k_m(tiny_model("qwen3", tied=False))
    adapter = load(converted(model, tmp_path), GPU)
    assert {array.dtype for _, array in parameters(adapter.model)} == {mx.uint32, mx.bfloat16}
    assert adapter.weight_bytes <= GPU_GROWTH * file_bytes(model)
    widths = {path: module.bits for path, module in adapter.model.named_modules() if hasattr(module, "bits")}
    assert set(widths.values()) == {4, 8}


@KINDS
def test_in_affine_form_weights_are_off_by_little(kind: Kind) -> None:
    held, values = layer(kind)
    for dtype, rounding in ((mx.float16, 2.0**-11), (mx.bfloat16, 2.0**-8)):
        found = unpacked(weights.affine(held, dtype))
        groups = values.reshape(len(values), -1, 32)
        reach = np.abs(groups).max(axis=-1) + np.ptp(groups, axis=-1)
        step = 0 if kind in (Kind.Q4_K, Kind.Q5_K) else np.ptp(groups, axis=-1) / (2 ** (BLOCK_BITS[kind] + 2) - 2)
        off = np.abs(found - values).reshape(groups.shape).max(axis=-1)
        # Steps are put so that the farthest value is met, which may cut the other end off by half a step more.
        assert np.all(off <= 1.5 * step + 2 * rounding * reach)


def test_no_group_that_lies_below_zero_is_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize, given = mx.quantize, list[np.ndarray]()

    def watched(values: mx.array, group: int, bits: int) -> tuple[mx.array, mx.array, mx.array]:
        given.append(np.array(values).reshape(-1, group))
        return quantize(values, group, bits)

    monkeypatch.setattr(mx, "quantize", watched)
    held, values = layer(Kind.Q2_K)
    found = unpacked(weights.affine(held, mx.float16))
    groups = values.reshape(-1, 32)
    below = groups.max(axis=1) < 0
    assert below.any() and np.concatenate(given).max(axis=1).min() >= 0
    off = np.abs(found.reshape(-1, 32) - groups).max(axis=1)
    assert np.all((off <= 1.5 * np.ptp(groups, axis=1) / 14 + 2e-3 * np.abs(groups).max(axis=1))[below])


@KINDS
def test_in_exact_form_weights_are_what_they_were(kind: Kind) -> None:
    held, values = layer(kind)
    made: Any = weights.exact(held, mx.float32)
    found = unpacked(made) if "scales" in made else np.array(made.weight)
    np.testing.assert_allclose(found, values, rtol=0, atol=np.abs(values).max() * 2**-22)


def test_plain_numbers_that_overflow_float16_are_float32() -> None:
    held, _ = layer(Kind.Q6_K)
    raw = np.array(held.weight)
    raw[0, 208:210] = np.array([1000.0], np.float16).view(np.uint8)
    held.weight = mx.array(raw)
    assert weights.exact(held, mx.float16).weight.dtype == mx.float32  # type: ignore[attr-defined]


def test_without_native_kernels_blocks_become_what_mlx_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = as_q4_k_m(tiny_model("llama"))
    folder = converted(model, tmp_path)
    expected = expected_logits(model, folder)
    monkeypatch.setattr(native, "available", lambda: False)
    adapter = load(folder, CPU)
    assert not any(weights.is_block(module) for _, module in adapter.model.named_modules())
    np.testing.assert_allclose(logits(adapter), expected, atol=0.01 * np.abs(expected).max())


def test_a_module_that_the_model_does_not_have_is_an_error(tmp_path: Path) -> None:
    from ingot.errors import ModelError

    folder = converted(tiny_model("llama", kinds=[Kind.Q4_K]), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["gguf_blocks"]["model.layers.9.mlp.up_proj"] = "Q4_K"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="up_proj"):
        load(folder, CPU)
