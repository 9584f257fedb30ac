"""Draft tokens of a draft head (MTP, EAGLE-3, Gemma 4's assistants, DFlash): from the model's hidden states.

Most heads have keys and values of their own. Those of a token are computed from the hidden state *before* it and the
token itself, so that they depend on nothing behind it: they lie in the row's own pages, and are cached, reused and
rewound with them. The hidden state before the first token that is computed after a prefix was reused is not known; it
is taken as zeros, like the one before a sequence's first token. A block drafter's are computed from a token's own
hidden state, and an assistant reads the model's.

Tokens that the head has not computed yet are pending, a few at most, until a draft is wanted or pages are to be cached.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Literal, Protocol, cast

import mlx.core as mx
import numpy as np

from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardBatch, Row
from ingot.engine.forward_pass import DeviceTokens, DraftedBatch, DraftTokens
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.proposer import DraftOffer, Proposal, transpose_depths
from ingot.engine.vision_encoder import visual_inputs
from ingot.models.draft_heads.draft_graph import MOST_DEPTH, DraftGraphs
from ingot.models.layers.graph_inputs import GraphStep

MOST_PENDING_TOKENS = 16
"""Pending tokens of an answer after which the head computes them, while no draft is wanted."""


class DraftHeadModule(Protocol):
    name: str
    kv: Literal["pairs", "states", "model"]
    """What its keys and values are made from: the hidden state before a token and the token; a token's hidden state; or
    they are the model's. In the second case it has `store` and `draft` (`BlockDrafter`), else it is called."""
    longest: int  # draft tokens
    size: int  # of a hidden state
    sees: bool  # takes image features where the model does
    graphs: DraftGraphs | None  # what computes all draft tokens of a round at once, if something does


@dataclass(slots=True)
class _HeadProgress:
    """What the head has computed of a row: positions before `written`. `hidden` are the pending hidden states, of the
    tokens from written - before on, as slices of what passes gave: (array [tokens, size], begin, end). They may go
    beyond the row's tokens: it may have been rewound further than to the first rejected one."""

    written: int
    hidden: list[tuple[mx.array, int, int]]
    before: int = 1
    """1 where a token is computed from the hidden state before it, 0 where from its own."""

    @property
    def end(self) -> int:
        """The first token whose hidden state is not known."""
        return self.written - self.before + sum(end - begin for _, begin, end in self.hidden)

    def detach(self) -> list[mx.array]:
        """The pending states, from now on in an array of their own: else a whole chunk's would stay in memory."""
        if not self.hidden:
            return []
        own = mx.concatenate([mx.take(array, mx.arange(begin, end), axis=0) for array, begin, end in self.hidden])
        self.hidden = [(own, 0, own.shape[0])]
        return [own]

    def cut(self, length: int) -> None:
        """Forget the states of tokens from `length` on."""
        surplus = self.end - length
        while surplus > 0:
            array, begin, end = self.hidden.pop()
            if end - begin > surplus:
                self.hidden.append((array, begin, end - surplus))
            surplus -= end - begin

    def states(self, count: int) -> mx.array:
        """The first so many pending ones."""
        slices: list[mx.array] = []
        for array, begin, end in self.hidden:
            if count > 0:
                slices.append(array[begin : min(end, begin + count)])
                count -= end - begin
        return slices[0] if len(slices) == 1 else mx.concatenate([each.astype(slices[-1].dtype) for each in slices])

    def drop(self, count: int) -> None:
        """Drop the first so many pending ones."""
        left: list[tuple[mx.array, int, int]] = []
        for array, begin, end in self.hidden:
            dropped = min(count, end - begin)
            count -= dropped
            if begin + dropped < end:
                left.append((array, begin + dropped, end))
        self.hidden = left

    def go_on(self, count: int, row: Row) -> None:
        """The next so many tokens were computed: forget the states that those in the row were computed from."""
        done = min(count, row.length - self.written)
        self.drop(done)
        self.written += done


