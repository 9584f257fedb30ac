"""A draft of the same tokenizer scores: it reads the whole prompt, writes a few tokens, and what those attend to is
what matters, as well as what the prompt's end names. What it read is kept, so that the next turn of a conversation is
read from there on."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

import mlx.core as mx
import numpy as np

from ingot.cache.footprint import rounded
from ingot.cache.forward_batch import Part, Row
from ingot.engine.draft_model import AT_ONCE, CATCH_UP, DraftModel, Reserved, reading
from ingot.engine.sequence import Sequence
from ingot.engine.sparse.attention_scores import Onlookers
from ingot.engine.sparse.narrowing import Narrowing
from ingot.engine.sparse.scorer import Scoring
from ingot.engine.sparse.statistics_scorer import by_statistics
from ingot.engine.specprefill.selection import CHUNK, Scores
from ingot.errors import ModelError, Overloaded

AHEAD = 24
"""Tokens that it writes, unless its answer ends before: what matters may be looked up only once an answer has begun."""
UNREAD = 8
"""Of them, those that are asked for before any is read: then it may turn out that an answer ended before some."""
NAMED = 0.5
"""What it weighs beside attention that the prompt's end names something: a draft may forget to look it up."""
QUICK_S, SLOW_S = 0.03, 0.25
"""Pieces of a prompt that take less are made longer, those that take more shorter."""


