"""A draft of the same tokenizer scores: it reads the whole prompt, writes a few tokens, and what those attend to is
what matters. What it read is kept, so that the next turn of a conversation is read from there on."""

from __future__ import annotations

from collections.abc import Callable, Generator

import mlx.core as mx

from ingot.cache.footprint import rounded
from ingot.cache.launch import Part, Row
from ingot.engine.draft_model import DraftModel, Reserved, reading
from ingot.engine.sequence import Sequence
from ingot.engine.sparse.attention_scores import Onlookers
from ingot.engine.sparse.scorer import Scoring
from ingot.errors import ModelError, Overloaded

AHEAD = 24
"""Tokens that it writes, unless its answer ends before: what matters may be looked up only once an answer has begun."""


class DraftScorer:
    name = "draft"

    def __init__(self, model: DraftModel) -> None:
        """Raises ModelError where what the model attends to cannot be seen."""
        self._model, self._adapter, self._rows = model, model.adapter, model.rows
        self._own: Sequence | None = None  # what is being read, as the draft has it
        self._rewinds = "recurrent" not in self._rows.kinds
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
            asked = self._write(own, sequence.stop_tokens)
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

    def _write(self, own: Sequence, ends: frozenset[int]) -> Onlookers:
        """What its last token asks, and the likeliest ones behind it, up to one that ends an answer."""
        asked, row = Onlookers(self._rows), _row(own)
        if not self._rewinds:
            with asked:
                self._chain(own, ends, lambda token, _: self._asking(row, token))
            return asked
        # Quickly first, by whatever runs a step at once; then all of them once more, to hear what they ask.
        written = self._chain(
            own, ends, lambda token, count: self._adapter.run(self._rows, token, [Part((row,), 1, tentative=count)])
        )
        self._rows.rewind(row, len(own.prompt) - 1)
        with asked:
            mx.eval(self._asking(row, mx.array(written, dtype=mx.uint32)), self._rows.pending(), asked.pending())
        return asked

    def _chain(self, own: Sequence, ends: frozenset[int], step: Callable[[mx.array, int], mx.array]) -> list[int]:
        """The prompt's last token and those that follow, each computed by `step`, which is told how many these are."""
        written = own.tokens[-1:]
        while len(written) <= AHEAD and (len(written) == 1 or written[-1] not in ends):
            logits = step(mx.array(written[-1:], dtype=mx.uint32), len(written))
            mx.eval(logits, self._rows.pending())
            if len(written) == 1:
                own.computed += 1
                self._model.reuse.keep(own, last=True)
            written.append(int(mx.argmax(logits[0])))
        return written

    def _asking(self, row: Row, tokens: mx.array) -> mx.array:
        """Some tokens, by the layers' own modules, who tell what they ask: stated positions are in no graph."""
        begin, end = row.position, row.position + tokens.size
        stated = mx.arange(begin, end, dtype=mx.int32)
        return self._adapter.run(self._rows, tokens, [Part((row,), tokens.size, stated, end)], [tokens.size - 1])

    def _try(self) -> None:
        """See that layers tell what is asked of them."""
        row, asked = self._rows.new(), Onlookers(self._rows)
        try:
            with asked:
                if self._adapter.mixed:
                    mx.eval(self._asking(row, mx.array([0], dtype=mx.uint32)), self._rows.pending())
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
