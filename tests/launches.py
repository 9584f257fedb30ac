"""Forward passes of a model on its own, run to their end: no engine, no sampling."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.batch_state import Rows
from ingot.cache.forward_batch import Part, Row
from ingot.models.adapter import Adapter


def computed(adapter: Adapter, rows: Rows, row: Row, tokens: Sequence[int]) -> mx.array:
    """Logits [tokens, vocab] after each of a row's next tokens, in one launch."""
    return _run(adapter, rows, tokens, [Part((row,), len(tokens))], None)


def computed_last(adapter: Adapter, rows: Rows, row: Row, tokens: Sequence[int]) -> mx.array:
    """Logits [1, vocab] after the last of them."""
    return _run(adapter, rows, tokens, [Part((row,), len(tokens))], [len(tokens) - 1])


def decoded(adapter: Adapter, rows: Rows, live: Sequence[Row], tokens: Sequence[int]) -> mx.array:
    """Logits [rows, vocab] after one more token of each row, in one launch."""
    return _run(adapter, rows, tokens, [Part(tuple(live), 1)], None)


def prompt_logits(adapter: Adapter, tokens: Sequence[int]) -> mx.array:
    """Logits [tokens, vocab] after each token of a prompt, in one launch of a row of its own."""
    rows = adapter.new_rows()
    return computed(adapter, rows, rows.new(), tokens)


def _run(
    adapter: Adapter, rows: Rows, tokens: Sequence[int], parts: Sequence[Part], at: Sequence[int] | None
) -> mx.array:
    logits = adapter.run(rows, mx.array(list(tokens)), parts, at)
    mx.eval(logits, rows.pending())
    return logits
