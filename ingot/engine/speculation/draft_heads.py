"""Drafts of a draft head (MTP, EAGLE-3): from the model's hidden states and the tokens behind them.

A head has keys and values of its own. Those of a token's place are made from the hidden state *before* it and the
token itself, so that they depend on what is stored up to that place and on nothing behind it: they lie in the
row's own pages, are cached and reused with them, and are rewound with them. The hidden state before the first
token that is computed after a prefix was reused is not known; zeros stand for it, as for the one before a
sequence's first.

What a head has not been shown yet waits, a few tokens at most, until a draft is asked for or pages are to be
cached.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardBatch, Row
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.proposer import DraftOffer, Proposal, transpose_depths
from ingot.engine.vision_encoder import TokenSpan, visual_inputs

LONGEST_HEAD_DRAFT = 8
"""Most tokens that are guessed by chaining a head that was trained for one."""
MOST_WAITING_TOKENS = 64
"""Tokens of an answer that the head is shown at once, while nobody asks it."""


class DraftHeadModule(Protocol):
    name: str
    size: int  # of a hidden state
    sees: bool  # is shown features where the model is

    def __call__(self, hidden: mx.array, tokens: mx.array, cache: object) -> mx.array:
        """One that sees takes what is `visual` as well."""

    def logits(self, hidden: mx.array) -> mx.array: ...


@dataclass(slots=True)
class _HeadProgress:
    """What the head knows of a row: places before `written` are there. `hidden` are the states that wait, of the tokens
    from written - 1 on, as pieces of what passes gave: (array [tokens, size], begin, end). There may be states of more
    tokens than the row has: it may have been taken back further than what was wrong."""

    written: int
    hidden: list[tuple[mx.array, int, int]]

    @property
    def end(self) -> int:
        """The first token whose state is not known."""
        return self.written - 1 + sum(end - begin for _, begin, end in self.hidden)

    def alone(self) -> mx.array:
        """The states that wait, from now on in an array of their own: a chunk's would stay for the sake of its last."""
        own = mx.concatenate([mx.take(array, mx.arange(begin, end), axis=0) for array, begin, end in self.hidden])
        self.hidden = [(own, 0, own.shape[0])]
        return own

    def cut(self, length: int) -> None:
        """Forget the states of tokens from `length` on."""
        surplus = self.end - length
        while surplus > 0:
            array, begin, end = self.hidden.pop()
            if end - begin > surplus:
                self.hidden.append((array, begin, end - surplus))
            surplus -= end - begin

    def states(self, count: int) -> mx.array:
        """The first so many that wait."""
        taken: list[mx.array] = []
        for array, begin, end in self.hidden:
            if count > 0:
                taken.append(array[begin : min(end, begin + count)])
                count -= end - begin
        return taken[0] if len(taken) == 1 else mx.concatenate([piece.astype(taken[-1].dtype) for piece in taken])

    def drop(self, count: int) -> None:
        """Let go of the first so many."""
        kept: list[tuple[mx.array, int, int]] = []
        for array, begin, end in self.hidden:
            gone = min(count, end - begin)
            count -= gone
            if begin + gone < end:
                kept.append((array, begin + gone, end))
        self.hidden = kept


