"""Models do without what was measured to be slower than MLX's own on the device."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from ingot.kernels import measured
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.cpu import native
from ingot.kernels.dense_matmul.kernels import DenseWeights
from ingot.kernels.device import Device, current_device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.measured import SlowerParts
from ingot.kernels.moe.kernels import RouterShape
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.decode_graph import decode_graphs_of
from ingot.models.layers.fused_layers import FusedLayers
from ingot.models.layers.gpu_linear import QuantizedKernelLinear
from ingot.models.layers.mlp import GatedMLP, JoinedMLP
from ingot.models.layers.modules import PackedLinear, measured_part
from ingot.models.layers.norms import NativeRMSNorm
from ingot.models.layers.recurrent import KernelRecurrence
from ingot.models.precision import settle_precision
from tests import tiny
from tests.engines import GPU

emulated = pytest.mark.skipif(not Emulator.available(), reason="kernels are emulated with g++")
with_native = pytest.mark.skipif(not native.available(), reason="needs the native kernels")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "measured.json"
    monkeypatch.setattr(measured, "MEASURED_FILE", found)
    monkeypatch.delenv(measured.MEASURED_VARIABLE, raising=False)
    return found


def loaded(kind: str, device: Device) -> ModelAdapter:
    model = tiny.build(kind)
    notes = settle_precision(model, device, None)
    return adapt_model(model, tiny.CONFIGS[kind], device, notes=notes)


def has(adapter: ModelAdapter, kind: type) -> bool:
    return any(isinstance(module, kind) for module in adapter.model.modules())


def notes_on(adapter: ModelAdapter, part: str) -> list[str]:
    return [note for note in adapter.notes if note.startswith(f"{part} by MLX's own operations: measured slower")]


@emulated
def test_attention_over_pages_is_left_out_by_the_size_of_heads() -> None:
    before = loaded("kernel-packed", GPU)
    [size] = {key[1].key_size for key in before.kernels._right} if before.kernels is not None else set()
    part = measured.attention_part(size)
    measured.remember(GPU, {part: 2.0, measured.attention_part(size + 1): 2.0})
    after = loaded("kernel-packed", GPU)
    assert len(notes_on(after, part)) == 1 and not notes_on(after, measured.attention_part(size + 1))
    assert decode_graphs_of(before.model) is not None
    assert after.kernels is not None and not after.kernels._right


@emulated
def test_packed_products_are_left_out_by_their_bits() -> None:
    assert has(loaded("kernel-packed", GPU), QuantizedKernelLinear)
    bits = int(tiny.CONFIGS["kernel-packed"]["quantization"]["bits"])
    measured.remember(GPU, {measured.packed_part(bits): 2.0})
    after = loaded("kernel-packed", GPU)
    assert not has(after, QuantizedKernelLinear) and notes_on(after, measured.packed_part(bits))


@emulated
def test_norms_and_rope_are_left_out_and_with_them_the_graph() -> None:
    measured.remember(GPU, {measured.ROPE: 2.0})
    after = loaded("kernel-packed", GPU)
    graphs = decode_graphs_of(after.model)
    assert notes_on(after, measured.ROPE) and (graphs is None or graphs.refusal is not None)


@emulated
def test_dense_products_are_left_out() -> None:
    weights = DenseWeights(mx.ones((32, 512), mx.bfloat16), None)
    assert CheckedKernels(GPU).dense.of(weights) is not None
    slower = SlowerParts({measured.DENSE: 2.0})
    assert CheckedKernels(GPU, slower).dense.of(weights) is None and len(slower.notes) == 1


@emulated
def test_prompts_alone_may_be_left_to_mlx() -> None:
    shape = AttentionShape(2, 1, 64, 64)
    slower = SlowerParts({measured.prompt_attention_part(64): 2.0})
    both, few = (CheckedKernels(GPU, each).attention(shape, mx.bfloat16) for each in (SlowerParts(), slower))
    assert both is not None and both.takes_prompts
    assert few is not None and not few.takes_prompts


@emulated
def test_the_choice_of_experts_is_left_out() -> None:
    slower = SlowerParts({measured.ROUTER: 2.0})
    shape = RouterShape(4, 2)
    assert CheckedKernels(GPU).moe.of(shape, mx.bfloat16, bias=None, eps=0, scale=1) is not None
    assert CheckedKernels(GPU, slower).moe.of(shape, mx.bfloat16, bias=None, eps=0, scale=1) is None


@emulated
def test_recurrent_mixers_are_left_out_by_their_kind() -> None:
    assert has(loaded("kernel-hybrid-packed", GPU), KernelRecurrence)
    measured.remember(GPU, {"gated delta nets": 2.0, "Mamba 2 mixers": 2.0, "short convolutions": 2.0})
    assert not has(loaded("kernel-hybrid-packed", GPU), KernelRecurrence)


@emulated
def test_decode_graphs_are_left_out_as_a_whole() -> None:
    graphed = loaded("kernel-packed", GPU)
    assert decode_graphs_of(graphed.model) is not None
    layers = len(graphed.model.layers)
    part = measured.steps_part(graphed.family, layers, measured.WHOLE_LAYERS["cuda"])
    measured.remember(GPU, {part: 1.2})
    after = loaded("kernel-packed", GPU)
    assert decode_graphs_of(after.model) is None and notes_on(after, part)
    assert has(after, JoinedMLP) and has(after, MixedAttention), "which are still ours"


@with_native
def test_native_layers_as_one_operation_are_left_out_as_a_whole() -> None:
    here = current_device()
    fused = loaded("llama", here)
    assert has(fused, FusedLayers)
    part = measured.steps_part(fused.family, len(fused.model.layers), measured.WHOLE_LAYERS["cpu"])
    measured.remember(here, {part: 2.0})
    after = loaded("llama", here)
    assert not has(after, FusedLayers) and notes_on(after, part)
    assert has(after, GatedMLP) and has(after, MixedAttention)


@with_native
def test_native_norms_and_products_are_left_out() -> None:
    here = current_device()
    assert has(loaded("moe", here), NativeRMSNorm)
    measured.remember(here, {measured.NATIVE_NORMS: 2.0})
    after = loaded("moe", here)
    assert not has(after, NativeRMSNorm) and notes_on(after, measured.NATIVE_NORMS)
    assert has(loaded("kernel-packed", here), PackedLinear)
    quantization = tiny.CONFIGS["kernel-packed"]["quantization"]
    part = measured.native_packed_part(int(quantization["bits"]), "affine")
    measured.remember(here, {part: 2.0})
    after = loaded("kernel-packed", here)
    assert not has(after, PackedLinear) and notes_on(after, part)


@with_native
def test_modules_of_a_class_and_size_are_left_out() -> None:
    here, model = current_device(), tiny.build("moe")
    mixer = model.layers[0].self_attn
    settle_precision(model, here, None)
    part = measured_part("attention", mixer)
    measured.remember(here, {part: 2.0, measured.steps_part("x", 1, "y"): 2.0})
    after = loaded("moe", here)
    assert not has(after, MixedAttention) and len(notes_on(after, part)) == 1


def test_a_damaged_file_is_one_note_and_leaves_nothing_out(file: Path) -> None:
    file.write_text("no JSON")
    after = loaded("llama", current_device())
    assert len([note for note in after.notes if "is ignored" in note]) == 1
