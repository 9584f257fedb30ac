"""Weights that stay in their GGUF file, against what converting it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.cache_key import model_digest
from ingot.models.files.gguf_files import REFERENCES_FILE, GgufSourceFile, references_in, weight_bytes, write_references
from ingot.models.files.progress import no_progress
from ingot.models.gguf import weights
from ingot.models.gguf import weights as in_place
from ingot.models.gguf.importer import KINDS_THAT_STAY, convert_gguf
from ingot.models.gguf.quant_types import BLOCK_BITS
from ingot.models.layers.modules import PackedEmbedding, PackedLinear, named_parameters
from ingot.models.memory_needs import memory_needs
from tests.engines import GPU
from tests.launches import prompt_logits
from tests.models.gguf.making import TinyModel, as_q4_k_m, random_rows, tiny_model
from tests.models.gguf.test_importer import TOKENS, converted, expected_logits
from tests.models.gguf.test_moe_architectures import HIDDEN, as_gguf, original

pytestmark = pytest.mark.usefixtures("rules")

CPU = Device("cpu", "a CPU", 1 << 34)
NATIVE = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
READERS = pytest.mark.parametrize(
    "lazy", [pytest.param(True, marks=[NATIVE, pytest.mark.cpus]), False], ids=["lazily", "at once"]
)


def both(model: TinyModel, folder: Path) -> tuple[Path, Path]:
    """The model's file converted, and used in place."""
    source = model.write(folder / "tiny.gguf")
    made = []
    for name, stays in (("whole", False), ("in place", True)):
        (folder / name).mkdir()
        convert_gguf(source, folder / name, no_progress, in_place=stays)
        made.append(folder / name)
    return made[0], made[1]