class DraftScorer:
    name = "draft"

    def __init__(self, model: DraftModel) -> None:
        """Raises ModelError where what the model attends to cannot be seen."""
        self._model, self.adapter, self._rows = model, model.adapter, model.rows
        self._own: Sequence | None = None  # what is being read, as the draft has it
        self._rewinds = "recurrent" not in self._rows.kinds
        self._width = CATCH_UP  # tokens of a piece
        self._used = False  # since the last rest
        self.adapter.let_apart()
        model.add_holder(self._reserved, lambda: None)
        self._try()

    def able(self, sequence: Sequence) -> bool:
        needed = len(sequence.whole_prompt) + AHEAD
        budget, known = self._model.budget, max(sequence.whole_prompt) < self.adapter.vocab
        return known and needed <= self.adapter.context and budget.fits([(rounded(needed), False)])

    def unread(self, sequence: Sequence) -> int:
        own = reading(sequence)
        return len(own.prompt) - self._model.reuse.known(own)

    def score(self, sequence: Sequence) -> Scoring:
        own = reading(sequence)
        self._seat(own)
        try:
            yield from self._read(own)
            asked = self._write(own, sequence.stop_tokens)
            names = NAMED * named(own.prompt)  # while the device finds out what is asked
            yield
            return asked.scored(_row(own), len(own.prompt)) + names
        finally:
            self._rows.leave(_row(own))
            own.row = self._own = None

    def rest(self) -> None:
        """Give memory back, but what the last prompt took not before something else has run: the next one would have to
        make it anew."""
        if not self._used:
            self._rows.trim()
        self._used = False

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
        self._own, self._used = own, True
        self._model.reuse.restore(own)
        self._model.make_way()

    def _read(self, own: Sequence) -> Generator[None, None, None]:
        """All but the last of its tokens, in pieces. A piece is awaited when the next one is under way; the last is not
        awaited here."""
        reuse, budget, narrowing = self._model.reuse, self._model.budget, Narrowing(self._rows, _row(own))
        before: list[mx.array] = []
        while own.remaining > 1:
            began = time.monotonic()
            stop = min(reuse.next_stop(own) - own.computed, budget.widest_launch(own.computed), self._width)
            width = min(own.remaining - 1, stop)
            tokens = mx.array(own.tokens[own.computed : own.computed + width], dtype=mx.uint32)
            with narrowing:
                logits = self.adapter.run(self._rows, tokens, [Part((_row(own),), width)], [width - 1])
            running = [logits, *self._rows.pending()]
            mx.async_eval(running)
            mx.eval(before)
            before = running
            own.computed += width
            reuse.keep(own)
            self._pace(time.monotonic() - began, width)
            yield

    def _pace(self, seconds: float, width: int) -> None:
        """Read more at once where a piece is nothing, so that what any piece takes is paid seldom."""
        if seconds < QUICK_S and width == self._width:
            self._width = min(2 * self._width, AT_ONCE)
        elif seconds > SLOW_S:
            self._width = max(self._width // 2, CATCH_UP)

    def _write(self, own: Sequence, ends: frozenset[int]) -> Onlookers:
        """What its last token asks, and the likeliest ones behind it, up to one that ends an answer."""
        asked, row = Onlookers(self._rows), _row(own)
        if not self._rewinds:
            with asked:
                self._chain(own, ends, 1, lambda token, _: self._asking(row, token))
            return asked
        # Quickly first, by whatever runs a step at once; then all of them once more, to hear what they ask.
        written = self._chain(
            *(own, ends, UNREAD),
            lambda token, count: self.adapter.run(self._rows, token, [Part((row,), 1, tentative=count)]),
        )
        self._rows.rewind(row, len(own.prompt) - 1)
        with asked:
            self._asking(row, mx.array(written, dtype=mx.uint32))  # whose answer nobody needs
        mx.async_eval(self._rows.pending(), asked.pending())
        return asked

    def _chain(
        self, own: Sequence, ends: frozenset[int], unread: int, step: Callable[[mx.array, int], mx.array]
    ) -> list[int]:
        """The prompt's last token and those that follow, each computed by `step`, which is told how many these are. So
        many are asked for before any is read: each needs the one before, but not that somebody knows it."""
        written, token = own.tokens[-1:], mx.array(own.tokens[-1:], dtype=mx.uint32)
        while len(written) <= AHEAD and (len(written) == 1 or written[-1] not in ends):
            drawn: list[mx.array] = []
            for _ in range(min(unread, AHEAD + 1 - len(written))):
                logits = step(token, len(written) + len(drawn))
                token = mx.argmax(logits[-1:], axis=-1).astype(mx.uint32)
                drawn.append(token)
                mx.async_eval(token, self._rows.pending())
                if len(written) == len(drawn) == 1:
                    own.computed += 1
                    self._model.reuse.keep(own, last=True)
            read: list[int] = mx.concatenate(drawn).tolist()  # type: ignore[assignment]
            ended = next((at for at, each in enumerate(read) if each in ends), len(read))
            written = [*written, *read[: ended + 1]]
        return written

    def _asking(self, row: Row, tokens: mx.array) -> mx.array:
        """Some tokens, by the layers' own modules, who tell what they ask: stated positions are in no graph."""
        begin, end = row.position, row.position + tokens.size
        stated = mx.arange(begin, end, dtype=mx.int32)
        return self.adapter.run(self._rows, tokens, [Part((row,), tokens.size, stated, end)], [tokens.size - 1])

    def _try(self) -> None:
        """See that layers tell what is asked of them."""
        row, asked = self._rows.new(), Onlookers(self._rows)
        try:
            with asked:
                if self.adapter.mixed:
                    mx.eval(self._asking(row, mx.array([0], dtype=mx.uint32)), self._rows.pending())
        finally:
            self._rows.leave(row)
        if not asked.answered:
            raise ModelError(
                f"A model of type {self.adapter.family} cannot score prompts: none of its layers tells what it "
                "attends to over a whole prompt. Choose a draft with plain attention."
            )


def named(prompt: tuple[int, ...]) -> Scores:
    """Of each chunk, how rare what it has of the tokens is that stand at the prompt's end, too."""
    begins = np.arange(0, len(prompt), CHUNK)
    return np.repeat(np.maximum.reduceat(by_statistics(prompt), begins), CHUNK)[: len(prompt)]


def _row(sequence: Sequence) -> Row:
    assert sequence.row is not None
    return sequence.row


def _room(own: Sequence) -> Reserved:
    return own, rounded(len(own.prompt) + AHEAD)
