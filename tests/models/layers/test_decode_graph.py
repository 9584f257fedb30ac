"""All layers as one graph: emulated, where a graph is its kernels one by one."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_map_with_path

from bench import random_models
from ingot.cache import footprint
from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.cache.records import restore_row, take_record
from ingot.engine.admission import load_lora
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.decode_graph import capture
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from ingot.kernels.moe import kernels as moe_kernels
from ingot.kernels.paged_attention.inputs import MOST_QUERIES, WIDTHS, KernelRows
from ingot.kernels.paged_attention.kernels import has_paged_kernels
from ingot.kernels.paged_attention.shapes import KVSplits
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.families.description import LayerMoeSpec
from ingot.models.kv_codec import with_kv_codec
from ingot.models.layers import decode_graph, graph_layers
from ingot.models.layers.decode_graph import DecodeGraphs, decode_graphs_of
from ingot.models.layers.gpu_linear import FEW_ROWS
from ingot.models.layers.graph_inputs import AttentionKind, StepInputs
from ingot.models.layers.graph_layers import OwnBlock, OwnLayer
from ingot.models.layers.graph_parts import LayerMoePart, MoePart
from ingot.models.layers.layer_program import LayerMoe
from ingot.models.layers.moe import JoinedMoe
from ingot.models.layers.streamed_runs import GraphRun
from ingot.models.layers.swapping import swap_modules
from tests import engines, tiny
from tests.memory import pretended
from tests.models.lora.made import matrices, shapes, write_mlx

pytestmark = pytest.mark.skipif(
    not has_paged_kernels(engines.GPU), reason="kernels run on no device here, nor can be emulated"
)
PLAIN: dict[str, Any] = {**tiny.CONFIGS["kernel"], "attention_bias": True, "model_type": "llama"}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 70,
    "num_kv_shared_layers": 0,
}
_GEMMA = {"rope_local_base_freq": 1000.0, "query_pre_attn_scalar": 16, "sliding_window": 70}
_MAMBA = {
    "hidden_size": 64,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 24,
    "mamba_head_dim": 24,
    "mamba_d_state": 32,
    "ssm_state_size": 32,
    "mamba_d_conv": 4,
    "conv_kernel": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_GRANITE = {
    "layer_types": ["mamba", "attention"],
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
}
KINDS: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma"},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 16.0, "attn_logit_softcapping": 2.0},
    # Layers that read what earlier ones store, and that are given something.
    "gemma4-small": {
        **_GEMMA4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": tiny.CONFIGS["kernel"]["vocab_size"],
    },
    # Keys that are values, over fewer heads in some layers.
    "gemma4-large": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma3_text": {"model_type": "gemma3_text", **_GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 2},
    "exaone4": {
        "model_type": "exaone4",
        "num_hidden_layers": 3,
        "sliding_window": 70,
        "sliding_window_pattern": "LLG",
        "rope_scaling": None,
    },
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": True},
    "granite": {
        "model_type": "granite",
        "hidden_size": 64,
        "mlp_bias": True,
        "attention_bias": True,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
    },
    "qwen3_5_text": {**tiny.CONFIGS["kernel-hybrid"], "num_hidden_layers": 3, "full_attention_interval": 2},
    "qwen3_next": {
        **tiny.CONFIGS["kernel-hybrid"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
        "mlp_only_layers": [0, 1],
        "moe_intermediate_size": 0,
        "norm_topk_prob": True,
        "rope_scaling": None,
    },
    # As checkpoints hold them, whose vision towers are left out.
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {**tiny.CONFIGS["kernel-hybrid"], "num_hidden_layers": 2, "full_attention_interval": 2},
    },
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {
            **tiny.CONFIGS["kernel"],
            "model_type": "gemma3_text",
            **_GEMMA,
            "num_hidden_layers": 2,
            "sliding_window_pattern": 2,
        },
    },
    "llama-window": {
        "model_type": "llama",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 70,
    },
    # Queries that grow with their positions.
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            **{"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
        },
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 70,
        "rope_scaling": None,
    },
    "phi3": {"model_type": "phi3", "hidden_size": 64},
    "minicpm": {"model_type": "minicpm", "hidden_size": 64, "dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2.0},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "granitemoehybrid-dense": {
        **{**_MAMBA, **_GRANITE, "model_type": "granitemoehybrid"},
        "position_embedding_type": "nope",
    },
    "nemotron_h-dense": {
        **_MAMBA,
        "model_type": "nemotron_h",
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-*-",
        "layer_norm_epsilon": 1e-5,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "lfm2": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "hidden_size": 64,
        "layer_types": ["conv", "full_attention"],
    },
    # Queries and keys without weights of norms, and layers that rotate nothing.
    "llama4_text": {
        **{"model_type": "llama4_text", "hidden_size": 64, "intermediate_size_mlp": 96, "use_qk_norm": False},
        "no_rope_layers": [1, 0],
    },
    "internlm3": {"model_type": "internlm3", "hidden_size": 64},
    # Attention and MLP side by side, behind a layer norm.
    "cohere2": {"model_type": "cohere2", "sliding_window": 70, "sliding_window_pattern": 2, "hidden_size": 64},
    # Layer norms with biases, and MLPs without gates.
    "nemotron": {
        **{"model_type": "nemotron", "hidden_act": "relu2", "hidden_size": 64, "partial_rotary_factor": 0.5},
        "norm_eps": 1e-5,
    },
    # A gate for each head.
    "spark2_5": {
        **{"model_type": "spark2_5", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 70},
        "rope_parameters": {
            kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in ("sliding_attention", "full_attention")
        },
    },
    "olmo_hybrid": {
        **tiny.CONFIGS["kernel-hybrid"],
        **{"model_type": "olmo_hybrid", "num_hidden_layers": 2, "linear_allow_neg_eigval": True, "rope_theta": None},
        **{"hidden_size": 64, "layer_types": ["linear_attention", "full_attention"], "attention_bias": False},
    },
    "muse_glimmer": {
        **{"model_type": "muse_glimmer", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 70},
        "layer_rope_theta": [10000.0, 0],
    },
}
"""Layers of other families, whose windows are a few tokens longer than a page."""


_EXPERTS = {
    **{
        "hidden_size": 64,
        "num_experts": 12,
        "num_local_experts": 12,
        "n_routed_experts": 12,
        "num_experts_per_tok": 12,
    },
    **{"moe_intermediate_size": 64, "intermediate_size": 64, "norm_topk_prob": True, "rope_scaling": None},
}
_SHARED_EXPERT = {"n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1}
_BIASED_CHOICE = {**_SHARED_EXPERT, "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2}
_LATENT = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
    **{"kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mistral4": {
        **{**_SHARED_EXPERT, **_LATENT, "q_lora_rank": 64, "routed_scaling_factor": 1.0, "n_group": 1},
        "topk_group": 1,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            **{"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
        },
    },
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "qwen3_5_moe": {
        **tiny.CONFIGS["kernel-hybrid"],
        **{"num_hidden_layers": 2, "full_attention_interval": 2, "shared_expert_intermediate_size": 32},
    },
    "gpt_oss": {"sliding_window": 70, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {**_BIASED_CHOICE, "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": False},
    "dots1": {**_BIASED_CHOICE, "attention_bias": False},
    "exaone_moe": {
        **_BIASED_CHOICE,
        **{"is_moe_layer": [False, True], "sliding_window": 70},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mellum": {
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 70},
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1000.0},
            "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    # Kimi's delta attention, and latent attention of which nothing is rotated.
    "kimi_linear": {
        **_SHARED_EXPERT,
        **_LATENT,
        **{"num_hidden_layers": 3, "num_experts_per_token": 12, "num_expert_group": 4, "topk_group": 2},
        **{"routed_scaling_factor": 1.5, "mla_use_nope": True, "model_max_length": 512},
        "linear_attn_config": {
            **{"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 4, "head_dim": 32},
            "short_conv_kernel_size": 4,
        },
    },
    # Queries made from latents.
    "glm4_moe_lite": {**_BIASED_CHOICE, **_LATENT, "q_lora_rank": 64},
    # Experts without gates.
    "nemotron_h": {
        **KINDS["nemotron_h-dense"],
        **{"hybrid_override_pattern": "ME*E", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
        **{"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 64, "moe_latent_size": None},
    },
    "mixtral": {},
    "olmoe": {},
    "deepseek": {**_SHARED_EXPERT, "moe_layer_freq": 1, "attention_bias": False},
    "ernie4_5_moe": {
        **{"use_bias": False, "moe_num_experts": 12, "moe_k": 12, "moe_layer_start_index": 1},
        "moe_num_shared_experts": 1,
    },
    "lfm2_moe": {
        **{"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"]},
        **{"use_expert_bias": True, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    },
    "minimax": {"use_qk_norm": True, "shared_intermediate_size": 16, "rotary_dim": 8},
    "granitemoe": {
        **{"attention_bias": False, "logits_scaling": 2.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0},
        "residual_multiplier": 0.5,
    },
    # Gates of attention: for each number; for each head, also by softplus; of latents.
    "afmoe": {
        **{**_BIASED_CHOICE, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 70},
        **{"num_dense_layers": 1, "route_scale": 1.5, "score_func": "softmax"},
    },
    "laguna": {
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 70, "partial_rotary_factor": 0.5},
        **{"mlp_layer_types": ["dense", "sparse"], "shared_expert_intermediate_size": 32},
    },
    "step3p5": {
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 70, "num_attention_groups": 2},
        **{"moe_num_experts": 12, "moe_top_k": 12, "share_expert_dim": 32, "partial_rotary_factors": [1.0, 0.5]},
    },
    "bailing_moe_v3": {
        **{**_BIASED_CHOICE, **_LATENT, "q_lora_rank": 64, "layer_group_size": 2, "head_dim": 32},
        "moe_shared_expert_intermediate_size": 32,
    },
    "bailing_moe": {**_BIASED_CHOICE, "use_qk_norm": True, "score_function": "sigmoid", "head_dim": 16},
    # Experts beside an MLP.
    "granitemoehybrid": {**_MAMBA, **_GRANITE, "position_embedding_type": "nope", "shared_intermediate_size": 96},
    # The same, with norms and a router of the layer's own.
    "gemma4_text": {
        **{**_GEMMA4, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        **{"enable_moe_block": True, "top_k_experts": 12, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    },
}
"""Families whose layers have experts."""


PACKINGS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mixtral": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "exaone_moe": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
"""Of experts of some of them."""


@cache
def mixture(kind: str, **changes: int) -> ModelAdapter:
    """Each token has all experts, so that no way of rounding decides which; or so many."""

    def biased(path: str, weight: mx.array) -> mx.array:
        if path.endswith(("e_score_correction_bias", "expert_bias")):
            return mx.random.normal(weight.shape, key=mx.random.key(1)) / 4
        if path.endswith(("router.scale", "per_expert_scale")):
            return (1 + mx.random.normal(weight.shape, key=mx.random.key(2)) / 4).astype(weight.dtype)
        return weight

    config = {**tiny.CONFIGS["kernel"], **MIXTURES[kind], **_EXPERTS, "model_type": kind, **changes}
    model = random_models.build(config, spread=0.2, dtype=mx.bfloat16)
    model.update(tree_map_with_path(biased, model.parameters()))

    def packing(path: str, module: nn.Module) -> bool | dict[str, Any]:
        own = PACKINGS.get(kind) if "experts" in path else None
        return own or True if hasattr(module, "to_quantized") else False

    nn.quantize(model, group_size=32, bits=4, class_predicate=packing)
    mx.eval(model.parameters())
    return adapt_model(model, config, engines.GPU)


def adapted(kind: str) -> ModelAdapter:
    if kind in MIXTURES:
        return mixture(kind)
    if kind in KINDS:
        config = {**tiny.CONFIGS["kernel"], **KINDS[kind]}
        return adapt_model(random_models.build(config, spread=0.2, dtype=mx.bfloat16), config, engines.GPU)
    if kind == "packed":
        return adapt_model(tiny.build("kernel-packed"), tiny.CONFIGS["kernel-packed"], engines.GPU)
    model = random_models.build(PLAIN, spread=0.2, dtype=mx.bfloat16)
    return adapt_model(model, PLAIN, engines.GPU)


@cache
def shared(kind: str) -> ModelAdapter:
    """The same for all tests that leave it as it is."""
    return adapted(kind)


def stacked(adapter: ModelAdapter) -> DecodeGraphs:
    stack = decode_graphs_of(adapter.model)
    assert stack is not None
    return stack


class Session:
    """Rows that begin with prompts of these lengths."""

    def __init__(self, adapter: ModelAdapter, lengths: list[int]) -> None:
        self._adapter = adapter
        self.states: BatchState = adapter.new_batch_state()
        self.rows: list[Row] = [self.states.new() for _ in lengths]
        for number, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            self.run([5 + number] * length, [ForwardPart((row,), length)])

    def run(self, tokens: list[int], parts: list[ForwardPart]) -> mx.array:
        logits = self._adapter.run(self.states, mx.array(tokens, mx.uint32), parts)
        mx.eval(logits, self.states.pending())
        return logits


class Counting:
    def __init__(self, run: Any) -> None:
        self._run, self.calls = run, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self._run(*args)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_a_graph_says_what_the_layers_say(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = shared(kind)
    stack, found = stacked(adapter), []
    assert stack.refusal is None and adapter.steps is None
    for plainly in (False, True):
        if plainly:
            monkeypatch.setattr(stack, "refusal", "for comparison")
        session = Session(adapter, [3, 70])
        before = stack.graph_count
        found.append([session.run([9, 8], [ForwardPart(tuple(session.rows), 1)]) for _ in range(4)])
        assert stack.graph_count <= before + 1, "one graph for all these steps"
    largest = max(float(mx.abs(each).max()) for each in found[1])
    bound = 1e-4 if kind == "packed" else 2**-5
    assert all(float(mx.abs(a - b).max()) < bound * largest for a, b in zip(*found, strict=True))


def apart(found: Sequence[mx.array], wanted: Sequence[mx.array]) -> float:
    """The largest difference, as a share of the largest number."""
    largest = max(float(mx.abs(each).max()) for each in wanted)
    return max(float(mx.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)) / largest


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(WIDTHS)), min_size=1, max_size=4),
    st.sampled_from([KVSplits(64, False), KVSplits(512, False), KVSplits(1024, False)]),
    st.sampled_from([1, 12, 512, 1024, 1500]),
)
def test_a_graph_has_kv_splits_for_a_window_wherever_it_lies(
    rows: list[tuple[int, int]], split: KVSplits, window: int
) -> None:
    lengths, counts = [before + count for before, count in rows], [count for _, count in rows]
    made = KernelRows.of([[0]] * len(rows), lengths, counts=counts)
    bounded = AttentionKind(0, split, window).bounded(made.splits(split, 0), made.most)
    assert made.splits(split, window) <= bounded <= made.splits(split, 0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [*KINDS, *MIXTURES])
def test_layers_of_other_families_are_graphs_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal lengths step over the ends of pages and of windows, by single tokens and by drafts."""
    adapter = shared(kind)
    stack, found = stacked(adapter), []
    assert stack.refusal is None and not [note for note in adapter.notes if "kernel by kernel" in note]
    for plainly in (False, True):
        if plainly:
            monkeypatch.setattr(stack, "refusal", "for comparison")
        session = Session(adapter, [3, 63, 69, 140])
        monkeypatch.setattr(stack, "_replay", counting := Counting(stack._replay))
        steps = [session.run([9, 8, 7, 6], [ForwardPart(tuple(session.rows), 1)]) for _ in range(3)]
        drafts = [ForwardPart((session.rows[2],), 4), ForwardPart((session.rows[0], session.rows[3]), 1)]
        steps.append(session.run([5, 4, 3, 2, 9, 8], drafts))
        found.append(steps)
        assert counting.calls == (0 if plainly else 4)
    assert apart(*found) < 2**-5


