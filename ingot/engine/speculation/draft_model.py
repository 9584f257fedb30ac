"""Guesses of a smaller model of the same tokenizer, which reads along with states of its own.

For each sequence that it guesses for it has a row, whose tokens are the sequence's known ones and, behind them, what it
guessed last. A long prompt is read in pieces, a piece in each step, before the first guess. What it read is kept like
the target's prefixes, so that the next turn of a conversation does not begin anew.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from ingot.cache.footprint import rounded
from ingot.cache.forward_batch import Part, Row
from ingot.engine.draft_model import CATCH_UP, DraftModel, Reserved, reading
from ingot.engine.forward_pass import LaunchPart
from ingot.engine.scheduler import Chunk
from ingot.engine.sequence import Sequence
from ingot.engine.speculation.ahead import agreement
from ingot.engine.speculation.by_depth import columns
from ingot.engine.speculation.proposer import Offer, Proposal
from ingot.errors import ModelError

FURTHEST = 16
"""Most tokens that are guessed at once."""


@dataclass(eq=False, slots=True)
class _Reader:
    """What the draft knows of a sequence. `own` is the sequence as it is for the draft: its tokens are the same, but
    its row and what is computed of it are the draft's."""

    own: Sequence
    known: int = 0  # tokens that were known when the guess was made
    guess: tuple[int, ...] = ()
    sure: tuple[float, ...] = ()

    @property
    def row(self) -> Row:
        assert self.own.row is not None
        return self.own.row

    @property
    def reserved(self) -> Reserved:
        return self.own, rounded(self.own.total + FURTHEST)

    @property
    def current(self) -> bool:
        """Nothing came since the guess was made."""
        return bool(self.guess) and self.known == len(self.own.tokens)


