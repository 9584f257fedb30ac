"""The MTP head of a shipped hybrid, run plainly in mlx: how often the model agrees with its guess."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from foundry.rows import lesson, written
from ingot.kernels.device import current_device
from ingot.models.precision import settle_precision
from ingot.upstream import import_upstream, load_model


def acceptance(folder: Path, style: str, seeds: Iterable[int]) -> float:
    """Over the answers of held-out chat: the share of tokens where the head's likeliest is the model's likeliest."""
    model, _ = load_model(folder)
    settle_precision(model, current_device(), None)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    head = Head(model.language_model.args, weights)
    agreed = count = 0
    for seed in seeds:
        asked, answer = written(lesson(seed, held_out=True), style)
        chosen, guessed = drafts(model, head, asked + answer)
        first = len(asked)
        same = guessed[first - 2 : -1] == chosen[first - 1 : -1]
        agreed, count = agreed + int(mx.sum(same)), count + same.size
    return agreed / count


def drafts(model: Any, head: Head, tokens: list[int]) -> tuple[mx.array, mx.array]:
    """At each place, the token that the model puts next; and from the second on, what the head had guessed for it.

    The guess at place i comes from the hidden state there and token i + 1, and is about token i + 2.
    """
    inputs = mx.array([tokens])
    text = model.language_model
    hidden = text.model(inputs)
    embedded = text.model.embed_tokens(inputs[:, 1:])
    chosen = mx.argmax(text.model.embed_tokens.as_linear(hidden), axis=-1)[0]
    guessed = mx.argmax(text.model.embed_tokens.as_linear(head(hidden[:, :-1], embedded)), axis=-1)[0]
    return chosen, guessed


class Head(nn.Module):
    """One full-attention layer over the next token's embedding and the hidden state, both normed."""

    def __init__(self, args: Any, weights: dict[str, mx.array]) -> None:
        super().__init__()
        family = import_upstream("mlx_lm.models.qwen3_5")
        width = args.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, args.rms_norm_eps)
        self.pre_fc_norm_embedding = nn.RMSNorm(width, args.rms_norm_eps)
        self.layers = [family.DecoderLayer(args, args.full_attention_interval - 1)]
        self.norm = nn.RMSNorm(width, args.rms_norm_eps)
        own = {name.removeprefix("mtp."): array for name, array in weights.items() if name.startswith("mtp.")}
        # Norm weights are stored as their difference from one.
        self.load_weights([(name, array + 1 if "norm" in name else array) for name, array in own.items()])

    def __call__(self, hidden: mx.array, embedded: mx.array) -> mx.array:
        pair = mx.concatenate([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], axis=-1)
        states = self.layers[0](self.fc(pair), mask="causal")
        return self.norm(states)