def test_a_window_in_one_of_several_kv_splits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, found = shared("gemma3"), []
    stack = stacked(adapter)
    for plainly in (False, True):
        if plainly:
            monkeypatch.setattr(stack, "refusal", "for comparison")
        session = Session(adapter, [150, 3])
        found.append([session.run([9, 8], [ForwardPart(tuple(session.rows), 1)]) for _ in range(2)])
    assert apart(*found) < 2**-5
    assert min(bound.splits for _, key, _ in stack._replays for bound in key.rows) == 2


def test_recurrent_states_are_found_where_they_are_moved_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows make the states' arrays grow, and a row that is taken over from the cache is put into them."""
    adapter, found = shared("qwen3_5_text"), []
    stack = stacked(adapter)
    for plainly in (False, True):
        if plainly:
            monkeypatch.setattr(stack, "refusal", "for comparison")
        session = Session(adapter, [70])
        steps = [session.run([9], [ForwardPart(tuple(session.rows), 1)])]
        session.rows.append(session.states.new())
        restore_row(session.states, session.rows[1], [take_record(session.states, session.rows[0], 0)], 71)
        session.rows.append(session.states.new())
        steps.append(session.run([9, 9, 8], [ForwardPart(tuple(session.rows), 1)]))
        assert mx.array_equal(steps[1][0], steps[1][1]), "both had the same tokens"
        steps.append(session.run([7, 6], [ForwardPart((session.rows[2], session.rows[0]), 1)]))
        found.append(steps)
    assert apart(*found) < 2**-5


