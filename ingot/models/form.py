"""What the records of a model, and of a head beside it, look like, found out by making one."""

from __future__ import annotations

import mlx.core as mx

from ingot.cache.attention_state import AppendState
from ingot.cache.batch_state import Rows
from ingot.cache.coded_pages import PageForm
from ingot.cache.forward_batch import Launch, Part
from ingot.cache.layer_state import LayerState
from ingot.cache.packing import Form, loosened
from ingot.cache.records import take
from ingot.models.adapter import Adapter

SAMPLE_TOKENS = 32


def form_of(adapter: Adapter, rows: Rows) -> Form:
    """A record of this model's, to compare others with. Every state has storage afterwards."""
    row = rows.new()
    tokens = mx.array([0] * SAMPLE_TOKENS, dtype=mx.uint32)
    try:
        logits = adapter.run(rows, tokens, [Part((row,), SAMPLE_TOKENS)], [SAMPLE_TOKENS - 1])
        if adapter.head is not None:
            nothing = mx.zeros((1, SAMPLE_TOKENS, adapter.head.size), mx.bfloat16)
            with rows.aside([Launch((row,), SAMPLE_TOKENS, (0,), (0,))]) as beside:
                adapter.head(nothing, tokens[None], beside[0])
        sample = loosened(rows, take(rows, row, 0))
        mx.eval(logits, sample.arrays(), rows.pending())
    finally:
        rows.leave(row)
    groups = (
        (state.group.number, state.window is not None) if isinstance(state, AppendState) else None
        for state in rows.states
    )
    return Form(sample, tuple(groups), tuple(map(_pages, rows.states)))


def _pages(state: LayerState) -> PageForm | None:
    coded = state.stored.coded if isinstance(state, AppendState) else None
    return None if coded is None else coded.form
