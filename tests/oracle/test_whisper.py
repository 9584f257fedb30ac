"""Whisper's modules against transformers' and mlx-audio's with the same random weights."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.device import current_device
from ingot.models.layers.modules import named_parameters
from ingot.models.whisper import load_whisper
from tests.models.test_whisper import FRAMES, STATED, folder_of, value_of
from tests.models.test_whisper_checkpoint import DIMS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

TOKENS = [1, 5, 9, 2, 30, 7]


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_of_mlx_audio_give_its_scores(tmp_path: Path, bits: int) -> None:
    whisper = pytest.importorskip("mlx_audio.stt.models.whisper.whisper")
    mx.random.seed(1)
    theirs = whisper.Model(whisper.ModelDimensions(**DIMS), mx.float32)
    theirs.update(tree_map(lambda held: 0.2 * mx.random.normal(held.shape), theirs.parameters()))
    packing = {"group_size": 32, "bits": bits}
    nn.quantize(theirs, **packing, class_predicate=lambda path, layer: isinstance(layer, nn.Linear | nn.Embedding))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(named_parameters(theirs)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper", **DIMS, "quantization": packing}))
    told = np.array(theirs.logits(mx.array([TOKENS]), theirs.embed_audio(mx.array(FRAMES)[None]))[0])
    ours = load_whisper(tmp_path, current_device(), dtype="float32")
    scores = ours.write(value_of(ours.encode(FRAMES))).push(TOKENS, range(len(TOKENS)))
    assert np.abs(scores - told).max() < 1e-3 * np.abs(told).max()


def test_scores_and_attention_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    folder = folder_of(tmp_path / "a")
    config = WhisperConfig(**STATED, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0)
    config._attn_implementation = "eager"
    theirs = WhisperForConditionalGeneration(config).eval()
    weights = {
        name: torch.from_numpy(np.array(each)) for name, each in mx.load(str(folder / "model.safetensors")).items()
    }
    theirs.load_state_dict(weights)
    with torch.no_grad():
        told = theirs(
            input_features=torch.from_numpy(FRAMES.T[None].copy()),
            decoder_input_ids=torch.tensor([TOKENS]),
            output_attentions=True,
        )
    ours = load_whisper(folder, current_device(), dtype="float32")
    heard = value_of(ours.encode(FRAMES))
    scores = ours.write(heard).push(TOKENS, range(len(TOKENS)))
    assert np.allclose(scores, told.logits[0].numpy(), atol=2e-3)
    looks = value_of(ours.write(heard).attention(TOKENS))
    shares = np.exp(looks - looks.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    for place, (layer, head) in enumerate(ours.config.alignment_heads):
        assert np.allclose(shares[place], told.cross_attentions[layer][0, head].numpy(), atol=1e-4)