@dataclass(frozen=True, eq=False)
class _PendingTokens:
    """Tokens of some rows that a head is to compute next."""

    rows: list[tuple[_HeadProgress, Row, int]]
    batches: list[ForwardBatch]
    tokens: list[int]
    hidden: mx.array  # the states before them
    lasts: list[int]  # each row's last one
    visual: Any

    def drop(self) -> None:
        """The head computes them: forget the hidden states before those that are stored."""
        for progress, row, count in self.rows:
            progress.go_on(count, row)


@dataclass(eq=False)
class DraftHeadProposer:
    """Proposes, and keeps the head up to date with what the model computed. Only the engine thread calls it."""

    head: DraftHeadModule
    rows: BatchState
    _progress: dict[TokenSequence, _HeadProgress] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.head.name

    # Called by the runner

    def begin(self, sequence: TokenSequence) -> None:
        """It has a row, which may hold tokens already."""
        zeros = mx.zeros((1, self.head.size), mx.bfloat16)  # which is any float's zero, and widens none
        length = _row_of(sequence).length
        known = _HeadProgress(length, [], 0) if self.head.kv == "states" else _HeadProgress(length, [(zeros, 0, 1)])
        self._progress[sequence] = known

    def observe_hidden(self, sequence: TokenSequence, hidden: mx.array, begin: int, end: int) -> None:
        """A pass computes its next tokens, whose hidden states are hidden[begin:end]."""
        progress = self._progress[sequence]
        begin += max(0, progress.end - sequence.computed)
        if begin < end:
            progress.hidden.append((hidden, begin, end))

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """Of what the last pass computed, the tokens before `length` were accepted."""
        self._progress[sequence].cut(length)

    def catch_up(self, sequences: Iterable[TokenSequence], *, least: int = 1) -> None:
        """Compute all pending tokens of the sequences that have at least so many."""
        pending = [
            (sequence, count)
            for sequence in sequences
            if (count := self._pending(sequence)) >= least and sequence.row is not None
        ]
        if pending:
            computed = self._compute(pending)
            mx.async_eval(computed, self.rows.pending(), [self._progress[each].detach() for each, _ in pending])

    def _compute(self, pending: Many[tuple[TokenSequence, int]]) -> mx.array | None:
        if self.head.kv != "model":
            return (self._advance if self.head.kv == "pairs" else self._store)(pending)
        for sequence, count in pending:
            self._progress[sequence].go_on(count, _row_of(sequence))
        return None

    def forget(self, sequence: TokenSequence) -> None:
        self._progress.pop(sequence, None)

    def free(self) -> None:
        """Drop all hidden states. The last call."""
        self._progress.clear()

    @property
    def follows(self) -> Collection[TokenSequence]:
        return self._progress.keys()

    def rest(self) -> None:
        pass

    # As a proposer

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        most = self.head.longest if self.head.graphs is None else MOST_DEPTH
        return [DraftOffer(self.name, most) if self._can(row) else None for row in rows]

    def _can(self, row: TokenSequence) -> bool:
        """Whether it has the hidden state before the newest token, or will have when that is known."""
        progress = self._progress.get(row)
        if progress is None or progress.end < row.total - 1:
            return False
        return self.head.kv == "pairs" or (row.total > 1 and row.row is not None)

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        order = sorted(range(len(rows)), key=lambda number: -counts[number])
        ordered, depths = [rows[number] for number in order], [counts[number] for number in order]
        ends = [(_row_of(row), row.total - 1 + most) for row, most in zip(ordered, depths, strict=True)]
        with self.rows.reserve_ahead(ends if self.head.kv != "model" else ()):
            if self.head.kv == "states":
                drafts = self._draft_block(ordered, depths)
            else:
                drafts = self._draft_in_graph(ordered, depths) or self._draft(ordered, depths)
        return [Proposal(drafts[order.index(number)], self.name) for number in range(len(rows))]

    def _draft_in_graph(self, rows: list[TokenSequence], depths: list[int]) -> list[DraftTokens] | None:
        """What `_draft` gives, by one graph, without waiting for it; None where no graph covers it."""
        graphs = self.head.graphs
        if graphs is None:
            return None
        pending = self._pending_tokens([(row, row.total - self._progress[row].written) for row in rows])
        batches = [pending.batches, *([self._next_batch(rows, depths, depth)] for depth in range(2, depths[0] + 1))]
        steps = list[GraphStep]()
        for each in batches:
            with self.rows.aside(each) as caches:
                step = graphs.step(caches)
            if step is None or pending.visual is not None:
                return None
            steps.append(step)
        drafted = graphs.draft(pending.hidden, pending.tokens, pending.lasts, steps)
        pending.drop()
        mx.async_eval(drafted, self.rows.pending())
        batch = DraftedBatch(drafted)
        return [DeviceTokens(batch, number, depth) for number, depth in enumerate(depths)]

    def _draft(self, rows: list[TokenSequence], depths: list[int]) -> list[DraftTokens]:
        """Each row's draft tokens."""
        head: Any = self.head
        hidden = self._before_drafts(rows)
        tokens: list[mx.array] = []
        for depth in range(1, depths[0] + 1):
            batch = self._next_batch(rows, depths, depth)
            hidden = hidden[: batch.count]
            if depth > 1:
                hidden = self._step(batch, hidden, tokens[-1][: batch.count])
            tokens.append(mx.argmax(head.logits(hidden), axis=-1).astype(mx.uint32))
        mx.eval(tokens, self.rows.pending())
        return [tuple(map(int, draft)) for draft in transpose_depths(tokens, len(rows))]

    def _before_drafts(self, rows: list[TokenSequence]) -> mx.array:
        """The head's hidden states that the rows' first draft tokens follow from."""
        wanted = [(row, row.total - self._progress[row].written) for row in rows]
        if self.head.kv == "pairs":
            return self._advance(wanted)
        before = []
        for row, count in wanted:
            before.append(self._progress[row].states(count)[count - 1 :])
            self._progress[row].go_on(count, _row_of(row))
        return self._step(_newest_stored(rows), mx.concatenate(before), _newest_tokens(rows))

    def _step(self, batch: ForwardBatch, hidden: mx.array, tokens: mx.array) -> mx.array:
        """The head's hidden states of one more token of each row."""
        head: Any = self.head
        with self.rows.aside([batch]) as caches:
            states: mx.array = head(hidden[None], tokens[None], caches[0] if head.kv == "pairs" else caches)[0]
        return states

    def _next_batch(self, rows: list[TokenSequence], depths: list[int], depth: int) -> ForwardBatch:
        """The draft tokens of one depth, of the rows that go so deep."""
        going = [row for row, most in zip(rows, depths, strict=True) if most >= depth]
        if self.head.kv == "model":
            return _newest_stored(going)
        offsets = [row.total - 2 + depth for row in going]
        positions = tuple(self._position(row, offset - 1) for row, offset in zip(going, offsets, strict=True))
        return ForwardBatch(tuple(map(_row_of, going)), 1, tuple(offsets), positions)

    def _draft_block(self, rows: list[TokenSequence], depths: list[int]) -> list[DraftTokens]:
        """What `_draft` gives, of a head that proposes all of a row's tokens at once."""
        head: Any = self.head
        self._store([(row, row.total - 1 - self._progress[row].written) for row in rows])
        with self.rows.aside([_newest_stored(rows)]) as caches:
            drafts = head.draft(_newest_tokens(rows), depths[0], caches)
        mx.eval(drafts, self.rows.pending())
        return [tuple(map(int, draft[:most])) for draft, most in zip(drafts.tolist(), depths, strict=True)]

    def _store(self, wanted: Many[tuple[TokenSequence, int]]) -> mx.array | None:
        """Have a block drafter store its keys and values of the next so many tokens of each."""
        head: Any = self.head
        some = [(sequence, self._progress[sequence], count) for sequence, count in wanted if count]
        if not some:
            return None
        starts = [(_row_of(sequence), progress.written, count) for sequence, progress, count in some]
        hidden = [progress.states(count) for _, progress, count in some]
        for sequence, progress, count in some:
            progress.go_on(count, _row_of(sequence))
        with self.rows.aside(
            [ForwardBatch((row,), count, (begin,), (begin,)) for row, begin, count in starts]
        ) as caches:
            stored: mx.array = head.store(mx.concatenate(hidden)[None], caches)
        return stored

    def _pending(self, sequence: TokenSequence) -> int:
        """Tokens that are known and stored, and that the head has not computed."""
        progress = self._progress.get(sequence)
        if progress is None or sequence.row is None:
            return 0
        return min(sequence.row.length, len(sequence.stored)) - progress.written

    def _advance(self, wanted: Many[tuple[TokenSequence, int]]) -> mx.array:
        """Run the head over the next so many tokens of each; its hidden states behind the last of them, in order."""
        pending, head = self._pending_tokens(wanted), cast(Any, self.head)
        run = head if pending.visual is None else partial(head, visual=pending.visual)
        pending.drop()
        with self.rows.aside(pending.batches) as caches:
            tokens = mx.array(pending.tokens, dtype=mx.uint32)
            out: mx.array = run(pending.hidden[None], tokens[None], caches[0])[0]
        return out if pending.lasts == list(range(len(pending.tokens))) else out[mx.array(pending.lasts)]

    def _pending_tokens(self, wanted: Many[tuple[TokenSequence, int]]) -> _PendingTokens:
        """The next so many tokens of each. One that is not stored yet may be the last: it will be computed again."""
        spans = [(sequence, self._progress[sequence].written, count) for sequence, count in wanted]
        hidden = [self._progress[sequence].states(count) for sequence, count in wanted]
        return _PendingTokens(
            [(self._progress[sequence], _row_of(sequence), count) for sequence, count in wanted],
            [self._batch(sequence, begin, count) for sequence, begin, count in spans],
            [token for sequence, begin, count in spans for token in sequence.stored[begin : begin + count]],
            hidden[0] if len(hidden) == 1 else mx.concatenate(hidden),
            [end - 1 for end in accumulate(count for _, count in wanted)],
            visual_inputs(spans) if self.head.sees else None,
        )

    def _position(self, sequence: TokenSequence, offset: int) -> int:
        if sequence.thinned is not None:
            return sequence.thinned.position(offset)
        return (
            sequence.prompt_media.position(offset) if self.head.sees and sequence.prompt_media is not None else offset
        )

    def _batch(self, sequence: TokenSequence, offset: int, count: int) -> ForwardBatch:
        """The next so many tokens of a row. A token's KV has the position of the hidden state that it is computed from,
        which is the one before."""
        row, begin = _row_of(sequence), max(0, offset - 1)
        positions = None if sequence.prompt_media is None or not self.head.sees else sequence.prompt_media.positions
        if positions is not None and sequence.prompt_media is not None:
            own = sequence.prompt_media.axes(positions, begin, offset + count - 1)
            axes = own if offset else np.concatenate([positions[:, :1], own], axis=1)
            return ForwardBatch((row,), count, (offset,), (0,), mx.array(axes))
        if sequence.thinned is not None:
            before = [sequence.thinned.position(max(0, at - 1)) for at in range(offset, offset + count)]
            return ForwardBatch((row,), count, (offset,), (0,), mx.array(before, dtype=mx.int32))
        if offset:
            return ForwardBatch((row,), count, (offset,), (begin,))
        return ForwardBatch((row,), count, (0,), (0,), mx.array([0, *range(count - 1)], dtype=mx.int32))


def _row_of(sequence: TokenSequence) -> Row:
    assert sequence.row is not None
    return sequence.row


def _newest_stored(rows: Many[TokenSequence]) -> ForwardBatch:
    """The last token of each that has KV, as a batch that sees all of it and stores nothing."""
    stored = [_row_of(row) for row in rows]
    behind = [row.total - 1 - own.length for row, own in zip(rows, stored, strict=True)]
    positions = tuple(own.position + more - 1 for own, more in zip(stored, behind, strict=True))
    return ForwardBatch(tuple(stored), 1, tuple(row.total - 2 for row in rows), positions)


def _newest_tokens(rows: Many[TokenSequence]) -> mx.array:
    return mx.array([row.stored[row.total - 1] for row in rows], dtype=mx.uint32)