@pytest.mark.parametrize("part", ["conv", "state"])
def test_a_graph_that_leaves_other_recurrent_states_is_not_used(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = {
        "conv": (": seen[tap + 1];", ": seen[tap];"),
        "state": ("STATES_AFTER(states, row, target, ALL)", "STATES_AFTER(states, row, 0, ALL)"),
    }[part]

    def broken(self: Emulator, text: KernelText) -> KernelText:
        return text._replace(body=text.body.replace(old, new)) if "addresses" in text.inputs else text

    monkeypatch.setattr(Emulator, "rewritten", broken)
    refusal = stacked(adapted("qwen3_5_text")).refusal
    assert refusal is not None and refusal.startswith("they differ by")


def test_rows_in_fewer_bits_are_part_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "ENCODE_STEP_TOKENS", 128)
    monkeypatch.setattr(footprint, "RAW_TAIL_TOKENS", 64)
    config = {**PLAIN, "head_dim": 64}
    plain = adapt_model(random_models.build(config, spread=0.2, dtype=mx.bfloat16), config, engines.GPU)
    adapter = with_kv_codec(plain, PairCodec(CodecName.parse("k8v4")))
    stack, found = stacked(adapter), []
    for plainly in (False, True):
        if plainly:
            monkeypatch.setattr(stack, "refusal", "for comparison")
        session = Session(adapter, [3, 192])
        before = len(stack._replays)
        found.append([session.run([9, 8], [ForwardPart(tuple(session.rows), 1)]) for _ in range(4)])
        assert session.rows[1].tables[0].coded == 2, "pages in fewer bits"
        assert plainly or len(stack._replays) == before + 1, "one graph for all these steps"
    largest = max(float(mx.abs(each).max()) for each in found[1])
    assert all(float(mx.abs(a - b).max()) < 2**-5 * largest for a, b in zip(*found, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "kind", ["packed", "plain", "qwen3_5_moe", "gpt_oss", "glm4_moe", "kimi_linear", "glm4_moe_lite"]
)
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    adapter = mixture(kind, num_experts_per_tok=3) if kind in MIXTURES else shared(kind)
    alone, among = Session(adapter, [70]), Session(adapter, [70, 3, 20])
    for token in (9, 8, 7):
        one = alone.run([token], [ForwardPart(tuple(alone.rows), 1)])
        assert mx.array_equal(one[0], among.run([token, 4, 5], [ForwardPart(tuple(among.rows), 1)])[0])


def test_guessed_tokens_have_the_bits_of_single_ones() -> None:
    adapter = shared("plain")
    stack = stacked(adapter)
    single, drafting = Session(adapter, [20, 30]), Session(adapter, [20, 30])
    one_by_one = [single.run([token, 6], [ForwardPart(tuple(single.rows), 1)])[0] for token in (9, 8, 7)]
    before = stack.graph_count
    first, second = drafting.rows
    both = drafting.run([9, 8, 7, 6], [ForwardPart((first,), 3), ForwardPart((second,), 1)])
    assert stack.graph_count <= before + 1, "rows of unlike widths are one graph"
    assert mx.array_equal(both[:3], mx.stack(one_by_one))


def test_steps_of_some_more_rows_or_guesses_are_the_same_graph() -> None:
    adapter = shared("plain")
    stack, session, alone = stacked(adapter), Session(adapter, [3, 20, 30, 70, 5]), Session(adapter, [3])
    for counts, made in (((8,), True), ((5, 6, 7), False), ((1,), True)):
        before = stack.graph_count
        for count in counts:
            together = session.run(
                [9] * (count + 4), [ForwardPart((session.rows[0],), count), ForwardPart(tuple(session.rows[1:]), 1)]
            )
            single = [alone.run([9], [ForwardPart(tuple(alone.rows), 1)])[0] for _ in range(count)]
            assert mx.array_equal(together[:count], mx.stack(single))
        assert (stack.graph_count > before) <= made


def test_graphs_outlive_the_pages_that_they_were_made_with() -> None:
    adapter = shared("plain")
    stack, long = stacked(adapter), Session(adapter, [70])
    before = [long.run([token], [ForwardPart(tuple(long.rows), 1)]) for token in (9, 8)]
    made = stack.graph_count
    longer = Session(adapter, [70, 300, 300, 300])
    assert longer.states.states[0].storage.addresses.size > long.states.states[0].storage.addresses.size
    again = [longer.run([token], [ForwardPart(tuple(longer.rows[:1]), 1)]) for token in (9, 8)]
    assert all(mx.array_equal(*each) for each in zip(before, again, strict=True)) and stack.graph_count == made
    assert mx.isfinite(long.run([7], [ForwardPart(tuple(long.rows), 1)])).all() and stack.graph_count == made


def test_more_pages_than_graphs_have_room_to_tell_of_are_new_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapted("packed")
    stack, session = stacked(adapter), Session(adapter, [70])
    before = session.run([9], [ForwardPart(tuple(session.rows), 1)])
    made, stack._addresses[0, False].buffers = stack.graph_count, [mx.zeros(1, mx.int32) for _ in stack.layers]
    again = Session(adapter, [70])
    assert mx.array_equal(again.run([9], [ForwardPart(tuple(again.rows), 1)]), before)
    assert stack.graph_count == made + 1 and len(stack._replays) == 1


def test_graphs_are_made_before_they_are_asked_for_where_that_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graph, "AHEAD_SPLITS", (8,))
    monkeypatch.setattr(decode_graph, "ROOM_SIZES", (1, 2))
    monkeypatch.setattr(decode_graph, "WIDTHS", (1, 4))
    monkeypatch.setattr(capture.EmulatedReplayStage, "takes_time", True)
    adapter = adapted("packed")
    stack, session = stacked(adapter), Session(adapter, [3, 20])
    made = stack.graph_count
    session.run([9], [ForwardPart((session.rows[0],), 1)])
    session.run([9, 8], [ForwardPart(tuple(session.rows), 1)])
    session.run([9, 8, 7], [ForwardPart((session.rows[1],), 3)])
    assert stack.graph_count == made