class Draft:
    name = "draft"

    def __init__(self, model: DraftModel, *, vocab: int) -> None:
        """`vocab` is the target's. Raises ModelError where the model cannot be a draft."""
        self.model, self.rows, self.reuse = model, model.rows, model.reuse
        if "recurrent" in self.rows.kinds:
            raise ModelError(
                f"A model of type {model.adapter.family} cannot be a draft: its recurrent layers cannot go back to "
                "where a guess was wrong. Choose one with attention in all its layers."
            )
        self._adapter, self._vocab = model.adapter, vocab
        self._readers: dict[Sequence, _Reader] = {}
        model.add_holder(self._seated, self._leave_all)

    def offers(self, rows: Many[Sequence]) -> list[Offer | None]:
        readers = [self._reader(row) for row in rows]
        fitting = self._fitting(readers)
        for reader in readers:
            if reader not in fitting:
                self._leave(reader)
        return [Offer(self.name, FURTHEST) if reader in fitting else None for reader in readers]

    def propose(self, rows: Many[Sequence], counts: Many[int]) -> list[Proposal]:
        readers = [self._reader(row) for row in rows]
        behind = {
            reader: count for reader, count in zip(readers, counts, strict=True) if count > 0 and not reader.current
        }
        for reader in behind:
            self._seat(reader)
        self.model.make_way()
        self._guess(behind)
        return [
            Proposal(reader.guess[:count], self.name, reader.sure[:count])
            for reader, count in zip(readers, counts, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        reader = self._readers.pop(sequence, None)
        if reader is not None:
            self._leave(reader)

    @property
    def follows(self) -> Collection[Sequence]:
        return self._readers.keys()

    def rest(self) -> None:
        self.check()
        self.rows.trim()

    def check(self) -> None:
        self.model.check()

    # Rows

    def _reader(self, sequence: Sequence) -> _Reader:
        reader = self._readers.get(sequence)
        if reader is None:
            reader = self._readers[sequence] = _Reader(reading(sequence))
        own = reader.own
        if sequence.thinned is not None:
            own.tokens += sequence.generated[own.produced :]
        own.sampled = sequence.produced
        return reader

    def _fitting(self, readers: Many[_Reader]) -> set[_Reader]:
        """Those for whom there are memory and positions, who have a row already first."""
        able = [reader for reader in readers if reader.own.total + FURTHEST <= self._adapter.context]
        among = {reader.own for reader in readers}
        if self.model.fits([reader.reserved for reader in able], among):
            return set(able)
        fitting: list[_Reader] = []
        for reader in sorted(able, key=lambda reader: reader.own.row is None):
            if self.model.fits([each.reserved for each in (*fitting, reader)], among):
                fitting.append(reader)
        return set(fitting)

    def _seat(self, reader: _Reader) -> None:
        """See that it has a row, with nothing in it that did not come true, and something left to compute."""
        own = reader.own
        if own.row is None:
            self.reuse.admit(own)
            own.row = self.rows.new()
            self.reuse.restore(own)
        self._take_back(reader, own.total - 1)
        own.computed = reader.row.length

    def _leave(self, reader: _Reader) -> None:
        """What it read is kept; its row is given back, if it has one."""
        own = reader.own
        if own.row is not None:
            self._take_back(reader, len(own.tokens))
            self.reuse.keep(own, last=True)
            self.rows.leave(own.row)
            own.row, own.decoding, own.computed, own.kept = None, False, 0, 0

    def _seated(self) -> list[Reserved]:
        return [reader.reserved for reader in self._readers.values() if reader.own.row is not None]

    def _leave_all(self) -> None:
        for reader in self._readers.values():
            self._leave(reader)

    def _take_back(self, reader: _Reader, most: int) -> None:
        """Let the row forget what was guessed and did not come true, and what came true behind so many tokens."""
        row, tokens = reader.row, reader.own.tokens
        stored = reader.guess[: max(0, row.length - reader.known)]
        came = tokens[reader.known : reader.known + len(stored)]
        right = agreement(stored[: len(came)], came)
        self.rows.rewind(row, min(most, row.length - len(stored) + right))
        reader.guess = reader.sure = ()

    # Forward passes

    def _guess(self, counts: dict[_Reader, int]) -> None:
        ready, chunks = _due(list(counts))
        ready.sort(key=lambda reader: -counts[reader])
        if not (ready or chunks):
            return
        logits = self._read(ready, chunks)
        depths = [counts[reader] for reader in ready]
        tokens, sure = self._chain(ready, depths, logits) if ready else ([], [])
        mx.eval(logits, tokens, sure, self.rows.pending())
        guesses, likely = columns(tokens, len(ready)), columns(sure, len(ready))
        for number, reader in enumerate(ready):
            reader.known = reader.own.total
            reader.guess, reader.sure = tuple(map(int, guesses[number])), tuple(likely[number])

    def _read(self, ready: list[_Reader], chunks: dict[_Reader, int]) -> mx.array:
        """Compute what is known and not yet computed; logits behind the last token of those that are ready, in their
        order."""
        readers = {reader.own: reader for reader in ready}
        pieces = [Chunk(reader.own, count, final=False) for reader, count in chunks.items()]
        given: list[mx.array] = []
        order: list[_Reader] = []
        for parts in self.model.passes.of(list(readers), pieces):
            given.append(self._run(parts))
            order += [readers[own] for part in parts if part.draws for own in part.sequences]
            mx.async_eval(given[-1], self.rows.pending())
        logits = mx.concatenate(given)
        return logits[mx.array([order.index(reader) for reader in ready])] if ready else logits

    def _run(self, parts: list[LaunchPart]) -> mx.array:
        """A pass over known tokens; logits of those that are to guess, or of one token that stands for the work."""
        rows = [(part, own) for part in parts for own in part.sequences]
        tokens = [token for part, own in rows for token in own.tokens[own.computed : own.computed + part.width]]
        ends = list(accumulate(part.width for part, _ in rows))
        at = [end - 1 for end, (part, _) in zip(ends, rows, strict=True) if part.draws]
        launched = [part.part for part in parts]
        logits = self._adapter.run(self.rows, mx.array(tokens, dtype=mx.uint32), launched, at or [ends[-1] - 1])
        for part, own in rows:
            own.computed += part.width
            if not own.decoding:
                self.reuse.keep(own, last=part.draws)  # now: what is guessed behind it may be wrong
                own.decoding = part.draws
        return logits if at else logits[:0]

    def _chain(
        self, readers: list[_Reader], depths: list[int], logits: mx.array
    ) -> tuple[list[mx.array], list[mx.array]]:
        """The likeliest tokens, and how likely they are, by depth: each for as many of the first as go that deep."""
        tokens: list[mx.array] = []
        sure: list[mx.array] = []
        for depth in range(depths[0]):
            going = [reader.row for reader, most in zip(readers, depths, strict=True) if most > depth]
            if depth:
                logits = self._step(going, tokens[-1][: len(going)], depth)
            likelihoods = mx.softmax(logits[:, : self._vocab].astype(mx.float32), axis=-1)
            tokens.append(mx.argmax(likelihoods, axis=-1).astype(mx.uint32))
            sure.append(mx.max(likelihoods, axis=-1))
            mx.async_eval(tokens[-1], sure[-1], self.rows.pending())
        return tokens, sure

    def _step(self, rows: list[Row], tokens: mx.array, tentative: int) -> mx.array:
        """One more token of each row."""
        if self._adapter.ragged:
            return self._adapter.run(self.rows, tokens, [Part(tuple(rows), 1, tentative=tentative)])
        each = [
            self._adapter.run(self.rows, tokens[number : number + 1], [Part((row,), 1, tentative=tentative)])
            for number, row in enumerate(rows)
        ]
        return mx.concatenate(each)


def _due(readers: list[_Reader]) -> tuple[list[_Reader], dict[_Reader, int]]:
    """Who can read all that is left in this step, and who a piece of it: those with little left first."""
    ready: list[_Reader] = []
    pieces: dict[_Reader, int] = {}
    left = CATCH_UP
    for reader in sorted(readers, key=lambda reader: reader.own.remaining):
        count = min(left, reader.own.remaining)
        left -= count
        if count == reader.own.remaining:
            ready.append(reader)
        elif count:
            pieces[reader] = count
    return ready, pieces
