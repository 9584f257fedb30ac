"""All draft tokens of a round of an MTP head as one captured graph, on CUDA, where launching a head's operations one by
one takes the host longer than the device needs for them.

A graph looks tokens up, runs the head's layer over the tokens that the head has not seen yet, takes the likeliest token
of each row, and goes on from there for as many further depths as are wanted. What it computes is compared with the
head's own modules when the head is loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels.decode_graph.capture import GraphCapture
from ingot.kernels.decode_graph.kernels import (
    EmbeddingTable,
    ResidualNorm,
    embed_tokens,
    pair_states,
    take_likeliest,
    take_rows,
)
from ingot.kernels.paged_attention.inputs import WIDTHS, RowBounds, padded_count
from ingot.models.families.description import MtpSpec
from ingot.models.layers.decode_graph import DecodeGraphs, decode_graphs_of, give_angles
from ingot.models.layers.gpu_linear import DenseKernel, QuantizedKernel
from ingot.models.layers.graph_inputs import GraphKey, GraphStep, StepContext
from ingot.models.layers.graph_parts import UncoveredPartError, multiply_in_graph, norm_weights
from ingot.models.layers.modules import own_class
from ingot.models.layers.streamed_runs import GraphRun

log = logging.getLogger("ingot.models")
MOST_DEPTH = 4
"""Draft tokens of a row that graphs are captured for: more of them would pay only if nearly all were accepted."""
AHEAD_TOKENS, AHEAD_SPLITS = (1, 2, 4, 8, 12, 16), (8, 16, 32)
"""For one row, graphs are captured when the head is loaded: of so many tokens that the head has not seen, and KV
splits."""


class DraftGraphs:
    """Of one head. Only the engine thread may call it."""

    def __init__(self, head: Any, wiring: MtpSpec, embedding: Any, output: Any, stack: DecodeGraphs) -> None:
        """`head` is an `MtpHead` whose modules were swapped, and `stack` runs its layers. Raises UncoveredPartError for
        what has no kernels."""
        if len(stack.parts.runs) != 1 or not isinstance(stack.parts.runs[0], GraphRun):
            raise UncoveredPartError(stack.lacking or "layers")
        for linear in (head.joint, output):
            if not isinstance(linear, DenseKernel | QuantizedKernel):
                raise UncoveredPartError(f"products of {own_class(linear).__name__}")
        self._stack, self._run, self._size = stack, stack.parts.runs[0], head.size
        self._table, self._joint, self._output = _embedding_table(embedding), head.joint, output
        self._embedding_norm, self._hidden_norm = _norm(head.embedding_norm), _norm(head.hidden_norm)
        self._norm = _norm(head.norm) if "norm" in head else None
        self._is_hidden_first = wiring.hidden_first
        self._keys: tuple[GraphKey, ...] = ()  # of the last draft
        self._context: StepContext | None = None

    @property
    def most_tokens(self) -> int:
        return self._stack.most_tokens

    def step(self, states: Sequence[Any]) -> GraphStep | None:
        """The data of the open forward batch; None where no graph covers it."""
        return self._stack.step_over(states, self._table.dtype)

    def draft(
        self, hidden: mx.array, tokens: Sequence[int], lasts: Sequence[int], steps: Sequence[GraphStep]
    ) -> mx.array:
        """Draft tokens [rows, depths] (int32). The first step is of the tokens behind hidden states [tokens, size], of
        which `lasts` are their rows' last, and the other steps of one token of each of the first rows."""
        self._context, self._keys = steps[0].context, tuple(step.key for step in steps)
        after = self._stack.open_pages(self._context, self._keys)
        capture = partial(self._capture, self._context, self._keys)
        replay = self._stack.replay_of(self._context, self._keys[0], self._keys[1:], capture)
        rows, depths = padded_count(len(lasts)), len(steps)
        given = [
            mx.contiguous(hidden.astype(self._table.dtype)),
            *(angles for step in steps for angles in step.angles),
            mx.zeros((rows, depths), mx.int32),
            mx.array([*tokens], mx.int32),
            mx.array([*lasts], mx.int32),
            *(words for step in steps for words in step.words),
        ]
        drafts, after = replay(given, after)
        self._stack.close_pages(self._context, after)
        return drafts[: len(lasts)]

    def capture_ahead(self) -> None:
        """Once something was drafted: capture the graphs that single rows need most, and compile what others need."""
        if self._context is None or not self._stack.stage.takes_time:
            return
        usual, context, before = self._keys[0], self._context, self._stack.graph_count
        began = time.monotonic()

        def sized(tokens: int, splits: int) -> GraphKey:
            most = next(width for width in WIDTHS if width >= tokens)
            bounds = (RowBounds(1, most, kind.bounded(splits, most)) for kind in context.kinds)
            return usual.resized(tokens, tuple(bounds))

        wanted = [
            (sized(tokens, splits), *[sized(1, splits)] * (depth - 1))
            for splits in AHEAD_SPLITS
            for tokens in AHEAD_TOKENS
            for depth in range(MOST_DEPTH, 0, -1)  # the largest first: the others share its memory
        ]
        captures = {keys: self._capture(context, keys) for keys in wanted}
        self._stack.stage.prepare(kind for capture in captures.values() for kind in capture.kinds)
        for keys, capture in captures.items():
            replay = self._stack.replay_of(context, keys[0], keys[1:], partial(_same, capture))
            # The first launch of a graph takes longer than others.
            mx.eval(replay(_idle_inputs(capture, keys), mx.zeros(1, mx.int32)))
        made = self._stack.graph_count - before
        log.info("%d graphs of draft tokens were captured ahead, in %.1f s", made, time.monotonic() - began)

    def _capture(self, context: StepContext, keys: Sequence[GraphKey]) -> GraphCapture:
        capture, stack, tokens = GraphCapture(), self._stack, keys[0].tokens
        rows = keys[0].rows[0].rows
        hidden = capture.give((tokens, self._size), self._table.dtype)
        angles = [give_angles(capture, key) for key in keys]
        drafts = capture.give((rows, len(keys)), mx.int32)
        ids, lasts = capture.give((tokens,), mx.int32), capture.give((rows,), mx.int32)
        for depth, (key, own) in enumerate(zip(keys, angles, strict=True)):
            if key.tokens < hidden.shape[0] and depth:
                hidden, ids = capture.shaped(hidden, (key.tokens, self._size)), capture.shaped(ids, (key.tokens,))
            normed = [
                self._embedding_norm(capture, embed_tokens(capture, ids, self._table), None)[1],
                self._hidden_norm(capture, hidden, None)[1],
            ]
            pair = pair_states(capture, *(normed[::-1] if self._is_hidden_first else normed))
            states = multiply_in_graph(capture, self._joint, pair)
            states = stack.capture_run(capture, self._run, states, key, stack.give_inputs(capture, context, key, own))
            hidden = states if self._norm is None else self._norm(capture, states, None)[1]
            hidden = hidden if depth else take_rows(capture, hidden, lasts)
            ids = take_likeliest(capture, multiply_in_graph(capture, self._output, hidden), drafts, depth)
        capture.result = drafts
        return capture


