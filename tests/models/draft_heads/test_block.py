"""Block drafters: tiny random ones of DFlash's and DSpark's kinds, held to mlx-vlm's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from ingot.cache.forward_batch import ForwardBatch, ForwardPart
from ingot.errors import ModelError
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.draft_heads.loading import drafter_kind, load_drafter, taps_layers
from ingot.models.draft_heads.mtp import check_draft_head, with_draft_head
from ingot.models.probe import logits_gap
from ingot.upstream import create_attention_mask, import_upstream
from tests import tiny
from tests.engines import acting_as

TOKENS = [5, 17, 3, 29, 11, 23, 7, 19, 2, 13, 31, 8, 40, 41, 9, 77, 50, 6, 1, 90]
SHORT = 8
CLOSE = 2e-2
SIZE = 32
TAPS = [0, 2]
KINDS = {"dflash": "qwen3_dflash", "dspark": "dspark", "gemma": "gemma4_dspark"}
ROPES = {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "proportional"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "causal": {"dflash_config": {"causal": True, "attention_sink_bias": True}},
}


def drafter_config(kind: str, **changes: Any) -> dict[str, Any]:
    inside = {"mask_token_id": 95, "target_layer_ids": TAPS, "num_target_layers": 3}
    if kind != "dflash":
        inside |= {"projector_type": "dspark", "markov_rank": 8, "enable_confidence_head": True}
    inside |= changes.pop("dflash_config", {})
    if kind == "gemma":  # which has it all at the top
        changes |= {"model_type": "gemma4_text", "global_head_dim": 16, "num_global_key_value_heads": 1, **inside}
        changes |= {
            "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0,
            "hidden_act": None,
            "rope_parameters": ROPES,
        }
    return {
        **{"model_type": "qwen3", "hidden_size": SIZE, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5},
        **{"vocab_size": tiny.VOCAB, "max_position_embeddings": 512, "rope_theta": 10000.0, "block_size": 6},
        **{"hidden_act": "silu", "dflash_config": inside, **changes},
    }


def reference(kind: str, config: dict[str, Any]) -> Any:
    """mlx-vlm's drafter, with random weights."""
    module = import_upstream(f"mlx_vlm.speculative.drafters.{KINDS[kind]}")
    mx.random.seed(5)
    model = module.Model(module.ModelConfig.from_dict(config))
    if kind == "gemma":  # one product for all layers' keys and values needs values of their own, which it lacks
        model._project_context_kv = lambda hidden: None

    def widened(path: str, weight: mx.array) -> mx.array:
        return (
            1 + 0.1 * mx.random.normal(weight.shape)
            if "norm" in path
            else weight + 0.2 * mx.random.normal(weight.shape)
        )

    model.update(tree_map_with_path(widened, model.parameters()))
    return model


def written(folder: Path, kind: str, lost: str = "", **changes: Any) -> Path:
    config = drafter_config(kind, **changes)
    tensors: dict[str, mx.array] = dict(tree_flatten(reference(kind, config).parameters()))  # type: ignore[arg-type]
    tensors.pop(lost, None)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adapted(device: Device | None = None) -> ModelAdapter:
    return adapt_model(tiny.build("llama"), tiny.CONFIGS["llama"], device or current_device(), apart=True)


def outputs_of_layers(tokens: list[int]) -> mx.array:
    """Behind the model's layers that a drafter reads, side by side, by mlx-lm's own code."""
    model = tiny.build("llama").model
    hidden, given = model.embed_tokens(mx.array([tokens])), []
    for layer in model.layers:
        hidden = layer(hidden, create_attention_mask(hidden))
        given.append(hidden)
    return mx.concatenate([given[number] for number in TAPS], axis=-1)


def expected_block(model: Any, target: Any, newest: int, hidden: mx.array, width: int) -> mx.array:
    """mlx-vlm's logits of a block behind a text."""
    if model.embed_tokens is None:
        model.embed_tokens, model.lm_head, model.embed_scale = target.model.embed_tokens, target.lm_head, 1.0
    block = mx.array([[newest, *[model.config.mask_token_id] * (width - 1)]])
    logits: mx.array = model._logits(model._hidden(block, hidden, model.make_cache()))
    return logits


