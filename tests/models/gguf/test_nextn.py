"""GLM's head in a GGUF file: imported with the model, and computes what it computed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import load_model_adapter
from ingot.models.draft_heads.checkpoint import find_head
from ingot.models.draft_heads.mtp import draft_head_rows, load_mtp_head
from ingot.models.probe import logits_gap
from tests.engines import GPU
from tests.models.gguf import published
from tests.models.gguf.making import TinyModel, random_rows
from tests.models.gguf.published import random_model
from tests.models.gguf.test_moe_architectures import HIDDEN, TOKENS, as_gguf, imported, original

mx = pytest.importorskip("mlx.core")

NORMS = {"enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}


def as_both(kind: Kind, folder: Path) -> tuple[TinyModel, Path]:
    """The same model of two layers and a head: as a GGUF file, and as a folder with weights of the same values."""
    config, weights = original("glm4_moe", folder / "three", num_hidden_layers=3)
    model = as_gguf("glm4_moe", config, weights, nextn_predict_layers=1)
    rng = np.random.default_rng(3)
    for source, target in NORMS.items():
        weights[f"model.layers.2.{target}.weight"] = norm = rng.normal(1, 0.1, HIDDEN).astype(np.float32)
        model.tensors[f"blk.2.nextn.{source}.weight"] = (Kind.F32, norm.shape, norm)
    shape = (HIDDEN, 2 * HIDDEN)
    raw = random_rows(rng, kind, *shape, 0.08)
    model.tensors["blk.2.nextn.eh_proj.weight"] = (kind, shape, raw)
    weights["model.layers.2.eh_proj.weight"] = dequantize(raw, kind).reshape(shape)
    plain = folder / "plain"
    plain.mkdir()
    mx.save_safetensors(str(plain / "model.safetensors"), {name: mx.array(array) for name, array in weights.items()})
    (plain / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    return model, plain


def drafts(folder: Path, device: Device) -> mx.array:
    """Logits of the head over a prompt, whose hidden states the model computed."""
    adapter = load_model_adapter(folder, device)
    source = find_head(folder, adapter.config)
    assert source is not None
    head = load_mtp_head(source, adapter)
    rows = adapter.new_batch_state()
    _, hidden = adapter.run(rows, mx.array(TOKENS), [ForwardPart((rows.new(),), len(TOKENS))], hidden=True)
    mx.eval(hidden, rows.pending())  # before the rows go
    own = draft_head_rows(head, adapter)
    with own.launch([ForwardPart((own.new(),), len(TOKENS) - 1)]) as layers:
        logits = head.logits(head(hidden[None, :-1], mx.array([TOKENS[1:]]), layers[0]))[0]
        mx.eval(logits)
    return logits


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q6_K], ids=lambda kind: kind.name)
def test_a_head_is_imported_with_its_model(kind: Kind, tmp_path: Path) -> None:
    model, plain = as_both(kind, tmp_path)
    folder = imported(model, tmp_path)
    assert logits_gap(drafts(folder, current_device()), drafts(plain, current_device())) < 0.03


def test_blocks_of_a_head_run_on_a_gpu_in_the_models_format(tmp_path: Path) -> None:
    model, plain = as_both(Kind.Q6_K, tmp_path)
    folder = imported(model, tmp_path)
    found = drafts(folder, GPU)
    assert found.dtype == mx.float32
    assert logits_gap(found, drafts(plain, GPU)) < 0.03


def test_what_repeats_the_models_tensors_is_not_imported(tmp_path: Path) -> None:
    model, plain = as_both(Kind.F32, tmp_path)
    for name in ("embed_tokens", "shared_head_head"):
        model.tensors[f"blk.2.nextn.{name}.weight"] = model.tensors["token_embd.weight"]
    folder = imported(model, tmp_path)
    assert logits_gap(drafts(folder, current_device()), drafts(plain, current_device())) < 0.03
    source = find_head(folder, json.loads((folder / "config.json").read_text()))
    assert source is not None
    assert not any("embed" in name or "shared_head.head" in name for name in source.tensors)


def test_a_head_that_lacks_a_tensor_is_left_out_and_the_model_is_not(tmp_path: Path) -> None:
    model, _ = as_both(Kind.F32, tmp_path)
    del model.tensors["blk.2.nextn.hnorm.weight"]
    folder = imported(model, tmp_path)
    adapter = load_model_adapter(folder, current_device())
    assert find_head(folder, adapter.config) is None


def test_packed_experts_of_a_head_stay_packed(tmp_path: Path) -> None:
    model, _ = as_both(Kind.Q8_0, tmp_path)
    for name, (kind, shape, raw) in list(model.tensors.items()):
        if name.startswith("blk.2.ffn_up_exps") or name.startswith("blk.2.attn_q.weight"):
            values = raw.view(np.float32).reshape(shape)
            model.tensors[name] = (Kind.Q8_0, shape, quantize(values, Kind.Q8_0))
            assert kind == Kind.F32
    folder = imported(model, tmp_path)
    stored = mx.load(str(folder / "model.safetensors"))
    assert stored["model.layers.2.mlp.switch_mlp.up_proj.weight"].dtype == mx.uint32
    assert np.isfinite(np.array(drafts(folder, current_device()).astype(mx.float32))).all()


def test_the_head_of_a_hybrid_is_imported_by_the_names_that_it_was_published_with(tmp_path: Path) -> None:
    config, weights = random_model("qwen3_5", tmp_path / "plain")
    rng, prefix = np.random.default_rng(3), "language_model.model.layers.3."
    head = {name.replace(prefix, "mtp.layers.0."): array for name, array in weights.items() if name.startswith(prefix)}
    hidden = config["hidden_size"]
    shapes = {"fc": (hidden, 2 * hidden), "norm": (hidden,)}
    shapes |= dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden"), (hidden,))
    for name, shape in shapes.items():
        head[f"mtp.{name}.weight"] = rng.normal(len(shape) == 1, 0.1, shape).astype(np.float32)
    model = published.as_gguf("qwen3_5", config, weights, lambda name: Kind.F32)
    model.metadata |= {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    for name in list(model.tensors):
        if name.startswith("blk.3."):
            model.tensors[name.replace("blk.3.", "blk.4.")] = model.tensors[name]
    parts = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head_norm",
    }
    for ours, theirs in parts.items():
        array = head[f"mtp.{ours}.weight"]
        model.tensors[f"blk.4.nextn.{theirs}.weight"] = (Kind.F32, array.shape, array)
    stored = {name: mx.array(array) for name, array in (weights | head).items()}
    mx.save_safetensors(str(tmp_path / "plain" / "model.safetensors"), stored)
    gap = logits_gap(drafts(imported(model, tmp_path), current_device()), drafts(tmp_path / "plain", current_device()))
    assert gap < 0.03