def _same(capture: GraphCapture) -> GraphCapture:
    return capture


def _idle_inputs(capture: GraphCapture, keys: Sequence[GraphKey]) -> list[mx.array]:
    """Inputs of rows that have no queries, and tokens whose keys go nowhere."""
    floats, words = capture.given[: 1 + sum(len(key.angles) for key in keys)], 3
    idle = [mx.zeros(each.shape, each.dtype) for each in capture.given[: len(floats) + words]]
    for key in keys:
        for _ in key.tables:
            slots, table, rows = capture.given[len(idle) : len(idle) + 3]
            queries = mx.array([*[0] * (rows.shape[1] - 1), key.rows[0].most], mx.int32)
            idle += mx.full(slots.shape, -1, mx.int32), mx.zeros(table.shape, mx.int32), queries + mx.zeros_like(rows)
    return idle


def draft_graphs_of(head: Any, wiring: MtpSpec, embedding: Any, output: Any) -> DraftGraphs | None:
    """None where a head's layers, or what is around them, have no kernels."""
    stack = decode_graphs_of(head)
    if stack is None:
        return None
    try:
        return DraftGraphs(head, wiring, embedding, output, stack)
    except UncoveredPartError as error:
        log.warning("draft tokens are not computed as one graph, which is slower: no kernels for %s", error)
        return None


def _norm(norm: nn.Module) -> ResidualNorm:
    return ResidualNorm(norm_weights(norm))


def _embedding_table(embedding: Any) -> EmbeddingTable:
    if isinstance(embedding, nn.QuantizedEmbedding):
        scales, biases = embedding.scales, embedding.biases
        if embedding.mode != "affine" or biases is None or scales.dtype != biases.dtype:
            raise UncoveredPartError(f"embeddings in {embedding.mode}")
        return EmbeddingTable(embedding.weight.view(mx.int32), scales, biases, embedding.bits, embedding.group_size)
    if isinstance(embedding, nn.Embedding):
        return EmbeddingTable(embedding.weight)
    raise UncoveredPartError(own_class(embedding).__name__)
