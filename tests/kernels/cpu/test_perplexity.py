"""What rounding activations costs the default model: next to nothing."""

from __future__ import annotations

import lzma
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import DEFAULT_MODEL, Settings
from ingot.kernels.cpu import native
from ingot.kernels.device import current_device
from ingot.models import adapter
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.precision import dequantize_layers
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.upstream import load_model
from tests.launches import prompt_logits

TOKENS = 128
TEXT = Path(__file__).parents[3] / "foundry" / "held_out.txt.xz"

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")


def perplexity(logits: mx.array, tokens: list[int]) -> float:
    targets = mx.array(tokens[1:])[:, None]
    logprobs = logits[:-1] - mx.logsumexp(logits[:-1], axis=-1, keepdims=True)
    return math.exp(-mx.mean(mx.take_along_axis(logprobs, targets, axis=-1)).item())


def test_the_default_model_is_as_sure_of_a_text_as_in_plain_float32() -> None:
    native.use_one_path(False)  # as it is served, whatever ran before in this process
    folder = ensure_packaged_model(DEFAULT_MODEL, Settings(), lambda *said: None)
    text = lzma.decompress(TEXT.read_bytes()).decode()
    tokens = Tokenizer.load(folder).encode(text[:4000], add_special=False)[:TOKENS]
    ours = adapter.load_model_adapter(folder, current_device())
    logits = prompt_logits(ours, tokens)
    plain: Any
    plain, _ = load_model(folder)
    dequantize_layers(plain)
    plain.set_dtype(mx.float32)
    exact = perplexity(plain(mx.array([tokens]))[0], tokens)
    assert perplexity(logits, tokens) == pytest.approx(exact, rel=0.005)
    assert exact < 100  # or the text says nothing about the model