@pytest.mark.parametrize("rules", ["cpu", "metal", "cuda"])
@pytest.mark.parametrize(
    ("kind", "variant"),
    [("gemma", "plain"), *((kind, variant) for kind in ("dflash", "dspark") for variant in VARIANTS)],
)
def test_blocks_behind_texts_of_two_lengths_have_the_logits_of_mlx_vlms(
    kind: str, variant: str, rules: str, tmp_path: Path
) -> None:
    changes = {name: dict(each) if isinstance(each, dict) else each for name, each in VARIANTS[variant].items()}
    folder = written(tmp_path / "draft", kind, **changes)
    assert drafter_kind(folder) == "block" and taps_layers(folder)
    with acting_as(rules):
        adapter = adapted()
        head: Any = load_drafter(folder, adapter)
        adapter = with_draft_head(adapter, head)
        rows = adapter.new_batch_state()
        both, lengths = (rows.new(), rows.new()), (len(TOKENS), SHORT)
        _, hidden = adapter.run(
            rows,
            mx.array(TOKENS + TOKENS[:SHORT]),
            [ForwardPart((row,), length) for row, length in zip(both, lengths, strict=True)],
            [0],
            hidden=True,
        )
        assert logits_gap(hidden[: len(TOKENS)], outputs_of_layers(TOKENS)[0]) < CLOSE
        # In pieces, as a text is computed.
        for begins, ends in (((0, 0), (13, 3)), ((13, 3), lengths)):
            parts = [
                ForwardBatch((row,), end - at, (at,), (at,)) for row, at, end in zip(both, begins, ends, strict=True)
            ]
            pieces = [hidden[begins[0] : ends[0]], hidden[len(TOKENS) + begins[1] : len(TOKENS) + ends[1]]]
            with rows.aside(parts) as states:
                mx.eval(head.store(mx.concatenate(pieces)[None], states), rows.pending())
        last = tuple(length - 1 for length in lengths)
        block = mx.array([[44, *[95] * 3], [45, *[95] * 3]], dtype=mx.uint32)
        with rows.aside([ForwardBatch(both, 1, last, last)]) as states:
            found = head.logits(head.states(block, states))
            drafts = head.draft(block[:, 0], 3, states)
        mx.eval(found, drafts)
        theirs, target = reference(kind, drafter_config(kind, **VARIANTS[variant])), tiny.build("llama")
        exact = outputs_of_layers(TOKENS)
        for number, length in enumerate(lengths):
            newest = 44 + number
            expected = expected_block(theirs, target, newest, exact[:, :length], 4)
            assert logits_gap(found[number], expected[0]) < CLOSE, length
            width = 4 if kind == "dflash" else 3
            logits = expected_block(theirs, target, newest, exact[:, :length], width)
            check_drafts(theirs, newest, logits[0, -3:], drafts[number])


def check_drafts(theirs: Any, newest: int, logits: mx.array, drafts: mx.array) -> None:
    """Each draft token is as likely as any by mlx-vlm's code, given those before it."""
    if hasattr(theirs, "markov_head"):
        logits = theirs.markov_head.apply_step_logits(logits, mx.array([newest, *drafts.tolist()[:-1]]))  # type: ignore[misc]
    chosen = mx.take_along_axis(logits, drafts[:, None], axis=-1)[:, 0]
    assert mx.all(chosen > mx.max(logits, axis=-1) - CLOSE * (logits.max() - logits.min())).item()


def test_its_kv_counts_in_its_models_and_one_that_predicts_nothing_is_refused(tmp_path: Path) -> None:
    adapter = adapted()
    head = load_drafter(written(tmp_path / "draft", "dflash"), adapter)
    before, after = adapter.footprint.groups[0][1], with_draft_head(adapter, head).footprint.groups[0][1]
    assert after > before
    with pytest.raises(ModelError, match=r"predicts \d% of 48 tokens"):
        check_draft_head(head, adapter)


@pytest.mark.parametrize(
    ("kind", "lost", "changes", "said"),
    [
        ("dflash", "", {"dflash_config": {"target_layer_ids": [0, 9]}}, "the model has 3"),
        ("dflash", "", {"dflash_config": {"mask_token_id": 96}}, "its mask token is wrong"),
        ("dflash", "", {"block_size": 1}, "its block or"),
        ("dflash", "", {"hidden_act": "gelu"}, "not known: gelu"),
        ("dflash", "", {"vocab_size": 97}, "drafts for another model"),
        ("dflash", "layers.1.mlp.up_proj.weight", {}, r"missing: layers\.1\.mlp\.up_proj\.weight"),
        ("dspark", "markov_head.markov_w2.weight", {}, r"missing: markov_head\.markov_w2\.weight"),
    ],
)
def test_what_is_no_drafter_of_this_model_is_refused_with_the_reason(
    kind: str, lost: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "draft", kind, lost)
    (folder / "config.json").write_text(json.dumps(drafter_config(kind, **changes)))
    with pytest.raises(ModelError, match=said):
        load_drafter(folder, adapted())


def test_dflash_2_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = written(tmp_path / "draft", "dflash")
    tensors = {**mx.load(str(folder / "model.safetensors")), "candidate_selector.hidden_projection.weight": mx.ones(2)}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises(ModelError, match="DFlash 2"):
        load_drafter(folder, adapted())
