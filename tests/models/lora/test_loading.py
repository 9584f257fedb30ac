"""Adapters beside models: what mlx-lm computes with its own layers for them, alone and beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ingot.cache.forward_batch import ForwardPart
from ingot.engine.admission import load_lora
from ingot.kernels.cpu import native
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.precision import settle_precision
from ingot.upstream import import_upstream
from tests import engines, tiny
from tests.models.lora.made import matrices, shapes, write_mlx, write_peft

EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RECURRENT = ("in_proj_qkv", "in_proj_z", "out_proj")
KINDS = ("llama", "tied", "window", "hybrid", "mixed", "moe")
METAL = Device("metal", "a CPU that follows Metal's rules", 1 << 34)
PROMPT = (5, 17, 3, 60, 22, 9, 41)


def loaded(kind: str, device: Device | None = None) -> ModelAdapter:
    native.use_one_path()
    model, here = tiny.build(kind), device or current_device()
    settle_precision(model, here, None)
    return adapt_model(model, tiny.CONFIGS[kind], here)


MXFP4 = {
    **{"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "class_predicate": lambda path, module: "_proj" in path and hasattr(module, "to_quantized"),
}
"""Of layers alone: MLX looks such embeddings up in bfloat16."""


def written(folder: Path, kind: str, seed: int, rank: int = 4, names: tuple[str, ...] = EVERYWHERE) -> Path:
    wanted = names if kind != "hybrid" else (*names, *RECURRENT)
    sizes = {path: size for path, size in shapes(tiny.build(kind), wanted).items() if ".switch_mlp." not in path}
    return write_mlx(folder, matrices(sizes, rank, seed), rank=rank)


def theirs(kind: str, folder: Path | None) -> mx.array:
    """mlx-lm's own logits of the prompt."""
    model = tiny.build(kind)
    if folder is not None:
        weights: Any = mx.load(str(folder / "adapters.safetensors"))
        keys = {path.rsplit(".lora_", 1)[0] for path in weights}
        relative = {path.split(".", 3)[3] if path.startswith("model.layers") else path for path in keys}
        rank = min(next(iter(weights.values())).shape)
        import_upstream("mlx_lm.tuner.utils").linear_to_lora_layers(
            model, -1, {"rank": rank, "scale": 0.05, "dropout": 0.0, "keys": relative}
        )
        model.load_weights(list(weights.items()), strict=False)
        model.eval()
    logits: mx.array = model(mx.array([PROMPT]))[0]
    return logits


def ours(model: ModelAdapter, slots: list[int]) -> list[mx.array]:
    """Logits of the prompt, in pieces, of rows with these slots side by side."""
    rows = model.new_batch_state()
    made = [rows.new(lora=slot) for slot in slots]
    found: list[list[mx.array]] = [[] for _ in slots]
    for begin, end in ((0, 4), (4, 5), (5, 7)):
        width, tokens = end - begin, PROMPT[begin:end]
        parts = [ForwardPart((row,), width) for row in made] if width > 1 else [ForwardPart(tuple(made), 1)]
        groups = [[part] for part in parts] if not model.mixed else [parts]
        logits = []
        for group in groups:
            given = mx.array([token for part in group for _ in part.rows for token in tokens], mx.uint32)
            logits.append(model.run(rows, given, group))
            mx.eval(logits, rows.pending())
        for number, own in enumerate(mx.split(mx.concatenate(logits), len(slots))):
            found[number].append(own)
    return [mx.concatenate(each) for each in found]