def test_it_is_known_how_many_tokens_a_graph_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = shared("plain")
    stack = stacked(adapter)
    assert adapter.graph_tokens == stack.most_tokens
    monkeypatch.setattr(stack, "refusal", "it is not wanted")
    assert adapter.graph_tokens == math.inf


def test_prompts_are_run_by_the_layers_themselves() -> None:
    adapter = shared("plain")
    stack = stacked(adapter)
    before = len(stack._replays)
    Session(adapter, [MOST_QUERIES + 1, FEW_ROWS + 1])
    assert len(stack._replays) == before


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_token_has_the_experts_that_its_mixture_chooses(kind: str) -> None:
    x = mx.random.normal((16, 64), key=mx.random.key(1)).astype(mx.bfloat16)
    found: list[tuple[MoePart, mx.array]] = []
    for module in mixture(kind, num_experts_per_tok=3, top_k_experts=3, moe_top_k=3).model.modules():
        if isinstance(module, JoinedMoe):
            found.append((MoePart.of(module), module(x[None])))
        elif "router" in module and "experts" in module:
            wanted = module.experts(module.pre_feedforward_layernorm_2(x[None]), *module.router(x[None]))
            found.append((LayerMoePart.of_layer(LayerMoe(LayerMoeSpec(), module)), wanted))
    assert found
    for part, wanted in found:
        output = part.capture(Emulator(), x, StepInputs(None, mx.zeros((16, 2), mx.int32), None, None))
        assert apart([output], [wanted[0]]) < 2**-5


