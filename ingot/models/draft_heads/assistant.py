"""Gemma 4's assistants: small drafters whose layers have queries alone, and attend to keys and values of their model.

Each layer reads what the model's last layer of the same kind, of those that store any, has stored. All draft tokens
have the position of the last token that the model computed. Vocabularies may be sorted into clusters, so that only the
likeliest clusters' tokens are scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.adapter import ModelAdapter
from ingot.models.checkpoint import read_checkpoint_tensors
from ingot.models.draft_heads.drafter import Drafter, load_drafter_tensors, logits_by, text_config_of
from ingot.models.draft_heads.mtp import ChainedHead, HeadKV, prepare_head
from ingot.upstream import create_attention_mask, model_classes

LAYERS_OF = "gemma4_text"
_ORDER = "masked_embedding.token_ordering"
_CENTROIDS = "masked_embedding.centroids.weight"


class Assistant(Drafter, ChainedHead):
    """Called like an `MtpHead`. What it returns has its own hidden states behind those that replace the model's."""

    kv: HeadKV = "model"

    def __init__(self, config: Mapping[str, Any], args: Any, layers: list[Any], reads: Mapping[str, int]) -> None:
        """`reads` are the model's layers, by their kinds."""
        super().__init__()
        size = args.hidden_size
        self.size = int(config["backbone_hidden_size"])
        self.reads = tuple(reads.values())
        self._kinds, self._window = tuple(reads), args.sliding_window
        self._ids: mx.array | None = None  # [clusters, tokens of each]
        self._chosen = int(config.get("centroid_intermediate_top_k") or 32)
        self.pre_projection = nn.Linear(2 * self.size, size, bias=False)
        self.post_projection = nn.Linear(size, self.size, bias=False)
        self.embed_tokens = nn.Embedding(args.vocab_size, size)
        self.layers, self.norm = layers, nn.RMSNorm(size, args.rms_norm_eps)
        if config.get("use_ordered_embeddings"):
            self.centroids = nn.Linear(size, int(config.get("num_centroids") or 2048), bias=False)
        elif not config.get("tie_word_embeddings", True):
            self.lm_head = nn.Linear(size, args.vocab_size, bias=False)

    def order_vocabulary(self, ids: mx.array | None) -> None:
        """The tokens of the first cluster, of the second and so on. Raises ModelError."""
        if "centroids" not in self:
            return
        clusters, vocab = self.centroids.weight.shape[0], self.embed_tokens.weight.shape[0]
        if ids is None or ids.size != vocab or vocab % clusters or not 0 < self._chosen <= clusters:
            raise ModelError(f"The draft head does not sort {vocab} tokens into {clusters} clusters ({_ORDER})")
        ids = ids.reshape(-1).astype(mx.int32)
        if mx.any((ids < 0) | (ids >= vocab)).item():
            raise ModelError(f"The draft head's table {_ORDER} names tokens that its model does not have")
        self._ids = ids.reshape(clusters, -1)

    def make_cache(self) -> list[Any]:
        return []

    def __call__(self, hidden: mx.array, tokens: mx.array, cache: Any = None) -> mx.array:
        """`cache` has the states of the layers that it `reads`."""
        embedded = self.embedded(tokens)
        pair = mx.concatenate([embedded, hidden[..., : self.size].astype(embedded.dtype)], axis=-1)
        x, states = self.pre_projection(pair), dict(zip(self._kinds, cache, strict=True))
        windows = {kind: None if kind == "full_attention" else self._window for kind in states}
        masks = {kind: create_attention_mask(x, state, window_size=windows[kind]) for kind, state in states.items()}
        for layer in self.layers:
            kind = layer.layer_type
            x, _, _ = layer(x, masks[kind], None, shared_kv=states[kind], offset=None)
        x = self.norm(x)
        return mx.concatenate([self.post_projection(x), x], axis=-1)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [..., vocab]: -inf for tokens in clusters that are not likely."""
        own = hidden[..., self.size :]
        if self._ids is None:
            found: mx.array = self.lm_head(own) if "lm_head" in self else logits_by(self.embed_tokens)(own)
            return found
        likely = mx.argpartition(-self.centroids(own), self._chosen - 1, axis=-1)[..., : self._chosen]
        ids = self._ids[likely].flatten(-2)
        scores = (self.embed_tokens(ids) @ own[..., None])[..., 0]
        logits = mx.full((*own.shape[:-1], self._ids.size), -mx.inf, scores.dtype)
        return mx.put_along_axis(logits, ids, scores, axis=-1)


def load_assistant(
    folder: Path, config: Mapping[str, Any], adapter: ModelAdapter, *, dtype: str | None = None
) -> Assistant:
    """Raises ModelError where it is not one of this model."""
    tensors = {name: array for name, array in read_checkpoint_tensors(folder).items() if name != _ORDER}
    tied = config.get("tie_word_embeddings", True) or config.get("use_ordered_embeddings")
    head = _build_assistant(config, adapter, folder)
    head.share(adapter.model)
    named = {
        name.removeprefix("model.").replace(_CENTROIDS, "centroids.weight"): array
        for name, array in tensors.items()
        if not (tied and name == "lm_head.weight")
    }
    load_drafter_tensors(head, named, folder)
    head.order_vocabulary(read_checkpoint_tensors(folder).get(_ORDER))
    prepare_head(head, adapter, dtype, lambda path: True, apart=True)
    return head


def _build_assistant(config: Mapping[str, Any], adapter: ModelAdapter, folder: Path) -> Assistant:
    model_class, args_class = model_classes({"model_type": LAYERS_OF})
    try:
        ours, theirs = (args_class.from_dict(dict(text)) for text in (config["text_config"], text_config_of(adapter)))
        stored = theirs.layer_types[: theirs.num_hidden_layers - theirs.num_kv_shared_layers]
        reads = {kind: len(stored) - 1 - stored[::-1].index(kind) for kind in dict.fromkeys(ours.layer_types)}
        ours.num_kv_shared_layers = 0
        made = model_class(ours).layers
        ours.num_kv_shared_layers = ours.num_hidden_layers
        layers = [type(layer)(ours, number) for number, layer in enumerate(made)]
        head = Assistant(config, ours, layers, reads)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder.name} is no assistant of a model of type {adapter.family}: {error}") from error
    differs = (head.size, ours.vocab_size) != (theirs.hidden_size, theirs.vocab_size)
    if differs or any(_stored_heads(ours, kind) != _stored_heads(theirs, kind) for kind in reads):
        raise ModelError(f"{folder.name} is the assistant of another model: it reads states of other sizes")
    return head


def _stored_heads(args: Any, kind: str) -> tuple[int, ...]:
    """How many heads of keys such layers store, of which size, and of how many tokens."""
    if kind == "sliding_attention":
        return args.num_key_value_heads, args.head_dim, args.sliding_window
    few = args.attention_k_eq_v and args.num_global_key_value_heads is not None
    heads = args.num_global_key_value_heads if few else args.num_key_value_heads
    return heads, args.global_head_dim or args.head_dim
