"""The default model as it is served, against transformers with the same weights, unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import DEFAULT_MODEL, Settings
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Request, Sampling, Stop, TextDelta
from ingot.kernels.device import current_device
from ingot.models.adapter import adapt_model
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import no_progress
from ingot.models.precision import dequantize_layers
from ingot.models.probe import logits_gap
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.upstream import load_model
from tests.engines import answer
from tests.launches import computed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

SETTINGS = Settings(memory="3GB", context=1024)
GENERATED = 24
NEARLY_AS_GOOD = 0.25  # in logits


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_packaged_model(DEFAULT_MODEL, SETTINGS, no_progress)


@pytest.fixture(scope="module")
def unpacked(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    model, config = load_model(folder)
    dequantize_layers(model)
    model.set_dtype(mx.float32)
    return model, config


@pytest.fixture(scope="module")
def oracle(unpacked: tuple[nn.Module, dict[str, Any]]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model, config = unpacked
    made = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in config.items() if "quantization" not in key}))
    weights = {name: torch.from_numpy(np.array(weight)) for name, weight in tree_flatten(model.parameters())}
    missing, unexpected = made.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    made.tie_weights()
    return made.eval()


@pytest.fixture(scope="module")
def prompt(folder: Path) -> list[int]:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.template is not None
    text = tokenizer.template.render([{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}])
    return tokenizer.encode(text, add_special=False)


def test_its_logits_over_a_cut_prompt_are_those_of_transformers(
    unpacked: tuple[nn.Module, dict[str, Any]], oracle: Any, prompt: list[int]
) -> None:
    with torch.no_grad():
        right = mx.array(oracle(torch.tensor([prompt])).logits[0].numpy())
    adapter = adapt_model(*unpacked, current_device())
    rows = adapter.new_batch_state()
    row = rows.new()
    for begin in range(0, len(prompt), 13):
        piece = prompt[begin : begin + 13]
        assert logits_gap(computed(adapter, rows, row, piece), right[begin : begin + len(piece)]) < 1e-3


def test_what_it_answers_is_what_transformers_might_answer(folder: Path, oracle: Any, prompt: list[int]) -> None:
    """CPUs round activations to 8 bits: of two tokens that are nearly as good, the other may be chosen."""
    engine = start_engine(SETTINGS, folder, name=DEFAULT_MODEL, source="packaged")
    request = Request(
        "greedy",
        (tuple(prompt),),
        max_tokens=GENERATED,
        sampling=Sampling(temperature=0.0, logprobs=0),
        stop=Stop(ignore_eos=True),
    )
    deltas = [event for event in answer(engine, request) if isinstance(event, TextDelta)]
    engine.close()
    chosen = [token.chosen.token for delta in deltas for token in delta.tokens]
    assert len(chosen) == GENERATED
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *chosen]])).logits[0, len(prompt) - 1 : -1]
    behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    assert (behind == 0).float().mean() > 0.9
    assert behind.max() < NEARLY_AS_GOOD