def off(found: mx.array, wanted: mx.array) -> float:
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    return float(mx.abs(found - wanted).max() / mx.abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_an_adapter_says_what_mlx_lm_says_with_it(kind: str, tmp_path: Path) -> None:
    model, folder = loaded(kind), written(tmp_path / "one", kind, 1)
    bare = ours(model, [0])[0]
    slot = model.loras.slot(load_lora(model, folder, most_rank=8).digest)
    wanted = theirs(kind, folder)
    assert off(wanted, theirs(kind, None)) > 0.1, "the adapter changes next to nothing"
    assert off(ours(model, [slot])[0], wanted) < 0.02
    assert mx.array_equal(ours(model, [0])[0], bare), "without it, the model is what it was"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_different_adapters_are_computed_as_each_alone(kind: str, tmp_path: Path) -> None:
    model = loaded(kind)
    folders = [written(tmp_path / str(seed), kind, seed, rank) for seed, rank in ((1, 4), (2, 7), (3, 16))]
    slots = [model.loras.slot(load_lora(model, folder, most_rank=16).digest) for folder in folders]
    assert slots == [1, 2, 3]
    order = [slots[1], slots[0], slots[1], slots[2]]
    alone = {slot: ours(model, [slot])[0] for slot in slots}
    for slot, found in zip(order, ours(model, order), strict=True):
        assert off(found, alone[slot]) < 1e-5
        # What MLX convolves is rounded otherwise beside others, with adapters or without; what GPUs multiply, too.
        assert mx.array_equal(found, alone[slot]) or kind == "mixed" or model.device.kind != "cpu"


@pytest.mark.parametrize(
    "kind, device",
    [
        *(("kernel-packed", engines.GPU), ("kernel-mxfp4", engines.GPU), ("kernel-hybrid", engines.GPU)),
        *(("moe", engines.GPU), ("kernel-window", METAL)),
    ],
    ids=["graph", "mxfp4", "recurrent", "experts", "metal"],
)
def test_so_they_are_by_a_gpus_rules(
    kind: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.CONFIGS, "kernel-mxfp4", {**tiny.CONFIGS["kernel-packed"], "quantization": MXFP4})
    model = loaded(kind, device)
    assert not any("kernel by kernel" in note for note in model.notes) or kind in ("moe", "kernel-hybrid")
    bare = ours(model, [0, 0])[0]
    names = ("q_proj", "v_proj", "up_proj", "down_proj", "o_proj")
    folders = [written(tmp_path / str(seed), kind, seed, rank, names) for seed, rank in ((1, 4), (2, 7))]
    one, two = (model.loras.slot(load_lora(model, folder, most_rank=16).digest) for folder in folders)
    found = ours(model, [one, two, 0, one])
    for slot, own in zip((one, two, 0, one), found, strict=True):
        assert off(own, ours(model, [slot])[0]) < 0.02
    assert off(found[0], theirs(kind, folders[0])) < 0.03
    assert off(found[1], theirs(kind, folders[1])) < 0.03
    assert mx.array_equal(ours(model, [0, 0])[0], bare)


def test_it_is_the_same_in_pefts_form(tmp_path: Path) -> None:
    model, made = loaded("llama"), matrices(shapes(tiny.build("llama"), EVERYWHERE), 4, 1)
    forms = write_mlx(tmp_path / "mlx", made, rank=4, scale=0.1), write_peft(tmp_path / "peft", made, rank=4)
    one, two = (model.loras.slot(load_lora(model, form, most_rank=8).digest) for form in forms)
    assert one != two
    assert off(*(ours(model, [slot])[0] for slot in (one, two))) < 1e-6


def test_an_adapter_that_went_leaves_its_slot_and_its_bytes_to_others(tmp_path: Path) -> None:
    model = loaded("llama")
    folders = [written(tmp_path / str(seed), "llama", seed, 8) for seed in (1, 2)]
    bare, first = ours(model, [0])[0], load_lora(model, folders[0], most_rank=8)
    alone = ours(model, [model.loras.slot(first.digest)])[0]
    took, second = model.loras.nbytes, load_lora(model, folders[1], most_rank=8)
    assert took < model.loras.nbytes <= model.loras.most_bytes(2, 8)
    model.loras.drop(first.digest)
    assert model.loras.nbytes == took and first.digest not in model.loras
    beside = ours(model, [model.loras.slot(second.digest)])[0]
    again = load_lora(model, folders[0], most_rank=8)
    assert model.loras.slot(again.digest) == 1
    assert mx.array_equal(ours(model, [1])[0], alone)
    assert mx.array_equal(ours(model, [2])[0], beside)
    for digest in (first.digest, second.digest):
        model.loras.drop(digest)
    assert mx.array_equal(ours(model, [0])[0], bare)