def test_a_router_that_wavers_keeps_no_model_from_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_layers, "MOST_ROUNDING", 0.0)
    fixed, run = [], decode_graph.DecodeGraphs._difference_from_layers

    def wavering(self: DecodeGraphs, *given: Any) -> str | None:
        fixed.append(given[-1][0].has_fixed_experts)
        return run(self, *given) if fixed[-1] else "they differ"

    monkeypatch.setattr(decode_graph.DecodeGraphs, "_difference_from_layers", wavering)
    assert stacked(mixture.__wrapped__("qwen3_moe")).refusal is None
    assert fixed == [False, True] * decode_graph.GRAPH_TRIALS


def test_experts_that_give_something_else_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Emulator, text: KernelText) -> KernelText:
        return text._replace(body=text.body.replace("if (BESIDE) {", "if (BESIDE) {\nwhole *= 2.0f;"))

    monkeypatch.setattr(moe_kernels, "check_moe_kernels", lambda *_: None)
    monkeypatch.setattr(Emulator, "rewritten", broken)
    assert "they differ by" in str(stacked(mixture.__wrapped__("glm4_moe")).refusal)


@pretended
def test_a_graph_that_says_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ready = capture.EmulatedReplayStage.ready

    def wrong(self: capture.EmulatedReplayStage, recorded: Any) -> capture.GraphReplay:
        replay = ready(self, recorded)

        def off(inputs: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]:
            y, done = replay(inputs, after)
            return y * 1.2, done

        return off

    monkeypatch.setattr(capture.EmulatedReplayStage, "ready", wrong)
    with caplog.at_level(logging.WARNING, "ingot.models"):
        adapter = adapted("packed")
    assert "they differ by" in str(stacked(adapter).refusal)
    assert any(
        note.startswith("layers run kernel by kernel, slower: as one graph they differ by") for note in adapter.notes
    )
    assert "layers are not run as graphs, which is slower" in caplog.text


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_5"])
def test_a_graph_may_differ_by_what_rounding_does_to_the_layers_themselves(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of many layers does."""
    monkeypatch.setattr(graph_layers, "MOST_APART", 1e-9)
    assert stacked(adapted(kind)).refusal is None
    monkeypatch.setattr(graph_layers, "MOST_ROUNDING", 1e-9)
    assert "they differ by" in str(stacked(adapted(kind)).refusal)


@pretended
def test_a_graph_that_cannot_be_made_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: capture.EmulatedReplayStage, recorded: Any) -> capture.GraphReplay:
        raise RuntimeError("no memory for it")

    monkeypatch.setattr(capture.EmulatedReplayStage, "ready", fails)
    adapter = adapted("packed")
    assert stacked(adapter).refusal == "no memory for it"
    session = Session(adapter, [3])
    assert mx.isfinite(session.run([4], [ForwardPart(tuple(session.rows), 1)])).all()


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("kernel", "products of Linear in float32"),
        ("kernel-window", "products of Linear in float32"),
        ("kernel-hybrid", "products of Linear in float32"),
        ("moe", "products of Linear in float32"),
        ("indexed", "the indexer of DeepseekV32Attention"),
    ],
)
def test_what_is_not_covered_keeps_its_own_layers_and_is_named(kind: str, part: str) -> None:
    adapter = adapt_model(tiny.build(kind), tiny.CONFIGS[kind], engines.GPU)
    assert decode_graphs_of(adapter.model) is None
    assert f"layers run kernel by kernel, slower: a graph has no kernels for {part}" in adapter.notes


PARTLY: dict[str, tuple[dict[str, Any], str, list[type]]] = {
    "experts": (
        {
            **MIXTURES["qwen3_moe"],
            **_EXPERTS,
            **{"model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [0, 2, 3]},
        },
        "experts whose gates are packed otherwise of Qwen3MoeSparseMoeBlock",
        [GraphRun, OwnBlock, GraphRun],
    ),
    "recurrent": (
        {
            **{"model_type": "jamba", "num_hidden_layers": 4, "hidden_size": 128, "num_key_value_heads": 2},
            **{"layers_block_type": ["attention", "mamba", "attention", "attention"], "num_experts": 1},
            **{"attn_layer_offset": 0, "attn_layer_period": 2, "expert_layer_offset": 0, "expert_layer_period": 2},
            **{"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "num_experts_per_tok": 1},
        },
        "JambaMambaMixer",
        [GraphRun, OwnLayer, GraphRun],
    ),
}
"""Models some of whose layers have a part without kernels, what that is, and what their steps are."""


@pytest.mark.parametrize("kind", PARTLY)
def test_a_part_without_kernels_is_computed_between_graphs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, part, runs = PARTLY[kind]
    config = {**tiny.CONFIGS["kernel"], **changes}
    model = random_models.build(config, spread=0.2, dtype=mx.bfloat16)
    experts = {"gate_proj": {"bits": 4}, "up_proj": {"bits": 8}, "down_proj": {"bits": 8}}
    nn.quantize(model, 32, class_predicate=lambda path, _: "switch_mlp." in path and experts.get(path.split(".")[-1]))
    adapter = adapt_model(model, config, engines.GPU)
    stack, found = stacked(adapter), []
    assert stack.refusal is None and [type(run) for run in stack.parts.runs] == runs
    assert any(part in note and "between graphs, slower" in note for note in adapter.notes)
    for plainly in (False, True):
        if plainly:
            monkeypatch.setattr(stack, "refusal", "for comparison")
        session = Session(adapter, [3, 70])
        before = stack.graph_count
        found.append([session.run([9, 8], [ForwardPart(tuple(session.rows), 1)]) for _ in range(4)])
        assert stack.graph_count <= before + 2, "the same two graphs at all these steps"
    assert apart(*found) < 2**-5


@pytest.mark.parametrize(
    ("packing", "part"),
    [(None, "experts in bfloat16"), ({"group_size": 16, "bits": 4, "mode": "nvfp4"}, "nvfp4 experts")],
    ids=["plain", "nvfp4"],
)
def test_experts_that_are_not_covered_keep_their_layers_and_are_named(
    packing: dict[str, Any] | None, part: str
) -> None:
    """Of nvfp4, columns that are no multiple of 32 are not."""
    mixtures = {**MIXTURES["qwen3_moe"], **_EXPERTS, "mlp_only_layers": []}
    config = {**tiny.CONFIGS["kernel"], **mixtures, "model_type": "qwen3_moe"}
    config["hidden_size"] = 64 if packing is None else 48
    model = random_models.build(config, spread=0.2, dtype=mx.bfloat16)
    if packing is not None:
        nn.quantize(model, class_predicate=lambda path, _: "switch_mlp." in path and "_proj" in path, **packing)
    swap_modules(model, engines.GPU, CheckedKernels(engines.GPU))
    assert graph_layers.why_uncovered(model) == f"{part} of Qwen3MoeSparseMoeBlock"


def test_layers_whose_pages_no_kernel_reads_are_not_graphs() -> None:
    config = {**PLAIN, "head_dim": 8}
    adapter = adapt_model(random_models.build(config, spread=0.2, dtype=mx.bfloat16), config, engines.GPU)
    assert stacked(adapter).graph_count == 0 and adapter.graph_tokens == math.inf
    assert any(note.startswith("layers run kernel by kernel, slower: as one graph they") for note in adapter.notes)


def test_layers_that_hand_over_states_between_them_stay_apart() -> None:
    model = tiny.build("kernel-packed")
    adapter = adapt_model(model, tiny.CONFIGS["kernel-packed"], engines.GPU, apart=True)
    assert decode_graphs_of(adapter.model) is None


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graph, "MOST_GRAPHS", 2)
    adapter = adapted("packed")
    session = Session(adapter, [3, 20, 30])
    for count in (1, 2, 3):
        session.run([9] * count, [ForwardPart(tuple(session.rows[:count]), 1)])
    assert len(stacked(adapter)._replays) == 2


def adapted_rows(adapter: ModelAdapter, slots: list[int], steps: int = 3) -> list[list[mx.array]]:
    """Logits of each row at each step, of rows that go through these adapters."""
    states = adapter.new_batch_state()
    rows = [states.new(lora=slot) for slot in slots]
    for number, row in enumerate(rows):
        mx.eval(adapter.run(states, mx.full(20, 5 + number, mx.uint32), [ForwardPart((row,), 20)]), states.pending())
    found: list[list[mx.array]] = [[] for _ in rows]
    for token in range(steps):
        logits = adapter.run(states, mx.full(len(rows), 9 + token, mx.uint32), [ForwardPart(tuple(rows), 1)])
        mx.eval(logits, states.pending())
        for number, own in enumerate(found):
            own.append(logits[number])
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["packed", "plain", "phi3", "gemma", "qwen3_5", "kimi_linear", "glm4_moe_lite"])
def test_adapters_are_part_of_the_graph(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapted(kind)
    stack, bare = stacked(adapter), adapted_rows(adapter, [0, 0, 0])
    names = (
        "in_proj_qkv",
        "in_proj_a",
        "out_proj",
        "f_a_proj",
        "g_b_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "q_proj",
        "v_proj",
        "qkv_proj",
        "o_proj",
        "gate_proj",
        "gate_up_proj",
        "down_proj",
    )
    sizes = shapes(adapter.model, names)
    folders = [write_mlx(tmp_path / str(n), matrices(sizes, 4 * n, n), rank=4 * n, scale=0.02) for n in (1, 3)]
    one, two = (adapter.loras.slot(load_lora(adapter, folder, most_rank=16).digest) for folder in folders)
    assert not adapter.separates_lora_rows
    made = stack.graph_count
    among = adapted_rows(adapter, [one, 0, two])
    assert stack.refusal is stack.loras.refusal is None and made < stack.graph_count <= made + 1
    assert all(mx.array_equal(*each) for each in zip(among[1], bare[1], strict=True)), "who has none is as before"
    assert not mx.array_equal(among[0][0], bare[0][0])
    alone = adapted_rows(adapter, [one])
    assert all(mx.array_equal(*each) for each in zip(among[0], alone[0], strict=True)), "and others as alone"
    monkeypatch.setattr(stack.loras, "refusal", "for comparison")
    assert adapter.separates_lora_rows
    plain = adapted_rows(adapter, [one, 0, two])
    largest = max(float(mx.abs(each).max()) for each in plain[2])
    bound = 1e-4 if kind == "packed" else 2**-4
    assert all(float(mx.abs(a - b).max()) < bound * largest for a, b in zip(among[2], plain[2], strict=True))


def test_graphs_of_adapters_that_went_are_forgotten(tmp_path: Path) -> None:
    adapter = adapted("packed")
    stack, sizes = stacked(adapter), shapes(adapter.model, ("q_proj", "up_proj"))
    folders = [write_mlx(tmp_path / str(n), matrices(sizes, 4, n), rank=4, scale=0.02) for n in (1, 2)]
    first = load_lora(adapter, folders[0], most_rank=16)
    alone = adapted_rows(adapter, [1])
    assert sum(bool(key.lora_version) for _, key, _ in stack._replays) > 0
    load_lora(adapter, folders[1], most_rank=16)
    adapter.loras.drop(first.digest)
    other = adapted_rows(adapter, [2])
    assert len({key.lora_version for _, key, _ in stack._replays if key.lora_version}) == 1
    assert not mx.array_equal(alone[0][0], other[0][0])
    load_lora(adapter, folders[0], most_rank=16)
    assert all(mx.array_equal(*each) for each in zip(adapted_rows(adapter, [1])[0], alone[0], strict=True))
