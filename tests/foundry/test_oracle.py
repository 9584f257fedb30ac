"""Our logits and transformers' on the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foundry.package import MODELS
from foundry.rows import prose_tokens
from foundry.shipped import LANGUAGE_MODELS

pytestmark = pytest.mark.oracle
PACKED = ("mixture",)
"""As mlx packs weights, which transformers does not read."""


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return prose_tokens(held_out=True)[:600].tolist()


def theirs(model: str, tokens: list[int]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    found: Any = AutoConfig.from_pretrained(MODELS / model)
    made = AutoModelForCausalLM.from_config(found.get_text_config()).float().eval()
    weights = load_file(MODELS / model / "model.safetensors")
    weights = {name.replace("model.language_model.", "model."): tensor.float() for name, tensor in weights.items()}
    missing, unexpected = made.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and all(name.startswith("mtp.") for name in unexpected)
    made.tie_weights()
    with torch.no_grad():
        return made(torch.tensor([tokens])).logits[0].numpy()


def ours(model: str, tokens: list[int]) -> np.ndarray:
    import mlx.core as mx

    from ingot.kernels.device import current_device
    from ingot.models.adapter import load_model_adapter
    from tests.launches import prompt_logits

    adapter = load_model_adapter(MODELS / model, current_device(), dtype="float32")
    return np.array(prompt_logits(adapter, tokens).astype(mx.float32))


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("model", [name for name in LANGUAGE_MODELS if name not in PACKED])
def test_logits_agree_with_transformers(model: str, tokens: list[int]) -> None:
    assert apart(ours(model, tokens), theirs(model, tokens)) < 0.01


def test_the_vision_models_logits_on_text_agree_with_transformers(tokens: list[int]) -> None:
    torch = pytest.importorskip("torch")
    from transformers import Qwen3VLForConditionalGeneration

    oracle: Any = Qwen3VLForConditionalGeneration.from_pretrained(MODELS / "vision", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([tokens])).logits[0].numpy()
    assert apart(ours("vision", tokens), expected) < 0.01
