"""A draft of the same tokenizer scores: it reads the whole prompt, writes a few tokens, and what those attend to is
what matters. What it read is kept, so that the next turn of a conversation is read from there on."""

from __future__ import annotations

from collections.abc import Generator

import mlx.core as mx

from ingot.cache.footprint import rounded
from ingot.cache.launch import Part, Row
from ingot.engine.draft_model import DraftModel, Reserved, reading
from ingot.engine.sequence import Sequence
from ingot.engine.sparse.attention_scores import Onlookers
from ingot.engine.sparse.scorer import Scoring
from ingot.errors import ModelError, Overloaded

AHEAD = 8
"""Tokens that it writes."""


class DraftScorer:
    name = "draft"

    def __init__(self, model: DraftModel) -> None:
        """Raises ModelError where what the model attends to cannot be seen."""
        self._model, self._adapter, self._rows = model, model.adapter, model.rows
        self._own: Sequence | None = None  # what is being read, as the draft has it
        model.add_holder(self._reserved, lambda: None)
        self._try()

    def able(self, sequence: Sequence) -> bool:
        needed = len(sequence.whole_prompt) + AHEAD
        budget = self._model.budget
        return needed <= self._adapter.context and budget.fits([(rounded(needed), False)])

    def unread(self, sequence: Sequence) -> int:
        own = reading(sequence)
        return len(own.prompt) - self._model.reuse.known(own)

    def score(self, sequence: Sequence) -> Scoring:
        own = reading(sequence)
        self._seat(own)
        try:
            yield from self._read(own)
            asked = self._write(own)
            yield
            return asked.scored(_row(own), len(own.prompt))
        finally:
            self._rows.leave(_row(own))
            own.row = self._own = None

    def rest(self) -> None:
        self._rows.trim()

    def check(self) -> None:
        self._model.check()

    def _reserved(self) -> list[Reserved]:
        return [] if self._own is None else [_room(self._own)]

    def _seat(self, own: Sequence) -> None:
        """Nobody else has room where one prompt takes all of it."""
        if not self._model.fits([_room(own)]):
            self._model.clear_the_way()
        if not self._model.fits([_room(own)]):
            raise Overloaded("There is no memory for reading this prompt with the draft model")
        self._model.reuse.admit(own)
        own.row = self._rows.new()
        self._own = own
        self._model.reuse.restore(own)
        self._model.make_way()

    def _read(self, own: Sequence) -> Generator[None, None, None]:
        """All but the last of its tokens, in pieces."""
        reuse, budget = self._model.reuse, self._model.budget
        while own.remaining > 1:
            stop = min(reuse.next_stop(own) - own.computed, budget.widest_launch(own.computed))
            width = min(own.remaining - 1, stop)
            tokens = mx.array(own.tokens[own.computed : own.computed + width], dtype=mx.uint32)
            logits = self._adapter.run(self._rows, tokens, [Part((_row(own),), width)], [width - 1])
            mx.eval(logits, self._rows.pending())
            own.computed += width
            reuse.keep(own)
            yield

    def _write(self, own: Sequence) -> Onlookers:
        """What its last token asks, and the likeliest ones behind it."""
        asked, row = Onlookers(self._rows), _row(own)
        token = mx.array(own.tokens[-1:], dtype=mx.uint32)
        with asked:
            for number in range(1 + AHEAD):
                logits = self._step(row, token)
                mx.eval(logits, self._rows.pending(), asked.pending())
                if not number:
                    own.computed += 1
                    self._model.reuse.keep(own, last=True)
                token = mx.argmax(logits, axis=-1).astype(mx.uint32)
        return asked

    def _step(self, row: Row, token: mx.array) -> mx.array:
        """One more token, by the layers' own modules, who tell what it asks: stated positions are in no graph."""
        position = mx.array([row.position], dtype=mx.int32)
        return self._adapter.run(self._rows, token, [Part((row,), 1, position, row.position + 1)])

    def _try(self) -> None:
        """See that layers tell what is asked of them."""
        row, asked = self._rows.new(), Onlookers(self._rows)
        try:
            with asked:
                if self._adapter.mixed:
                    mx.eval(self._step(row, mx.array([0], dtype=mx.uint32)), self._rows.pending())
        finally:
            self._rows.leave(row)
        if not asked.answered:
            raise ModelError(
                f"A model of type {self._adapter.family} cannot score prompts: none of its layers tells what it "
                "attends to over a whole prompt. Choose a draft with plain attention."
            )


def _row(sequence: Sequence) -> Row:
    assert sequence.row is not None
    return sequence.row


def _room(own: Sequence) -> Reserved:
    return own, rounded(len(own.prompt) + AHEAD)
