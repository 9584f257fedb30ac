"""EAGLE-3 drafts: tiny random ones, stored as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ingot.cache.forward_batch import ForwardPart
from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.draft_heads.eagle import load_eagle
from ingot.models.draft_heads.mtp import check_draft_head, draft_head_rows, with_draft_head
from ingot.models.probe import logits_gap
from ingot.upstream import create_attention_mask
from tests import tiny
from tests.engines import GPU

TOKENS = [5, 17, 3, 29, 11, 23, 7, 19, 2, 13, 31, 8]
CLOSE, SIZE, KNOWN = 2e-2, 32, 40
CONFIG: dict[str, Any] = {
    **tiny.CONFIGS["llama"],
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": KNOWN,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


def adapted(device: Device | None = None) -> ModelAdapter:
    return adapt_model(tiny.build("llama"), tiny.CONFIGS["llama"], device or current_device(), apart=True)


def random_tensors(*, embeds: bool) -> dict[str, mx.array]:
    mx.random.seed(7)

    def matrix(rows: int, columns: int) -> mx.array:
        return 0.2 * mx.random.normal((rows, columns))

    attention = {"q": (32, 64), "k": (16, 64), "v": (16, 64), "o": (32, 32)}
    mlp = {"gate": (48, 32), "up": (48, 32), "down": (32, 48)}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    return {
        "fc.weight": matrix(SIZE, 3 * SIZE),
        "lm_head.weight": matrix(KNOWN, SIZE),
        **{f"midlayer.self_attn.{name}_proj.weight": matrix(*shape) for name, shape in attention.items()},
        **{f"midlayer.mlp.{name}_proj.weight": matrix(*shape) for name, shape in mlp.items()},
        **{f"{name}.weight": 1 + 0.1 * mx.random.normal((SIZE,)) for name in norms},
        "d2t": mx.arange(KNOWN, dtype=mx.int32) + 3,  # draft token n is token 2 n + 3
        "t2d": mx.zeros(tiny.VOCAB, dtype=mx.bool_),
        **({"embed_tokens.weight": matrix(tiny.VOCAB, SIZE)} if embeds else {}),
    }


def written(folder: Path, tensors: dict[str, mx.array], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def inputs_of_layers(tokens: list[int]) -> mx.array:
    """What each of the model's three layers is given, side by side, by mlx-lm's own code."""
    model = tiny.build("llama").model
    hidden, given = model.embed_tokens(mx.array([tokens])), []
    for layer in model.layers:
        given.append(hidden)
        hidden = layer(hidden, create_attention_mask(hidden))
    return mx.concatenate(given, axis=-1)


def expected(tensors: dict[str, mx.array], states: mx.array, tokens: list[int], *, norm_first: bool) -> mx.array:
    """The draft's states, by the arithmetic of its paper."""

    def normed(name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, tensors[f"{name}.weight"], 1e-5)

    def heads(name: str, x: mx.array) -> mx.array:
        projected = x @ tensors[f"midlayer.self_attn.{name}_proj.weight"].T
        return projected.reshape(1, x.shape[1], -1, 8).swapaxes(1, 2)

    embedding = tensors.get("embed_tokens.weight", tiny.build("llama").model.embed_tokens.weight)
    hidden = states @ tensors["fc.weight"].T if states.shape[-1] == 3 * SIZE else states
    beside = normed("midlayer.hidden_norm", hidden)
    pair = mx.concatenate([normed("midlayer.input_layernorm", embedding[mx.array([tokens])]), beside], axis=-1)
    turned = [mx.fast.rope(heads(name, pair), 8, traditional=False, base=10000.0, scale=1.0, offset=0) for name in "qk"]
    attended = mx.fast.scaled_dot_product_attention(*turned, heads("v", pair), scale=8**-0.5, mask="causal")
    out = attended.swapaxes(1, 2).reshape(1, len(tokens), -1) @ tensors["midlayer.self_attn.o_proj.weight"].T
    hidden = (beside if norm_first else hidden) + out
    x = normed("midlayer.post_attention_layernorm", hidden)
    gate, up, down = (tensors[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    gated = x @ gate.T
    return hidden + (gated * mx.sigmoid(gated) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("device", [None, GPU], ids=["here", "as-on-a-gpu"])
@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_draft_computes_what_its_layer_does_and_goes_on_from_its_own_states(
    device: Device | None, embeds: bool, norm_first: bool, tmp_path: Path
) -> None:
    tensors, adapter = random_tensors(embeds=embeds), adapted(device)
    head = load_eagle(written(tmp_path / "draft", tensors, norm_before_residual=norm_first), adapter)
    rows = adapter.new_batch_state()
    _, hidden = adapter.run(rows, mx.array(TOKENS), [ForwardPart((rows.new(),), len(TOKENS))], [0], hidden=True)
    aux = inputs_of_layers(TOKENS)
    assert logits_gap(hidden, aux[0]) < CLOSE
    rows = draft_head_rows(head, adapter)
    row = rows.new()
    with rows.launch([ForwardPart((row,), len(TOKENS) - 1)]) as layers:
        states = head(hidden[None, :-1], mx.array([TOKENS[1:]]), layers[0])
    wanted = expected(tensors, aux[:, :-1], TOKENS[1:], norm_first=norm_first)
    assert logits_gap(states[0], wanted[0]) < CLOSE
    assert head(states[:, -1:], mx.array([[4]])).shape == (1, 1, SIZE)
    alone = expected(tensors, wanted[:, -1:], [4], norm_first=norm_first)
    assert logits_gap(head(wanted[:, -1:], mx.array([[4]]))[0], alone[0]) < CLOSE


def test_draft_tokens_are_tokens_of_the_model_in_the_heads_own_vocabulary(tmp_path: Path) -> None:
    tensors, adapter = random_tensors(embeds=False), adapted()
    head = load_eagle(written(tmp_path / "draft", tensors), adapter)
    states = mx.random.normal((1, 5, SIZE))
    logits = head.logits(states)
    known = mx.fast.rms_norm(states, tensors["norm.weight"], 1e-5) @ tensors["lm_head.weight"].T
    assert logits.shape == (1, 5, tiny.VOCAB)
    assert logits_gap(logits[0, :, 3 : 2 * KNOWN + 3 : 2], known[0]) < CLOSE
    assert mx.argmax(logits, axis=-1).tolist() == (2 * mx.argmax(known, axis=-1) + 3).tolist()
    assert not mx.isfinite(logits[..., 0]).any().item()


def test_a_head_counts_in_its_models_kv_and_one_that_predicts_nothing_is_refused(tmp_path: Path) -> None:
    adapter = adapted()
    head = load_eagle(written(tmp_path / "draft", random_tensors(embeds=False)), adapter)
    before, after = adapter.footprint.groups[0][1], with_draft_head(adapter, head).footprint.groups[0][1]
    assert after > before
    with pytest.raises(ModelError, match=r"predicts \d% of 48 tokens"):
        check_draft_head(head, adapter)


@pytest.mark.parametrize(
    ("changes", "lost", "said"),
    [
        ({"norm_before_fc": True}, None, "norm_before_fc"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, None, "the model has 3"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, None, "the model has 3"),
        ({"model_type": "unheard-of"}, None, "no known layer"),
        ({}, "fc.weight", r"missing: fc\.weight"),
        ({}, "d2t", "has 40 of 96 tokens"),
    ],
)
def test_what_is_no_draft_of_this_model_is_refused_with_the_reason(
    changes: dict[str, Any], lost: str | None, said: str, tmp_path: Path
) -> None:
    tensors = {name: array for name, array in random_tensors(embeds=False).items() if name != lost}
    with pytest.raises(ModelError, match=said):
        load_eagle(written(tmp_path / "draft", tensors, **changes), adapted())


def test_a_table_that_names_tokens_that_do_not_exist_is_refused(tmp_path: Path) -> None:
    tensors = {**random_tensors(embeds=False), "d2t": mx.full((KNOWN,), 90, dtype=mx.int32)}
    with pytest.raises(ModelError, match="tokens that its model does not have"):
        load_eagle(written(tmp_path / "draft", tensors), adapted())


@pytest.mark.skipif(
    not native.available() or current_device().kind != "cpu", reason="layers are fused by native kernels"
)
def test_layers_that_are_one_operation_have_no_states_between_them(tmp_path: Path) -> None:
    fused = adapt_model(tiny.build("llama"), tiny.CONFIGS["llama"], current_device())
    with pytest.raises(ModelError, match="load it with separate layers"):
        load_eagle(written(tmp_path / "draft", random_tensors(embeds=False)), fused)
