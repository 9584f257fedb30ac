"""Block drafters (DFlash, DSpark): several layers that propose a whole block of tokens in one pass.

Keys and values of the text are projected from the model's hidden states, of some of its layers together: a token's
depend on its own alone. A block is the newest token with mask tokens behind it, which all see each other and the text.
DSpark corrects each draft token's logits by the one before it. Layers are Qwen 3's, or Gemma 4's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardBatch, Row
from ingot.errors import ModelError
from ingot.models.adapter import ModelAdapter
from ingot.models.checkpoint import read_checkpoint_tensors
from ingot.models.draft_heads.drafter import (
    Drafter,
    load_drafter_tensors,
    logits_by,
    tap_layer_inputs,
    text_config_of,
)
from ingot.models.draft_heads.mtp import HeadKV, prepare_head
from ingot.models.layers.lm_head import embedding_scale_of, lm_head_of
from ingot.upstream import caches, model_classes

LONGEST_BLOCK = 16
"""Most draft tokens of a block."""
_GEMMA = "layers.0.pre_feedforward_layernorm.weight"
_MARKOV, _CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head."


class BlockAttention(nn.Module):
    """Attends from a block to the text and to the whole block."""

    def __init__(self, attention: Any, *, window: int | None, causal: bool, sinks: bool) -> None:
        """`attention` is mlx-lm's; a block sees `window` tokens of a text, or all."""
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = attention.q_proj, attention.k_proj, attention.o_proj
        self.q_norm, self.k_norm, self.rope = attention.q_norm, attention.k_norm, attention.rope
        if "v_proj" in attention:  # else values are keys
            self.v_proj = attention.v_proj
        self._window, self._causal = window, causal
        self._heads, self._kv_heads, self._scale = attention.n_heads, attention.n_kv_heads, attention.scale
        self.attention_sink_bias = mx.zeros((self._heads,)) if sinks else None

    def store(self, x: mx.array, state: AppendState) -> None:
        """Write keys and values of the open batch's tokens, from x [1, tokens, size]."""
        assert state.whole is not None
        keys, values = self._keys_and_values(x.swapaxes(0, 1))
        state.write(self.rope(keys, offset=state.whole.positions)[:, :, 0], values[:, :, 0])

    def __call__(self, x: mx.array, state: AppendState) -> mx.array:
        """Of blocks x [rows, tokens, size], each behind the last token of a row of the open batch."""
        assert state.whole is not None
        [batch] = state.whole.parts
        with state.computing(batch):
            seen, stored = state.keys_and_values()
        lengths = [start + 1 for start in batch.starts]
        rows, width, _ = x.shape
        queries = self.q_norm(self.q_proj(x).reshape(rows, width, self._heads, -1)).swapaxes(1, 2)
        keys, values = self._keys_and_values(x)
        ends = mx.array(lengths, dtype=mx.int32)
        queries, keys = self.rope(queries, offset=ends), self.rope(keys, offset=ends)
        attended = mx.fast.scaled_dot_product_attention(
            queries,
            mx.concatenate([seen.astype(keys.dtype), keys], axis=2),
            mx.concatenate([stored.astype(values.dtype), values], axis=2),
            scale=self._scale,
            mask=self._mask(lengths, seen.shape[2], width),
            sinks=self.attention_sink_bias,
        )
        out: mx.array = self.o_proj(attended.swapaxes(1, 2).reshape(rows, width, -1))
        return out

    def _keys_and_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        keys = self.k_proj(x).reshape(*x.shape[:2], self._kv_heads, -1)
        values = self.v_proj(x).reshape(keys.shape) if "v_proj" in self else keys
        return self.k_norm(keys).swapaxes(1, 2), values.swapaxes(1, 2)

    def _mask(self, lengths: Sequence[int], stored: int, width: int) -> mx.array | None:
        """[rows, 1, width, stored + width]; None where all is seen."""
        window = self._window
        if not self._causal and len(set(lengths)) == 1 and (window is None or stored < window):
            return None
        key, own = mx.arange(stored)[None, None], mx.arange(width)
        ends = mx.array(list(lengths))[:, None, None]
        text = mx.broadcast_to(key < ends, (len(lengths), width, stored))
        block = mx.full((width, width), True)
        if window is not None:
            text = text & (key > ends - window)
        if self._causal:
            block = own[:, None] >= own
            if window is not None:
                text, block = text & (key > ends + own[:, None] - window), block & (own[:, None] < own + window)
        return mx.concatenate([text, mx.broadcast_to(block, (len(lengths), width, width))], axis=-1)[:, None]


