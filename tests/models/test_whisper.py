"""Whisper's modules, small and random: the same numbers however the work is cut."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.errors import ModelError
from ingot.kernels.device import current_device
from ingot.models.layers.modules import named_parameters
from ingot.models.whisper import Whisper, WhisperConfig, WhisperModel, load_whisper

CONFIG = WhisperConfig(
    mels=8,
    positions=1500,
    width=16,
    vocab=40,
    context=24,
    encoder_layers=2,
    encoder_heads=2,
    encoder_inner=32,
    decoder_layers=2,
    decoder_heads=2,
    decoder_inner=32,
    alignment_heads=((1, 0), (1, 1)),
)
STATED = {
    "model_type": "whisper",
    **{"num_mel_bins": 8, "max_source_positions": 1500, "d_model": 16, "vocab_size": 40, "max_target_positions": 24},
    **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
    **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32},
}
FRAMES = np.random.default_rng(1).normal(size=(3000, 8)).astype(np.float32)


def random_model() -> WhisperModel:
    mx.random.seed(3)
    model = WhisperModel(CONFIG)
    model.load_weights([(name, 0.3 * mx.random.normal(weight.shape)) for name, weight in named_parameters(model)])
    return model


def value_of(work: Generator[None, None, Any]) -> Any:
    try:
        while True:
            next(work)
    except StopIteration as ended:
        return ended.value


def folder_of(target: Path, **changes: Any) -> Path:
    target.mkdir(exist_ok=True)
    weights = {f"model.{name}": weight for name, weight in named_parameters(random_model())}
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    (target / "config.json").write_text(json.dumps(STATED | changes))
    return target


def test_a_window_is_window_alike_however_its_rows_are_cut() -> None:
    model = random_model()
    whole = value_of(Whisper(model, CONFIG).encode(FRAMES))
    model.encoder._rows = 400
    parts = value_of(Whisper(model, CONFIG).encode(FRAMES))
    for (keys, values), (others, other_values) in zip(whole, parts, strict=True):
        assert mx.allclose(keys, others, atol=1e-5) and mx.allclose(values, other_values, atol=1e-5)


def test_tokens_score_the_same_one_by_one_and_at_once_and_after_going_back() -> None:
    whisper = Whisper(random_model(), CONFIG)
    window = value_of(whisper.encode(FRAMES))
    tokens = [1, 5, 9, 2, 30]
    at_once = whisper.write(window).push(tokens, range(len(tokens)))
    writing = whisper.write(window)
    one_by_one = np.concatenate([writing.push([token], [0]) for token in tokens])
    assert np.allclose(at_once, one_by_one, atol=1e-3)
    writing.length = 2
    assert np.allclose(writing.push(tokens[2:], [2])[0], at_once[-1], atol=1e-3)


def test_attention_scores_are_those_of_the_alignment_heads() -> None:
    whisper = Whisper(random_model(), CONFIG)
    window = value_of(whisper.encode(FRAMES))
    writing = whisper.write(window)
    writing.push([4, 4, 4], [])
    scores = value_of(writing.attention([1, 5, 9]))
    assert scores.shape == (2, 3, 1500)
    assert np.allclose(scores, value_of(whisper.write(window).attention([1, 5, 9])))


def test_a_folder_in_hugging_faces_form_is_loaded(tmp_path: Path) -> None:
    whisper = load_whisper(folder_of(tmp_path / "a"), current_device())
    assert asdict(whisper.config) == asdict(CONFIG)  # the upper half of the layers, where the files name no heads
    assert whisper.weight_bytes > 0 and whisper.window_bytes > 0
    scores = whisper.write(value_of(whisper.encode(FRAMES))).push([1, 5], [1])
    plain = Whisper(random_model(), CONFIG)
    assert np.allclose(scores, plain.write(value_of(plain.encode(FRAMES))).push([1, 5], [1]), atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "Whisper model"),
        ({"d_model": 32}, "do not fit its config"),
        ({"decoder_layers": 3}, "missing"),
        ({"vocab_size": None}, "vocab_size"),
        ({"max_source_positions": 750}, "windows have 1500"),
        ({"quantization": {"mode": "gptq"}}, "a form that ingot supports"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_whisper(folder_of(tmp_path / "a", **changes), current_device())


def test_heads_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a")
    for named, message in (([[7, 0]], "does not have"), (["x"], "no pairs")):
        (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": named}))
        with pytest.raises(ModelError, match=message):
            WhisperConfig.read(folder)
