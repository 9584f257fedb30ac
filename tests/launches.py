"""Forward passes of a model on its own, run to their end: no engine, no sampling."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.models.adapter import ModelAdapter


def computed(adapter: ModelAdapter, rows: BatchState, row: Row, tokens: Sequence[int]) -> mx.array:
    """Logits [tokens, vocab] after each of a row's next tokens, in one launch."""
    return _run(adapter, rows, tokens, [ForwardPart((row,), len(tokens))], None)


def computed_last(adapter: ModelAdapter, rows: BatchState, row: Row, tokens: Sequence[int]) -> mx.array:
    """Logits [1, vocab] after the last of them."""
    return _run(adapter, rows, tokens, [ForwardPart((row,), len(tokens))], [len(tokens) - 1])


def decoded(adapter: ModelAdapter, rows: BatchState, live: Sequence[Row], tokens: Sequence[int]) -> mx.array:
    """Logits [rows, vocab] after one more token of each row, in one launch."""
    return _run(adapter, rows, tokens, [ForwardPart(tuple(live), 1)], None)


def prompt_logits(adapter: ModelAdapter, tokens: Sequence[int]) -> mx.array:
    """Logits [tokens, vocab] after each token of a prompt, in one launch of a row of its own."""
    rows = adapter.new_batch_state()
    return computed(adapter, rows, rows.new(), tokens)


def _run(
    adapter: ModelAdapter,
    rows: BatchState,
    tokens: Sequence[int],
    parts: Sequence[ForwardPart],
    at: Sequence[int] | None,
) -> mx.array:
    logits = adapter.run(rows, mx.array(list(tokens)), parts, at)
    mx.eval(logits, rows.pending())
    return logits