class BlockLayer(nn.Module):
    def __init__(self, layer: Any, attention: BlockAttention) -> None:
        """`layer` is Qwen 3's, or Gemma 4's, which has norms behind attention and MLP as well."""
        super().__init__()
        self.self_attn, self.mlp = attention, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        if "pre_feedforward_layernorm" in layer:
            self.pre_feedforward_layernorm = layer.pre_feedforward_layernorm
            self.post_feedforward_layernorm = layer.post_feedforward_layernorm
            self.layer_scalar = layer.layer_scalar

    def __call__(self, x: mx.array, state: AppendState) -> mx.array:
        attended = self.self_attn(self.input_layernorm(x), state)
        if "layer_scalar" not in self:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(attended)
        out: mx.array = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return out * self.layer_scalar


class MarkovHead(nn.Module):
    """Adds to the logits of a token what the token before it says."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, rank), nn.Linear(rank, vocab, bias=False)


class BlockDrafter(Drafter):
    kv: HeadKV = "states"

    def __init__(self, config: Mapping[str, Any], args: Any, layers: list[Any], has: frozenset[str]) -> None:
        """`config` has what `dflash_config` has, too; `has` are the names of its tensors."""
        super().__init__()
        hidden, taps = args.hidden_size, len(config["target_layer_ids"])
        self.size, self._cap = taps * hidden, config.get("final_logit_softcapping")
        self._mask_id = int(config["mask_token_id"])
        self._own_scale = hidden**0.5 if _GEMMA in has else None  # of its own embedding; None: as the model's
        # A DSpark's block says how many it proposes, and its first token proposes the one behind it.
        is_spark = _MARKOV in has
        own_first = int(bool(config.get("sample_from_anchor", True))) if is_spark else 0
        self._skipped = 1 - own_first
        proposed = int(config["block_size"]) - int(not is_spark or bool(config.get("dspark_bonus_anchor")))
        self.longest = min(proposed, LONGEST_BLOCK)
        self.fc = nn.Linear(self.size, hidden, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(hidden, args.rms_norm_eps), nn.RMSNorm(hidden, args.rms_norm_eps)
        self.layers = layers
        if "embed_tokens.weight" in has:
            self.embed_tokens = nn.Embedding(args.vocab_size, hidden)
        if "lm_head.weight" in has:
            self.lm_head = nn.Linear(hidden, args.vocab_size, bias=False)
        if is_spark:
            self.markov_head = MarkovHead(args.vocab_size, int(config.get("markov_rank") or 256))

    def make_cache(self) -> list[Any]:
        """Of layers that see a window of the text, too, all of it is stored."""
        return [caches.KVCache() for _ in self.layers]

    def store(self, hidden: mx.array, states: Sequence[Any]) -> mx.array:
        """Write keys and values of the open batch's tokens, whose hidden states [1, tokens, size] these are."""
        x: mx.array = self.hidden_norm(self.fc(hidden.astype(self.hidden_norm.weight.dtype)))
        for layer, state in zip(self.layers, states, strict=True):
            layer.self_attn.store(x, state)
        return x

    def draft(self, tokens: mx.array, count: int, states: Sequence[Any]) -> mx.array:
        """So many tokens [rows, count] behind each of these [rows], which follow the rows of the open batch."""
        masks = mx.full((tokens.size, count - 1 + self._skipped), self._mask_id, dtype=tokens.dtype)
        logits = self.logits(self.states(mx.concatenate([tokens[:, None], masks], axis=1), states)[:, self._skipped :])
        if "markov_head" not in self:
            return mx.argmax(logits, axis=-1).astype(mx.uint32)
        drafts = [tokens]
        for number in range(count):
            beside = self.markov_head.markov_w2(self.markov_head.markov_w1(drafts[-1]))
            drafts.append(mx.argmax(logits[:, number] + beside, axis=-1).astype(mx.uint32))
        return mx.stack(drafts[1:], axis=1)

    def states(self, block: mx.array, states: Sequence[Any]) -> mx.array:
        """The hidden states of blocks of tokens [rows, width]."""
        x = self.embedded(block)
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, state)
        normed: mx.array = self.norm(x)
        return normed

    def logits(self, hidden: mx.array) -> mx.array:
        logits = self.shared_logits(hidden)
        return logits if self._cap is None else mx.tanh(logits / self._cap) * self._cap

    def share(self, model: nn.Module, *, scaled: bool = True) -> None:
        """As others do, but for what it has itself."""
        super().share(model, scaled=scaled)
        if "embed_tokens" in self:
            own, scale = self.embed_tokens, self._own_scale or embedding_scale_of(model)
            self._embed = lambda tokens: own(tokens) * scale
            if hasattr(lm_head_of(model), "as_linear"):
                self._output = logits_by(own)
        if "lm_head" in self:
            self._output = logits_by(self.lm_head)

    def first_drafts(self, rows: BatchState, row: Row, tokens: list[int], hidden: mx.array) -> mx.array:
        """See `DraftHead`."""
        count = len(tokens) - 1
        with rows.aside([ForwardBatch((row,), count, (0,), (0,))]) as states:
            mx.eval(self.store(hidden[None, :-1], states), rows.pending())
        ends = tuple(range(count))
        with rows.aside([ForwardBatch((row,) * count, 1, ends, ends)]) as states:
            drafts = self.draft(mx.array(tokens[1:], dtype=mx.uint32), 1, states)
        return drafts[:, 0]


