"""Folders that transformers saved, loaded and run by ingot, against transformers itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.device import current_device
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.probe import logits_gap
from tests.launches import computed, decoded

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

TOLERANCE = 1e-3
WIDEST = 32
SHARED: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}

# Each with positions that its family's defaults would get wrong.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": PLAIN},
    "llama, scaled": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama, tied": {"model_type": "llama", "rope_parameters": PLAIN, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "rope_parameters": PLAIN},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 5,
        "sliding_window": 12,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        "_sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "rope_parameters": PLAIN, **EXPERTS},
    "qwen3_next": {
        "model_type": "qwen3_next",
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        **EXPERTS,
        **DELTA,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, **DELTA},
}


@pytest.fixture(params=MODELS)
def oracle(request: pytest.FixtureRequest) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    described = {**SHARED, **copy.deepcopy(MODELS[request.param])}
    torch.manual_seed(0)
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    return AutoModelForCausalLM.from_config(config).eval().float()


@pytest.fixture
def adapter(oracle: Any, tmp_path: Path) -> ModelAdapter:
    oracle.save_pretrained(tmp_path)
    return load_model_adapter(tmp_path, current_device(), dtype="float32", widest=WIDEST)


def answers(oracle: Any, rows: list[list[int]]) -> list[mx.array]:
    """The oracle's logits after each token of each row."""
    with torch.no_grad():
        return [mx.array(oracle(torch.tensor([row])).logits[0].numpy()) for row in rows]


def test_chunks_and_rows_decoding_together_give_the_logits_of_transformers(oracle: Any, adapter: ModelAdapter) -> None:
    torch.manual_seed(1)
    prompts = [torch.randint(1, SHARED["vocab_size"], (length,)).tolist() for length in (75, 43, 9)]
    right = answers(oracle, prompts)
    kept = adapter.new_batch_state()
    live = [kept.new() for _ in prompts]
    for row, prompt, expected in zip(live, prompts, right, strict=True):
        for begin in range(0, len(prompt) - 5, WIDEST):
            end = min(begin + WIDEST, len(prompt) - 5)
            assert logits_gap(computed(adapter, kept, row, prompt[begin:end]), expected[begin:end]) < TOLERANCE
    for step in range(-5, 0):
        found = decoded(adapter, kept, live, [prompt[step] for prompt in prompts])
        assert logits_gap(found, mx.stack([expected[step] for expected in right])) < TOLERANCE
