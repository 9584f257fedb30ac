"""EAGLE-3: a draft head of one layer that reads the inputs of three layers of its model, from a checkpoint of its own.

Its layer sees each token's embedding and the hidden state before it. Further draft tokens follow by its own hidden
states, which are as wide as one of the three. Its vocabulary may be a part of the model's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.adapter import ModelAdapter
from ingot.models.checkpoint import read_checkpoint_tensors
from ingot.models.draft_heads.drafter import (
    Drafter,
    load_drafter_tensors,
    read_drafter_config,
    tap_layer_inputs,
    text_config_of,
)
from ingot.models.draft_heads.mtp import ChainedHead, prepare_head
from ingot.upstream import caches, create_attention_mask, model_classes

_TAPS = "eagle_aux_hidden_state_layer_ids"
_RENAMED = {"midlayer.": "layers.0."}
_MAPS = ("d2t", "t2d")


class EagleLayer(nn.Module):
    """A decoder layer whose attention takes an embedding and a hidden state, each normed and concatenated."""

    def __init__(self, block: Any, size: int, eps: float, *, norm_first: bool) -> None:
        """`norm_first`: the normed hidden state is what the layer's output is added to."""
        super().__init__()
        self._norm_first = norm_first
        self.self_attn, self.mlp = block.self_attn, block.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = self.self_attn[name]
            self.self_attn[name] = nn.Linear(2 * size, narrow.weight.shape[0], bias="bias" in narrow)
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def __call__(self, embedded: mx.array, hidden: mx.array, mask: Any, cache: Any) -> mx.array:
        normed = self.hidden_norm(hidden)
        pair = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        states = (normed if self._norm_first else hidden) + self.self_attn(pair, mask, cache)
        out: mx.array = states + self.mlp(self.post_attention_layernorm(states))
        return out


class EagleHead(Drafter, ChainedHead):
    """Called like an `MtpHead`, with hidden states of the model or with its own."""

    def __init__(self, config: Mapping[str, Any], block: Any, *, vocab: int, target_size: int, embeds: bool) -> None:
        """`block` is a layer of mlx-lm's; `embeds`: it has an embedding of its own."""
        super().__init__()
        size, eps = int(config["hidden_size"]), float(config.get("rms_norm_eps") or 1e-6)
        own_vocab = int(config.get("draft_vocab_size") or vocab)
        self.size, self._vocab = 3 * target_size, vocab
        self._ids: mx.array | None = None  # the model's token ids, by its own
        self.fc = nn.Linear(self.size, size, bias=False)
        self.layers = [EagleLayer(block, size, eps, norm_first=bool(_config_value(config, "norm_before_residual")))]
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, own_vocab, bias=False)
        if embeds:
            self.embed_tokens = nn.Embedding(vocab, size)

    def map_vocabulary(self, offsets: mx.array | None) -> None:
        """A token id of its own and the offset there are the model's id. Raises ModelError."""
        own_vocab = self.lm_head.weight.shape[0]
        if offsets is None and own_vocab != self._vocab:
            raise ModelError(
                f"The draft head has {own_vocab} of {self._vocab} tokens and does not say which (d2t is missing)"
            )
        if offsets is None:
            return
        ids = mx.arange(own_vocab) + offsets.astype(mx.int32)
        if offsets.shape != (own_vocab,) or mx.any((ids < 0) | (ids >= self._vocab)).item():
            raise ModelError("The draft head's table d2t names tokens that its model does not have")
        self._ids = ids

    def make_cache(self) -> list[Any]:
        return [caches.KVCache()]

    def __call__(self, hidden: mx.array, tokens: mx.array, cache: Any = None) -> mx.array:
        """See `MtpHead`. Hidden states are three of the model's, concatenated [1, T, 3 * its size], or its own."""
        embedded = self.embed_tokens(tokens) if "embed_tokens" in self else self.embedded(tokens)
        states = hidden.astype(embedded.dtype)
        if hidden.shape[-1] == self.size:
            states = self.fc(states)
        mask = create_attention_mask(states, cache)
        out: mx.array = self.layers[0](embedded, states, mask, cache)
        return out

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [..., vocab]: -inf for tokens that are not in its own vocabulary."""
        own: mx.array = self.lm_head(self.norm(hidden))
        if self._ids is None:
            return own
        logits = mx.full((*own.shape[:-1], self._vocab), -mx.inf, own.dtype)
        logits[..., self._ids] = own
        return logits


def load_eagle(folder: Path, adapter: ModelAdapter, *, dtype: str | None = None) -> EagleHead:
    """The draft head in `folder`; the adapter's model hands over the hidden states that it reads from now on.

    Raises ModelError where it is no EAGLE-3 head, or not one of this model.
    """
    config = read_drafter_config(folder)
    if _config_value(config, "norm_before_fc"):
        raise ModelError(
            f"{folder.name} normalises hidden states before it concatenates them (norm_before_fc): not supported yet"
        )
    tensors = {_current_tensor_name(name): array for name, array in read_checkpoint_tensors(folder).items()}
    head = _build_eagle_head(config, adapter, embeds="embed_tokens.weight" in tensors)
    offsets, own = tensors.get("d2t"), {name: array for name, array in tensors.items() if name not in _MAPS}
    load_drafter_tensors(head, own, folder)
    head.map_vocabulary(offsets)
    count = len(adapter.model.layers)
    numbers = _config_value(config, _TAPS) or [2, count // 2, count - 3]
    if len(numbers) != 3 or count in numbers:
        raise ModelError(f"The draft head reads the layers {numbers}, and the model has {count}")
    tap_layer_inputs(numbers, adapter)
    prepare_head(head, adapter, dtype, lambda path: True)
    return head


def _build_eagle_head(config: dict[str, Any], adapter: ModelAdapter, *, embeds: bool) -> EagleHead:
    alone = {**copy.deepcopy(config), "num_hidden_layers": 1, "vocab_size": adapter.vocab}
    try:
        model_class, args_class = model_classes(config=alone)
        block = model_class(args_class.from_dict(alone)).layers[0]
        size = int(text_config_of(adapter)["hidden_size"])
        head = EagleHead(config, block, vocab=adapter.vocab, target_size=size, embeds=embeds)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"The draft head's config describes no known layer: {error}") from error
    if not embeds:
        head.share(adapter.model, scaled=False)
    return head


def _config_value(config: Mapping[str, Any], key: str) -> Any:
    """At the top of the config, or in a section of its own."""
    return config.get(key, (config.get("eagle_config") or {}).get(key))


def _current_tensor_name(name: str) -> str:
    for old, new in _RENAMED.items():
        name = name.replace(old, new, 1) if name.startswith(old) else name
    return name
