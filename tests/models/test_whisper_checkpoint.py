"""Whisper folders as MLX's converters write them: their names, and weights in few bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from ingot.errors import ModelError
from ingot.kernels.device import current_device
from ingot.media import worker
from ingot.media.audio import FloatArray
from ingot.models.layers.modules import named_parameters
from ingot.models.memory_needs import speech_to_text_needs
from ingot.models.whisper import Whisper, WhisperConfig, WhisperModel, load_whisper, sinusoids
from tests.models.test_whisper import FRAMES, value_of

DIMS = {
    **{"n_mels": 8, "n_audio_ctx": 1500, "n_audio_state": 64, "n_audio_head": 2, "n_audio_layer": 1},
    **{"n_vocab": 40, "n_text_ctx": 24, "n_text_state": 64, "n_text_head": 2, "n_text_layer": 2},
}
THEIRS = {
    "layers": "blocks",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "self_attn_layer_norm": "attn_ln",
    "final_layer_norm": "mlp_ln",
    "encoder_attn": "cross_attn",
    "self_attn": "attn",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "fc1": "mlp1",
    "fc2": "mlp2",
    "embed_tokens": "token_embedding",
}
TOKENS = [1, 5, 9, 2]


CONFIG = WhisperConfig(8, 1500, 64, 40, 24, 1, 2, 256, 2, 2, 256, ((1, 0), (1, 1)))
POSITIONS = "encoder.embed_positions.weight"


def mlx_name(name: str) -> str:
    for ours, theirs in (
        ("encoder.layer_norm.", "encoder.ln_post."),
        ("decoder.layer_norm.", "decoder.ln."),
        ("decoder.embed_positions.weight", "decoder.positional_embedding"),
    ):
        name = name.replace(ours, theirs)
    return ".".join(THEIRS.get(part, part) for part in name.split("."))


def random_model() -> WhisperModel:
    """The positions of a window are those that MLX's converters leave out."""
    model, draw = WhisperModel(CONFIG), np.random.default_rng(2)
    weights = {name: mx.array(draw.normal(0, 0.2, held.shape)) for name, held in named_parameters(model)}
    weights[POSITIONS] = sinusoids(CONFIG.positions, CONFIG.width)
    model.load_weights(list(weights.items()))
    return model


def packed_model(**form: Any) -> WhisperModel:
    model = random_model()
    nn.quantize(model, **form, class_predicate=lambda path, _: path.endswith(("_proj", "fc1", "fc2", "embed_tokens")))
    return model


def plain_bytes(model: WhisperModel) -> int:
    """Of what is always float32."""
    return sum(4 * held.size for name, held in named_parameters(model) if "positions" in name or "conv" in name)


def saved(folder: Path, model: WhisperModel, *, heads: list[list[int]] | None = None, **changes: Any) -> Path:
    folder.mkdir()
    weights = {mlx_name(name): held for name, held in named_parameters(model)}
    del weights[POSITIONS]
    for name in ("encoder.conv1.weight", "encoder.conv2.weight"):
        weights[name] = weights[name].swapaxes(1, 2)
    if heads is not None:
        weights["alignment_heads"] = mx.array(heads)
    mx.save_safetensors(str(folder / "weights.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper", **DIMS, **changes}))
    return folder


def scores(whisper: Whisper) -> FloatArray:
    return whisper.write(value_of(whisper.encode(FRAMES))).push(TOKENS, range(len(TOKENS)))


def test_names_of_mlx_are_those_of_the_same_model(tmp_path: Path) -> None:
    model = random_model()
    folder = saved(tmp_path / "a", model, heads=[[0, 1], [1, 0]])
    found = load_whisper(folder, current_device(), dtype="float32")
    assert np.allclose(scores(found), scores(Whisper(model, CONFIG)), atol=1e-3)
    assert found.config.alignment_heads == ((0, 1), (1, 0))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_few_bits_stay_so(tmp_path: Path, bits: int) -> None:
    form = {"group_size": 32, "bits": bits}
    model = packed_model(**form)
    folder = saved(tmp_path / "a", model, quantization=form)
    found = load_whisper(folder, current_device())
    theirs, held = scores(Whisper(model, CONFIG)), plain_bytes(random_model())
    assert np.abs(scores(found) - theirs).max() < 0.05 * np.abs(theirs).max()
    wide = sum(4 * each.size for _, each in named_parameters(random_model()))
    # Beside the bits a group has a scale and a bias, and norms are as wide as ever.
    assert found.weight_bytes - held < (bits + 3) / 32 * (wide - held)
    unpacking = worker.header_pool.memory + worker.audio_pool.memory
    needs = speech_to_text_needs(folder, current_device()) - found.window_bytes - unpacking
    assert found.weight_bytes <= needs < 1.02 * found.weight_bytes


@pytest.mark.parametrize(
    ("changes", "heads", "message"),
    [
        ({"n_text_layer": None}, None, "decoder_layers"),
        ({"quantization": {"bits": "four"}}, None, "a form that ingot supports"),
        ({}, [[7, 0]], "does not have"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], heads: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_whisper(saved(tmp_path / "a", random_model(), heads=heads, **changes), current_device())


def test_a_form_that_mlx_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", packed_model(group_size=32, bits=4), quantization={"group_size": 32, "bits": 7})
    with pytest.raises(ModelError, match="MLX does not support"):
        load_whisper(folder, current_device())