@dataclass(eq=False)
class DraftHeadProposer:
    """Guesses, and sees to it that the head has seen what the model computed. Only the engine thread calls it."""

    head: DraftHeadModule
    rows: BatchState
    _shown: dict[TokenSequence, _HeadProgress] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.head.name

    # What the runner tells

    def begin(self, sequence: TokenSequence) -> None:
        """It was given a row, which may hold tokens already."""
        nothing = mx.zeros((1, self.head.size), mx.bfloat16)  # which is any float's zero, and widens none
        self._shown[sequence] = _HeadProgress(_row_of(sequence).length, [(nothing, 0, 1)])

    def saw(self, sequence: TokenSequence, hidden: mx.array, begin: int, end: int) -> None:
        """A pass computes its next tokens, whose hidden states are hidden[begin:end]."""
        shown = self._shown[sequence]
        begin += max(0, shown.end - sequence.computed)
        if begin < end:
            shown.hidden.append((hidden, begin, end))

    def settled(self, sequence: TokenSequence, length: int) -> None:
        """Of what the last pass computed, the tokens before `length` were right."""
        self._shown[sequence].cut(length)

    def catch_up(self, sequences: Iterable[TokenSequence], *, least: int = 1) -> None:
        """Show the head all that the model computed of those of whom at least so many tokens wait."""
        waiting = [
            (sequence, count)
            for sequence in sequences
            if (count := self._waiting(sequence)) >= least and sequence.row is not None
        ]
        if waiting:
            shown = self._show(waiting)
            mx.async_eval(shown, self.rows.pending(), [self._shown[sequence].alone() for sequence, _ in waiting])

    def forget(self, sequence: TokenSequence) -> None:
        self._shown.pop(sequence, None)

    def free(self) -> None:
        """Let go of all hidden states. The last call."""
        self._shown.clear()

    @property
    def follows(self) -> Collection[TokenSequence]:
        return self._shown.keys()

    def rest(self) -> None:
        pass

    # What is asked of a proposer

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        return [DraftOffer(self.name, LONGEST_HEAD_DRAFT) if self._can(row) else None for row in rows]

    def _can(self, row: TokenSequence) -> bool:
        """Whether it knows what came before the newest token, or will when that is known."""
        shown = self._shown.get(row)
        return shown is not None and shown.end >= row.total - 1

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        order = sorted(range(len(rows)), key=lambda number: -counts[number])
        ordered, depths = [rows[number] for number in order], [counts[number] for number in order]
        with self.rows.reserve_ahead(
            [(_row_of(row), row.total - 1 + most) for row, most in zip(ordered, depths, strict=True)]
        ):
            tokens, sure = self._chain(ordered, depths)
        guessed, likely = transpose_depths(tokens, len(rows)), transpose_depths(sure, len(rows))
        found = [Proposal(tuple(map(int, own)), self.name, tuple(likely[at])) for at, own in enumerate(guessed)]
        return [found[order.index(number)] for number in range(len(rows))]

    def _chain(self, rows: list[TokenSequence], depths: list[int]) -> tuple[list[mx.array], list[mx.array]]:
        """Guesses, and how likely they are, by depth: each for as many of the first rows as go that deep."""
        hidden = self._show([(row, row.total - self._shown[row].written) for row in rows])
        tokens: list[mx.array] = []
        sure: list[mx.array] = []
        for depth in range(1, depths[0] + 1):
            going = [row for row, most in zip(rows, depths, strict=True) if most >= depth]
            hidden = hidden[: len(going)]
            if depth > 1:
                places = [row.total - 2 + depth for row in going]
                before = tuple(self._position(row, place - 1) for row, place in zip(going, places, strict=True))
                launch = ForwardBatch(tuple(map(_row_of, going)), 1, tuple(places), before)
                with self.rows.aside([launch]) as caches:
                    hidden = self.head(hidden[None], tokens[-1][None, : len(going)], caches[0])[0]
            likelihoods = mx.softmax(self.head.logits(hidden).astype(mx.float32), axis=-1)
            tokens.append(mx.argmax(likelihoods, axis=-1).astype(mx.uint32))
            sure.append(mx.max(likelihoods, axis=-1))
        mx.eval(tokens, sure, self.rows.pending())
        return tokens, sure

    def _waiting(self, sequence: TokenSequence) -> int:
        """Tokens that are known and stored, and that the head has not seen."""
        shown = self._shown.get(sequence)
        if shown is None or sequence.row is None:
            return 0
        return min(sequence.row.length, len(sequence.stored)) - shown.written

    def _show(self, wanted: Many[tuple[TokenSequence, int]]) -> mx.array:
        """Let the head see the next so many tokens of each; what it gives behind the last of them, in their order. A
        token that is not stored yet may be the last: it will be shown again."""
        launches: list[ForwardBatch] = []
        stretches: list[TokenSpan] = []
        tokens: list[int] = []
        hidden: list[mx.array] = []
        lasts: list[int] = []
        at = 0
        for sequence, count in wanted:
            shown, row = self._shown[sequence], _row_of(sequence)
            launches.append(self._launch(sequence, shown.written, count))
            stretches.append((sequence, shown.written, count))
            tokens += sequence.stored[shown.written : shown.written + count]
            hidden.append(shown.states(count))
            at += count
            lasts.append(at - 1)
            stored = row.length - shown.written
            shown.drop(min(count, stored))
            shown.written += min(count, stored)
        states = hidden[0] if len(hidden) == 1 else mx.concatenate(hidden)
        visual = visual_inputs(stretches) if self.head.sees else None
        head: Any = self.head
        run = head if visual is None else partial(head, visual=visual)
        with self.rows.aside(launches) as caches:
            out: mx.array = run(states[None], mx.array(tokens, dtype=mx.uint32)[None], caches[0])[0]
        return out if lasts == list(range(at)) else out[mx.array(lasts)]

    def _position(self, sequence: TokenSequence, place: int) -> int:
        if sequence.thinned is not None:
            return sequence.thinned.position(place)
        return sequence.sight.position(place) if self.head.sees and sequence.sight is not None else place

    def _launch(self, sequence: TokenSequence, place: int, count: int) -> ForwardBatch:
        """The next so many places of a row. What is stored there has the position of the hidden state that it is made
        from, which is the one before."""
        row, begin = _row_of(sequence), max(0, place - 1)
        positions = None if sequence.sight is None or not self.head.sees else sequence.sight.positions
        if positions is not None and sequence.sight is not None:
            own = sequence.sight.axes(positions, begin, place + count - 1)
            stated = own if place else np.concatenate([positions[:, :1], own], axis=1)
            return ForwardBatch((row,), count, (place,), (0,), mx.array(stated))
        if sequence.thinned is not None:
            before = [sequence.thinned.position(max(0, at - 1)) for at in range(place, place + count)]
            return ForwardBatch((row,), count, (place,), (0,), mx.array(before, dtype=mx.int32))
        if place:
            return ForwardBatch((row,), count, (place,), (begin,))
        return ForwardBatch((row,), count, (0,), (0,), mx.array([0, *range(count - 1)], dtype=mx.int32))


def _row_of(sequence: TokenSequence) -> Row:
    assert sequence.row is not None
    return sequence.row