def load_block_drafter(
    folder: Path, config: Mapping[str, Any], adapter: ModelAdapter, *, dtype: str | None = None
) -> BlockDrafter:
    """The adapter's model hands over the hidden states that it reads from now on. Raises ModelError where it is not one
    of this model, or of a kind that is not known."""
    named = {name.removeprefix("model."): array for name, array in read_checkpoint_tensors(folder).items()}
    # How sure it says it is decides nothing: what is accepted is counted.
    tensors = {name: array for name, array in named.items() if not name.startswith(_CONFIDENCE)}
    config = {**config, **(config.get("dflash_config") or {})}
    _refuse_other_kinds(config, tensors, folder)
    head = _build_block_drafter(config, adapter, folder, frozenset(tensors))
    load_drafter_tensors(head, tensors, folder)
    head.share(adapter.model)
    tap_layer_inputs([number + 1 for number in config["target_layer_ids"]], adapter)
    prepare_head(head, adapter, dtype, lambda path: True, apart=True)
    return head


def _refuse_other_kinds(config: Mapping[str, Any], tensors: Mapping[str, mx.array], folder: Path) -> None:
    if any(name.startswith("candidate_selector.") for name in tensors):
        raise ModelError(f"{folder.name} is a DFlash 2 drafter, which is not supported; DFlash and DSpark are")
    stated = config.get("hidden_act") or "silu", config.get("markov_head_type") or "vanilla"
    if stated != ("silu", "vanilla"):
        raise ModelError(f"{folder.name} has an activation or a Markov head that is not known: {', '.join(stated)}")


def _build_block_drafter(
    config: Mapping[str, Any], adapter: ModelAdapter, folder: Path, has: frozenset[str]
) -> BlockDrafter:
    family = "gemma4_text" if _GEMMA in has else "qwen3"
    model_class, args_class = model_classes({"model_type": family})
    text = text_config_of(adapter)
    try:
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        args = args_class.from_dict({**_stated(config, family), "layer_types": kinds})
        window = config.get("swa_window_size", config.get("sliding_window"))
        layers = []
        for layer, kind in zip(model_class(args).layers, kinds, strict=True):
            attention = BlockAttention(
                layer.self_attn,
                window=int(window) if kind == "sliding_attention" else None,
                causal=bool(config.get("causal", config.get("is_causal", config.get("dflash_query_causal")))),
                sinks=bool(config.get("attention_sink_bias")),
            )
            attention.rope.traditional = not config.get("rope_is_neox_style", True)
            layers.append(BlockLayer(layer, attention))
        head = BlockDrafter(config, args, layers, has)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder.name}'s config describes no block drafter: {error}") from error
    if head.longest < 1 or not 0 <= head._mask_id < args.vocab_size:
        raise ModelError(f"{folder.name}'s config describes no block drafter: its block or its mask token is wrong")
    if (args.hidden_size, args.vocab_size) != (int(text["hidden_size"]), adapter.vocab):
        raise ModelError(f"{folder.name} drafts for another model: its hidden size or its vocabulary differs")
    return head


def _stated(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The config as mlx-lm's code for layers of this family takes it."""
    if family == "gemma4_text":
        plain = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": False}
        return {**config, **plain, "model_type": family}
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    theta = config.get("rope_theta", rope.get("rope_theta", 1e7))
    own = {"model_type": family, "rope_theta": theta, "rope_scaling": scaling}
    return {"tie_word_embeddings": True, **config, **own}