def tensors(folder: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    elsewhere = references_in(folder)
    return loaded if elsewhere is None else loaded | in_place.read_referenced_tensors(elsewhere)


def same(whole: dict[str, mx.array], found: dict[str, mx.array]) -> None:
    assert whole.keys() == found.keys()
    for name, array in whole.items():
        assert (array.shape, array.dtype) == (found[name].shape, found[name].dtype), name
        assert mx.array_equal(array, found[name]).item(), name


@READERS
@pytest.mark.parametrize("kind", sorted(KINDS_THAT_STAY), ids=lambda kind: kind.name)
def test_tensors_of_each_format_are_what_converting_writes(
    kind: Kind, lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not lazy:
        monkeypatch.setattr(native, "gguf_file", lambda *given: None)
    # Llama's queries and keys come in another order of rows than models have them.
    whole, placed = both(tiny_model("llama", kinds=[kind]), tmp_path)
    same(tensors(whole), tensors(placed))
    assert (placed / "config.json").read_bytes() == (whole / "config.json").read_bytes()


@READERS
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_tensors_of_mixtures_are_what_converting_writes(
    family: str, apart: bool, lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not lazy:
        monkeypatch.setattr(native, "gguf_file", lambda *given: None)
    model = as_gguf(family, *original(family, tmp_path / "original"), Kind.Q8_0)
    if apart:  # as older files have them
        for name, (stored, shape, raw) in list(model.tensors.items()):
            if "_exps" in name and name.endswith("weight"):
                del model.tensors[name]
                for number in range(shape[0]):
                    model.tensors[name.replace("_exps", f".{number}")] = (stored, shape[1:], raw[number])
    whole, placed = both(model, tmp_path)
    same(tensors(whole), tensors(placed))


def test_a_file_with_a_head_that_guesses_further_tokens_is_converted_whole(tmp_path: Path) -> None:
    config, weights = original("glm4_moe", tmp_path / "original", num_hidden_layers=3)
    model = as_gguf("glm4_moe", config, weights, nextn_predict_layers=1)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        model.tensors[f"blk.2.nextn.{name}.weight"] = (Kind.F32, (HIDDEN,), np.ones(HIDDEN, np.float32))
    joint = np.ones((HIDDEN, 2 * HIDDEN), np.float32)
    model.tensors["blk.2.nextn.eh_proj.weight"] = (Kind.F32, joint.shape, joint)
    assert references_in(both(model, tmp_path)[1]) is None


@pytest.mark.cpus
@NATIVE
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_a_model_with_a_large_vocabulary_takes_a_tenth_more_than_its_file_at_most_and_stores_no_weights(
    architecture: str, tmp_path: Path
) -> None:
    model = tiny_model(architecture, kinds=[Kind.Q8_0, Kind.Q5_0, Kind.Q4_K], tied=True)
    whole, placed = both(model, tmp_path)
    weights = sum(raw.nbytes for _, _, raw in model.tensors.values())
    adapter = load_model_adapter(placed, CPU)
    assert adapter.weight_bytes <= 1.1 * weights
    vectors = sum(raw.nbytes for _, shape, raw in model.tensors.values() if len(shape) == 1)
    assert (placed / "model.safetensors").stat().st_size <= vectors + 64 * 1024
    assert weight_bytes(placed) >= weights
    changed, stored = memory_needs(placed, CPU), memory_needs(whole, CPU)
    assert changed is not None and changed == stored and adapter.weight_bytes <= changed.weights
    assert np.array_equal(prompt_logits(adapter, TOKENS), prompt_logits(load_model_adapter(whole, CPU), TOKENS))


def test_on_gpus_it_computes_what_the_converted_model_computes(tmp_path: Path) -> None:
    whole, placed = both(as_q4_k_m(tiny_model("qwen3")), tmp_path)
    same(*(dict(named_parameters(load_model_adapter(folder, GPU).model)) for folder in (whole, placed)))


def opened(path: Path) -> int:
    there = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    maps = Path("/proc/self/maps").read_text()
    return there.count(str(path)) + maps.count(str(path))


@pytest.mark.cpus
@NATIVE
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell which files are open")
def test_a_loaded_model_has_its_file_neither_open_nor_mapped(tmp_path: Path) -> None:
    _, placed = both(tiny_model("llama", kinds=[Kind.Q8_0]), tmp_path)
    file = (tmp_path / "tiny.gguf").resolve()
    adapter = load_model_adapter(placed, CPU)
    native.linear(mx.zeros((1, 1)), native.plain_weights(mx.zeros((1, 1)), None))  # lets go of what is done with
    assert opened(file) == 0
    before = np.array(prompt_logits(adapter, TOKENS))
    file.write_bytes(b"")
    assert np.array_equal(before, prompt_logits(adapter, TOKENS))


@pytest.mark.cpus
@NATIVE
def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_in_words(tmp_path: Path) -> None:
    _, placed = both(tiny_model("llama", kinds=[Kind.Q8_0]), tmp_path)
    found = tensors(placed)
    os.truncate(tmp_path / "tiny.gguf", 4096)
    with pytest.raises(RuntimeError, match=r"tiny\.gguf was changed"):
        mx.eval(found)


@pytest.mark.parametrize("harm", ["gone", "short", "touched"])
def test_a_file_that_is_not_as_it_was_is_named(harm: str, tmp_path: Path) -> None:
    _, placed = both(tiny_model("llama", kinds=[Kind.Q8_0]), tmp_path)
    file = tmp_path / "tiny.gguf"
    if harm == "gone":
        file.unlink()
    elif harm == "short":
        os.truncate(file, 4096)
    else:
        os.utime(file, ns=(1, 1))
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        load_model_adapter(placed, CPU)


@READERS
def test_references_lead_to_gguf_files_alone(lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not lazy:
        monkeypatch.setattr(native, "gguf_file", lambda *given: None)
    _, placed = both(tiny_model("llama", kinds=[Kind.Q8_0]), tmp_path)
    references = references_in(placed)
    assert references is not None
    file = tmp_path / "secret"
    file.write_bytes(bytes(references.files[0].size))
    status = file.stat()
    changed = msgspec.structs.replace(
        references, files=(GgufSourceFile(str(file), status.st_size, status.st_mtime_ns),)
    )
    with pytest.raises(ModelError, match="no GGUF file"):
        in_place.read_referenced_tensors(changed)
    changed = msgspec.structs.replace(references, files=(GgufSourceFile(os.devnull, 0, 0),))
    with pytest.raises(ModelError, match="no regular file"):
        in_place.read_referenced_tensors(changed)


@READERS
@pytest.mark.parametrize(
    "change",
    [{"kind": "Q9_9"}, {"pieces": ()}, {"pieces": ((7, 0),)}, {"shape": (0, 32)}, {"pieces": ((0, 1 << 40),)}],
    ids=str,
)
def test_references_to_what_is_not_there_are_refused(
    change: dict[str, Any], lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not lazy:
        monkeypatch.setattr(native, "gguf_file", lambda *given: None)
    _, placed = both(tiny_model("llama", kinds=[Kind.Q8_0]), tmp_path)
    references = references_in(placed)
    assert references is not None
    name, tensor = next(iter(references.tensors.items()))
    references.tensors[name] = msgspec.structs.replace(tensor, **change)
    write_references(placed, references)
    with pytest.raises(ModelError, match=r"cannot be (loaded|read)"):
        load_model_adapter(placed, CPU)


@pytest.mark.parametrize("change", [b"{}", b"[", b'{"files": [], "tensors": {"a": 1}}'])
def test_references_that_say_nothing_are_refused(change: bytes, tmp_path: Path) -> None:
    (tmp_path / REFERENCES_FILE).write_bytes(change)
    with pytest.raises(ModelError, match=REFERENCES_FILE):
        references_in(tmp_path)


@pytest.mark.parametrize(
    "kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q6_K, Kind.F16, Kind.BF16, Kind.F32], ids=lambda kind: kind.name
)
def test_numbers_that_are_not_finite_are_found_before_they_are_used(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("qwen3", kinds=[kind])
    name = "blk.0.ffn_up.weight"
    own, shape, raw = model.tensors[name]
    assert own == kind
    harmed = raw.copy()
    harmed[0] = 0xFF
    model.tensors[name] = (own, shape, harmed)
    source = model.write(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=r"ffn_up\.weight.*not finite"):
        convert_gguf(source, tmp_path, no_progress, in_place=True)


def test_scales_whose_biases_overflow_16_bits_are_converted(tmp_path: Path) -> None:
    model = tiny_model("qwen3", kinds=[Kind.Q8_0])
    name = "blk.0.ffn_up.weight"
    kind, shape, raw = model.tensors[name]
    huge = raw.copy()
    huge[0, :2] = np.array([1000.0], np.float16).view(np.uint8)
    model.tensors[name] = (kind, shape, huge)
    whole, placed = both(model, tmp_path)
    references = references_in(placed)
    assert references is not None and "model.layers.0.mlp.up_proj.weight" not in references.tensors
    same(tensors(whole), tensors(placed))


def test_what_a_model_is_depends_on_the_bytes_of_its_file(tmp_path: Path) -> None:
    folders = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        folders.append(both(tiny_model("llama", kinds=[Kind.Q8_0], seed=seed), tmp_path / str(seed))[1])
    for folder in folders:  # all but the referenced bytes is the same
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_bytes((folders[0] / name).read_bytes())
    assert model_digest(folders[0]) != model_digest(folders[1])


def test_references_are_read_as_they_were_written(tmp_path: Path) -> None:
    _, placed = both(tiny_model("llama"), tmp_path)
    references = references_in(placed)
    assert references is not None
    write_references(tmp_path, references)
    assert references_in(tmp_path) == references


KINDS = pytest.mark.parametrize("kind", sorted(BLOCK_BITS), ids=lambda kind: kind.name)
GPU_GROWTH = 1.3
"""How much more than in its file a Q4_K_M model takes in MLX's forms: 5 bits for 4.5, and 9 for 6.6."""


def file_bytes(model: TinyModel) -> int:
    return sum(raw.nbytes for _, _, raw in model.tensors.values())


def logits(adapter: ModelAdapter) -> np.ndarray:
    return np.array(prompt_logits(adapter, TOKENS).astype(mx.float32))


def layer(kind: Kind, rows: int = 40, columns: int = 512, *, cls: type = nn.Linear) -> tuple[Any, np.ndarray]:
    """A layer of random blocks, and its weights."""
    raw = random_rows(np.random.default_rng(kind), kind, rows, columns)
    given = nn.Linear(columns, rows, bias=False) if cls is nn.Linear else nn.Embedding(rows, columns)
    block_layer = {nn.Linear: weights.BlockLinear, nn.Embedding: weights.BlockEmbedding}[cls](given, kind)
    assert block_layer.weight.shape == raw.shape
    block_layer.weight = mx.array(raw)
    return block_layer, dequantize(raw, kind)


def unpacked(module: Any) -> np.ndarray:
    return np.array(mx.dequantize(module.weight, module.scales, module.biases, 32, module.bits).astype(mx.float32))


@pytest.mark.cpus
@NATIVE
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_q4_k_m_file_takes_as_much_memory_as_in_the_file_and_a_tenth_at_most(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    model = as_q4_k_m(tiny_model(architecture, tied=tied))
    adapter = load_model_adapter(converted(model, tmp_path), CPU)
    assert adapter.weight_bytes <= 1.1 * file_bytes(model)
    head = adapter.model.model.embed_tokens if tied else adapter.model.lm_head
    assert isinstance(head, PackedEmbedding if tied else PackedLinear) and head.mode == "Q6_K"


@pytest.mark.cpus
@NATIVE
@KINDS
def test_a_model_of_each_format_takes_as_much_memory_and_a_tenth_at_most(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("llama", kinds=[kind])
    assert load_model_adapter(converted(model, tmp_path), CPU).weight_bytes <= 1.1 * file_bytes(model)


@pytest.mark.cpus
@NATIVE
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_q4_k_m_model_computes_what_its_dense_weights_compute(architecture: str, tmp_path: Path) -> None:
    model = as_q4_k_m(tiny_model(architecture))
    folder = converted(model, tmp_path)
    expected = expected_logits(model, folder)
    for adapter, bound in (
        (load_model_adapter(folder, CPU), 0.04),
        (load_model_adapter(folder, CPU, dtype="float32"), 1e-4),
    ):
        assert np.linalg.norm(logits(adapter) - expected) <= bound * np.linalg.norm(expected)
        assert repr(adapter.model)


def test_on_gpus_a_q4_k_m_model_is_in_mlx_forms_with_factors_of_16_bits(tmp_path: Path) -> None:
    model = as_q4_k_m(tiny_model("qwen3", tied=False))
    adapter = load_model_adapter(converted(model, tmp_path), GPU)
    assert {array.dtype for _, array in named_parameters(adapter.model)} == {mx.uint32, mx.bfloat16}
    assert adapter.weight_bytes <= GPU_GROWTH * file_bytes(model)
    widths = {path: module.bits for path, module in adapter.model.named_modules() if hasattr(module, "bits")}
    assert set(widths.values()) == {4, 8}


@KINDS
def test_in_affine_form_weights_are_off_by_little(kind: Kind) -> None:
    block_layer, values = layer(kind)
    for dtype, rounding in ((mx.float16, 2.0**-11), (mx.bfloat16, 2.0**-8)):
        found = unpacked(weights.affine_layer(block_layer, dtype))
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
    block_layer, values = layer(Kind.Q2_K)
    found = unpacked(weights.affine_layer(block_layer, mx.float16))
    groups = values.reshape(-1, 32)
    below = groups.max(axis=1) < 0
    assert below.any() and np.concatenate(given).max(axis=1).min() >= 0
    off = np.abs(found.reshape(-1, 32) - groups).max(axis=1)
    assert np.all((off <= 1.5 * np.ptp(groups, axis=1) / 14 + 2e-3 * np.abs(groups).max(axis=1))[below])


@KINDS
def test_in_exact_form_weights_are_what_they_were(kind: Kind) -> None:
    block_layer, values = layer(kind)
    made: Any = weights.exact_layer(block_layer, mx.float32)
    found = unpacked(made) if "scales" in made else np.array(made.weight)
    np.testing.assert_allclose(found, values, rtol=0, atol=np.abs(values).max() * 2**-22)


def test_plain_numbers_that_overflow_float16_are_float32() -> None:
    block_layer, _ = layer(Kind.Q6_K)
    raw = np.array(block_layer.weight)
    raw[0, 208:210] = np.array([1000.0], np.float16).view(np.uint8)
    block_layer.weight = mx.array(raw)
    assert weights.exact_layer(block_layer, mx.float16).weight.dtype == mx.float32  # type: ignore[attr-defined]


def test_without_native_kernels_blocks_become_what_mlx_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = as_q4_k_m(tiny_model("llama"))
    folder = converted(model, tmp_path)
    expected = expected_logits(model, folder)
    monkeypatch.setattr(native, "available", lambda: False)
    adapter = load_model_adapter(folder, CPU)
    assert not any(weights.is_block_layer(module) for _, module in adapter.model.named_modules())
    np.testing.assert_allclose(logits(adapter), expected, atol=0.01 * np.abs(expected).max())


def test_a_module_that_the_model_does_not_have_is_an_error(tmp_path: Path) -> None:
    from ingot.errors import ModelError

    folder = converted(tiny_model("llama", kinds=[Kind.Q4_K]), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["gguf_blocks"]["model.layers.9.mlp.up_proj"] = "Q4_K"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="up_proj"):
        load_model_adapter(folder, CPU)
