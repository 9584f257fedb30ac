"""Gemma 4's assistants: tiny random ones, held to mlx-vlm's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from ingot.cache.forward_batch import ForwardBatch, ForwardPart
from ingot.errors import ModelError
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.draft_heads.assistant import Assistant
from ingot.models.draft_heads.loading import drafter_kind, load_drafter
from ingot.models.draft_heads.mtp import check_draft_head, with_draft_head
from ingot.models.probe import logits_gap
from ingot.upstream import import_upstream
from tests.engines import acting_as
from tests.models.layers import family_configs

TOKENS = [5, 17, 3, 29, 11, 23, 7, 19, 2, 13, 31, 8, 40, 41, 9, 77, 50, 6, 1, 90]
CLOSE = 2e-2
SIZE, TOP = 24, 3
ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


def target_config() -> dict[str, Any]:
    config: dict[str, Any] = family_configs.config("gemma4")
    config["text_config"] |= {"sliding_window": 12, "rope_parameters": ROPES}
    return config


def assistant_config(*, ordered: bool = False, **changes: Any) -> dict[str, Any]:
    text = target_config()["text_config"]
    own = {
        **text,
        **{"hidden_size": SIZE, "num_hidden_layers": 3, "layer_types": KINDS, "num_kv_shared_layers": 3},
        **{"hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, **changes},
    }
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": text["hidden_size"],
        "use_ordered_embeddings": ordered,
        **{"num_centroids": 12, "centroid_intermediate_top_k": TOP, "tie_word_embeddings": True, "text_config": own},
    }


def reference(config: dict[str, Any]) -> Any:
    """mlx-vlm's assistant, with random weights."""
    module = import_upstream("mlx_vlm.speculative.drafters.gemma4_assistant")
    mx.random.seed(5)
    model = module.Model(module.ModelConfig.from_dict(json.loads(json.dumps(config))))

    def widened(path: str, weight: mx.array) -> mx.array:
        if "norm" in path or "scalar" in path:
            return 1 + 0.1 * mx.random.normal(weight.shape)
        return weight if weight.dtype == mx.int32 else weight + 0.2 * mx.random.normal(weight.shape)

    model.update(tree_map_with_path(widened, model.parameters()))
    if config["use_ordered_embeddings"]:
        model.masked_embedding.token_ordering = mx.random.permutation(96).astype(mx.int32)
    return model


def written(folder: Path, config: dict[str, Any], change: Callable[[dict[str, mx.array]], Any] | None = None) -> Path:
    tensors: dict[str, mx.array] = dict(tree_flatten(reference(config).parameters()))  # type: ignore[arg-type]
    if config["use_ordered_embeddings"]:
        tensors["masked_embedding.token_ordering"] = tensors["masked_embedding.token_ordering"].astype(mx.int64)
    if change is not None:
        change(tensors)
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adapted(device: Device | None = None) -> ModelAdapter:
    return adapt_model(family_configs.build("gemma4"), target_config(), device or current_device())


def with_model(model: Any, adapter: ModelAdapter, stored: list[Any], length: int) -> Any:
    """mlx-vlm's assistant behind so many tokens that the states have stored."""
    text = adapter.model.language_model.model
    model.bind(text)
    kv = {}
    for kind, state in zip(dict.fromkeys(KINDS), stored, strict=True):
        keys, values = state.keys_and_values()
        kv[kind] = tuple(part[..., :length, :].astype(mx.float32) for part in (keys, values))
    model.set_shared_kv(kv, length, position=length - 1, kv_valid_len=length)
    return model


@pytest.mark.parametrize("kind", ["cpu", "metal", "cuda"])
@pytest.mark.parametrize("ordered", [False, True])
def test_an_assistants_chain_has_the_logits_of_mlx_vlms(kind: str, ordered: bool, tmp_path: Path) -> None:
    config = assistant_config(ordered=ordered)
    folder = written(tmp_path / "assistant", config)
    assert drafter_kind(folder) == "assistant"
    with acting_as(kind):
        adapter = adapted()
        head: Any = load_drafter(folder, adapter)
        rows = with_draft_head(adapter, head).new_batch_state()
        row = rows.new()
        _, hidden = adapter.run(rows, mx.array(TOKENS), [ForwardPart((row,), len(TOKENS))], [0], hidden=True)
        batch = ForwardBatch((row,), 1, (len(TOKENS) - 1,), (len(TOKENS) - 1,))
        states, token = hidden[None, -1:], mx.array([[44]])
        with rows.aside([batch]) as layers:
            found = []
            for _ in range(3):
                states = head(states, token, layers)
                found.append(head.logits(states))
                token = mx.argmax(found[-1], axis=-1)
            for layer in layers:
                layer.open(batch)
            theirs = with_model(reference(config), adapter, layers, len(TOKENS))
        token, states = mx.array([[44]]), hidden[None, -1:].astype(mx.float32)
        for depth, ours in enumerate(found):
            embedded = theirs._input_embed(token) * theirs._input_embed_scale
            states, expected = theirs(
                mx.concatenate([embedded, states], axis=-1), theirs._shared_kv, mx.array([[len(TOKENS) - 1]])
            )
            chosen = mx.isfinite(ours[0, 0])
            assert chosen.sum().item() == (96 // 12 * TOP if ordered else 96)
            floor = mx.where(chosen, ours[0, 0], expected.min())
            assert logits_gap(floor[None], mx.where(chosen, expected[0, 0], expected.min())[None]) < CLOSE, depth
            token = mx.argmax(expected, axis=-1)


def test_it_stores_nothing_and_one_that_predicts_nothing_is_refused(tmp_path: Path) -> None:
    adapter = adapted()
    head = load_drafter(written(tmp_path / "assistant", assistant_config()), adapter)
    assert isinstance(head, Assistant)
    assert with_draft_head(adapter, head).footprint == adapter.footprint
    with pytest.raises(ModelError, match=r"predicts \d% of 48 tokens"):
        check_draft_head(head, adapter)


@pytest.mark.parametrize(
    ("changes", "lost", "said"),
    [
        ({"head_dim": 16}, None, "the assistant of another model"),
        ({"sliding_window": 24}, None, "the assistant of another model"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, None, "chunked_attention"),
        ({}, "model.layers.1.self_attn.q_proj.weight", r"missing: layers\.1\.self_attn\.q_proj\.weight"),
    ],
)
def test_what_is_no_assistant_of_this_model_is_refused_with_the_reason(
    changes: dict[str, Any], lost: str | None, said: str, tmp_path: Path
) -> None:
    def change(tensors: dict[str, mx.array]) -> None:
        tensors.pop(lost or "", None)

    folder = written(tmp_path / "assistant", assistant_config(), change)
    (folder / "config.json").write_text(json.dumps(assistant_config(**changes)))
    with pytest.raises(ModelError, match=said):
        load_drafter(folder, adapted())


def test_clusters_that_are_no_permutation_of_tokens_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, mx.array]) -> None:
        tensors["masked_embedding.token_ordering"] = mx.full((96,), 96, dtype=mx.int64)

    folder = written(tmp_path / "assistant", assistant_config(ordered=True), change)
    with pytest.raises(ModelError, match="tokens that its model does not have"):
        load_drafter(folder, adapted())
