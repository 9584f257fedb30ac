"""Scorers, which say how much each token of a prompt matters.

`StatisticsScorer` runs no model: what is rare in a prompt and stands at its end, too, is what the end is about.
`DraftScorer` has a draft of the same tokenizer read the prompt and write a few tokens; what those attend to, over
all layers and heads, is what matters, as well as what the prompt's end names. What it read is cached, so that the
next turn of a conversation is read from there on; reading a long prompt, it attends to chosen pages, so that
reading on costs no more and more. `TranslatedScorer` does so with a draft of another tokenizer, which reads the
prompt's text in tokens of its own. Only the engine thread may call them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Many
from typing import Protocol

import mlx.core as mx
import numpy as np

from ingot.cache.attention_state import AppendState, PageSelection
from ingot.cache.batch_state import BatchState
from ingot.cache.footprint import round_up_capacity
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.cache.page_groups import PageGroup, PageIndex
from ingot.cache.pages import PAGE, pages_for_tokens
from ingot.engine.sequence import TokenSequence
from ingot.engine.specprefill.selection import CHUNK_TOKENS, PromptScores
from ingot.engine.speculation.draft_model import (
    CATCH_UP_TOKENS,
    LONGEST_DRAFT_PASS,
    DraftModel,
    ReservedTokens,
    draft_view_of,
)
from ingot.errors import ModelError, Overloaded
from ingot.models.layers.attention import AttentionQueries

ScoringWork = Generator[None, None, PromptScores]
"""Goes on by a bounded piece each time, and gives a score for each token in the end. Whoever closes it early leaves
nothing behind."""


class PromptScorer(Protocol):
    name: str

    def unread(self, sequence: TokenSequence) -> int:
        """Tokens of its prompt that would have to be read for it."""
        ...

    def able(self, sequence: TokenSequence) -> bool:
        """Whether such a prompt can be scored."""
        ...

    def score(self, sequence: TokenSequence) -> ScoringWork: ...

    def rest(self) -> None:
        """Nothing runs."""
        ...

    def check(self) -> None: ...


TAIL_TOKENS = 64
"""Tokens at the end of a prompt that are looked for in the rest."""


class StatisticsScorer:
    name = "statistics"

    def unread(self, sequence: TokenSequence) -> int:
        return len(sequence.whole_prompt)

    def able(self, sequence: TokenSequence) -> bool:
        return True

    def score(self, sequence: TokenSequence) -> ScoringWork:
        return rarity_scores(sequence.whole_prompt)
        yield  # there is but one piece

    def rest(self) -> None: ...

    def check(self) -> None: ...


def rarity_scores(prompt: tuple[int, ...]) -> PromptScores:
    """How much rarer a token is that also stands at the end."""
    tokens = np.asarray(prompt)
    _, which, often = np.unique(tokens, return_inverse=True, return_counts=True)
    return np.where(np.isin(tokens, tokens[-TAIL_TOKENS:]), 1 / often[which], 0.0).astype(np.float32)


class TranslatedScorer:
    def __init__(self, scorer: PromptScorer, ends: frozenset[int]) -> None:
        """`ends` are the draft's tokens that end an answer."""
        self._scorer, self._ends = scorer, ends
        self.name = scorer.name

    def unread(self, sequence: TokenSequence) -> int:
        return self._scorer.unread(self._own(sequence))

    def able(self, sequence: TokenSequence) -> bool:
        """What stands for pictures is no text."""
        own = self._own(sequence)
        return sequence.sight is None and bool(own.prompt) and self._scorer.able(own)

    def score(self, sequence: TokenSequence) -> ScoringWork:
        assert sequence.translated is not None
        scores = yield from self._scorer.score(self._own(sequence))
        return sequence.translated.back(scores)

    def rest(self) -> None:
        self._scorer.rest()

    def check(self) -> None:
        self._scorer.check()

    def _own(self, sequence: TokenSequence) -> TokenSequence:
        """The sequence as the draft has it."""
        translated = sequence.translated
        assert translated is not None, "a prompt is translated at the door"
        own = TokenSequence(
            sequence.request, sequence.index, sequence.ticket, translated.tokens, sequence.limit, sequence.seed
        )
        own.stop_tokens, own.marks = self._ends, translated.places(sequence.marks)
        return own


LOOKAHEAD_TOKENS = 24
"""Tokens that it writes, unless its answer ends before: what matters may be looked up only once an answer has begun."""
UNREAD_TOKENS = 8
"""Of them, those that are asked for before any is read: then it may turn out that an answer ended before some."""
NAMED_WEIGHT = 0.5
"""What it weighs beside attention that the prompt's end names something: a draft may forget to look it up."""
QUICK_S, SLOW_S = 0.03, 0.25
"""Pieces of a prompt that take less are made longer, those that take more shorter."""


class DraftScorer:
    name = "draft"

    def __init__(self, model: DraftModel) -> None:
        """Raises ModelError where what the model attends to cannot be seen."""
        self._model, self.adapter, self._rows = model, model.adapter, model.rows
        self._own: TokenSequence | None = None  # what is being read, as the draft has it
        self._rewinds = "recurrent" not in self._rows.kinds
        self._width = CATCH_UP_TOKENS  # tokens of a piece
        self._used = False  # since the last rest
        self.adapter.allow_separate_layers()
        model.add_holder(self._reserved, lambda: None)
        self._try()

    def able(self, sequence: TokenSequence) -> bool:
        needed = len(sequence.whole_prompt) + LOOKAHEAD_TOKENS
        budget, known = self._model.budget, max(sequence.whole_prompt) < self.adapter.vocab
        return known and needed <= self.adapter.context and budget.fits([(round_up_capacity(needed), False)])

    def unread(self, sequence: TokenSequence) -> int:
        own = draft_view_of(sequence)
        return len(own.prompt) - self._model.reuse.known(own)

    def score(self, sequence: TokenSequence) -> ScoringWork:
        own = draft_view_of(sequence)
        self._seat(own)
        try:
            yield from self._read(own)
            asked = self._write(own, sequence.stop_tokens)
            names = NAMED_WEIGHT * named_scores(own.prompt)  # while the device finds out what is asked
            yield
            return asked.scored(_row_of(own), len(own.prompt)) + names
        finally:
            self._rows.leave(_row_of(own))
            own.row = self._own = None

    def rest(self) -> None:
        """Give memory back, but what the last prompt took not before something else has run: the next one would have to
        make it anew."""
        if not self._used:
            self._rows.trim()
        self._used = False

    def check(self) -> None:
        self._model.check()

    def _reserved(self) -> list[ReservedTokens]:
        return [] if self._own is None else [_reserved_for(self._own)]

    def _seat(self, own: TokenSequence) -> None:
        """Nobody else has room where one prompt takes all of it."""
        if not self._model.fits([_reserved_for(own)]):
            self._model.release_all_rows()
        if not self._model.fits([_reserved_for(own)]):
            raise Overloaded("There is no memory for reading this prompt with the draft model")
        self._model.reuse.admit(own)
        own.row = self._rows.new()
        self._own, self._used = own, True
        self._model.reuse.restore(own)
        self._model.make_room_for_running()

    def _read(self, own: TokenSequence) -> Generator[None, None, None]:
        """All but the last of its tokens, in pieces. A piece is awaited when the next one is under way; the last is not
        awaited here."""
        reuse, budget, narrowing = self._model.reuse, self._model.budget, NarrowedAttention(self._rows, _row_of(own))
        before: list[mx.array] = []
        while own.remaining > 1:
            began = time.monotonic()
            stop = min(reuse.next_stop(own) - own.computed, budget.widest_pass(own.computed), self._width)
            width = min(own.remaining - 1, stop)
            tokens = mx.array(own.tokens[own.computed : own.computed + width], dtype=mx.uint32)
            with narrowing:
                logits = self.adapter.run(self._rows, tokens, [ForwardPart((_row_of(own),), width)], [width - 1])
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
            self._width = min(2 * self._width, LONGEST_DRAFT_PASS)
        elif seconds > SLOW_S:
            self._width = max(self._width // 2, CATCH_UP_TOKENS)

    def _write(self, own: TokenSequence, ends: frozenset[int]) -> AttentionCapture:
        """What its last token asks, and the likeliest ones behind it, up to one that ends an answer."""
        asked, row = AttentionCapture(self._rows), _row_of(own)
        if not self._rewinds:
            with asked:
                self._chain(own, ends, 1, lambda token, _: self._run_captured(row, token))
            return asked
        # Quickly first, by whatever runs a step at once; then all of them once more, to hear what they ask.
        written = self._chain(
            *(own, ends, UNREAD_TOKENS),
            lambda token, count: self.adapter.run(self._rows, token, [ForwardPart((row,), 1, tentative=count)]),
        )
        self._rows.rewind(row, len(own.prompt) - 1)
        with asked:
            self._run_captured(row, mx.array(written, dtype=mx.uint32))  # whose answer nobody needs
        mx.async_eval(self._rows.pending(), asked.pending())
        return asked

    def _chain(
        self, own: TokenSequence, ends: frozenset[int], unread: int, step: Callable[[mx.array, int], mx.array]
    ) -> list[int]:
        """The prompt's last token and those that follow, each computed by `step`, which is told how many these are. So
        many are asked for before any is read: each needs the one before, but not that somebody knows it."""
        written, token = own.tokens[-1:], mx.array(own.tokens[-1:], dtype=mx.uint32)
        while len(written) <= LOOKAHEAD_TOKENS and (len(written) == 1 or written[-1] not in ends):
            drawn: list[mx.array] = []
            for _ in range(min(unread, LOOKAHEAD_TOKENS + 1 - len(written))):
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

    def _run_captured(self, row: Row, tokens: mx.array) -> mx.array:
        """Some tokens, by the layers' own modules, who tell what they ask: stated positions are in no graph."""
        begin, end = row.position, row.position + tokens.size
        stated = mx.arange(begin, end, dtype=mx.int32)
        return self.adapter.run(self._rows, tokens, [ForwardPart((row,), tokens.size, stated, end)], [tokens.size - 1])

    def _try(self) -> None:
        """See that layers tell what is asked of them."""
        row, asked = self._rows.new(), AttentionCapture(self._rows)
        try:
            with asked:
                if self.adapter.mixed:
                    mx.eval(self._run_captured(row, mx.array([0], dtype=mx.uint32)), self._rows.pending())
        finally:
            self._rows.leave(row)
        if not asked.answered:
            raise ModelError(
                f"A model of type {self.adapter.family} cannot score prompts: none of its layers tells what it "
                "attends to over a whole prompt. Choose a draft with plain attention."
            )


def named_scores(prompt: tuple[int, ...]) -> PromptScores:
    """Of each chunk, how rare what it has of the tokens is that stand at the prompt's end, too."""
    begins = np.arange(0, len(prompt), CHUNK_TOKENS)
    return np.repeat(np.maximum.reduceat(rarity_scores(prompt), begins), CHUNK_TOKENS)[: len(prompt)]


def _row_of(sequence: TokenSequence) -> Row:
    assert sequence.row is not None
    return sequence.row


def _reserved_for(own: TokenSequence) -> ReservedTokens:
    return own, round_up_capacity(len(own.prompt) + LOOKAHEAD_TOKENS)


TOKENS_BEHIND = 8
"""Tokens behind a chunk whose shares it is given as well: what a token knows of a prompt stands at it or before it."""
SLICE_PAGES = 256
"""Pages whose keys are read at once."""


class AttentionCapture:
    """Gathers what tokens ask of the keys of each layer that keeps all of them, pass by pass."""

    def __init__(self, rows: BatchState) -> None:
        # What windows have forgotten cannot be asked about.
        self.layers = [state for state in rows.states if type(state) is AppendState]
        self._asked: dict[AppendState, list[AttentionQueries]] = {state: [] for state in self.layers}

    def __enter__(self) -> AttentionCapture:
        for state in self.layers:
            state.query_observer = self._asked[state].append
        return self

    def __exit__(self, *_: object) -> None:
        for state in self.layers:
            state.query_observer = None

    def pending(self) -> list[mx.array]:
        return [asked.turned for layer in self._asked.values() for asked in layer]

    def scored(self, row: Row, tokens: int) -> PromptScores:
        """The scores of the row's first tokens, a chunk's the same: the share of attention that the chunk has of
        whichever head and layer gives it most, for whichever of the tokens that asked. Layer by layer, of which two
        are under way, so that little of it exists at once."""
        assert self.answered, "nothing was asked of any layer"
        slices, best, before = KeySlices(row, tokens), list[mx.array](), mx.array(0.0)
        for state, passes in self._asked.items():
            if passes:
                best.append(sum_by_chunks(attention_shares(join_queries(passes), state, slices)).max(axis=(0, 1)))
                mx.async_eval(best[-1])
                mx.eval(before)
                before = best[-1]
        return np.repeat(np.array(mx.stack(best).max(axis=0), dtype=np.float32), CHUNK_TOKENS)[:tokens]

    @property
    def answered(self) -> int:
        """Layers that were asked."""
        return sum(bool(passes) for passes in self._asked.values())


class KeySlices:
    """A row's first tokens, as many at once as keys are read of: found once for all layers of a group."""

    def __init__(self, row: Row, tokens: int) -> None:
        self._row, self._tokens = row, tokens
        self._found: dict[int, list[tuple[PageIndex, int]]] = {}

    def of(self, group: PageGroup) -> list[tuple[PageIndex, int]]:
        """The pages of each slice, and how many tokens are in it."""
        if group.number not in self._found:
            table = self._row.tables[group.number]
            numbers = table.numbers[: pages_for_tokens(self._tokens)]
            self._found[group.number] = [
                (
                    group.index(numbers[begin : begin + SLICE_PAGES], max(0, table.coded - begin)),
                    self._tokens - begin * PAGE,
                )
                for begin in range(0, len(numbers), SLICE_PAGES)
            ]
        return self._found[group.number]


def join_queries(passes: Many[AttentionQueries]) -> AttentionQueries:
    first = passes[0]
    turned = first.turned if len(passes) == 1 else mx.concatenate([each.turned for each in passes])
    return AttentionQueries(turned, first.scale, first.cap, first.sinks)


def attention_shares(asked: AttentionQueries, state: AppendState, slices: KeySlices) -> mx.array:
    """[heads, asking tokens, tokens]: the share of attention that each of the row's first tokens has. Keys are read a
    slice at a time."""
    count, heads, size = asked.turned.shape
    shared = state.stored.heads
    queries = (asked.scale * asked.turned.astype(mx.float32)).swapaxes(0, 1)
    queries = queries.reshape(shared, heads // shared * count, size)
    products: list[mx.array] = []
    for index, tokens in slices.of(state.group):
        keys, _ = state.stored.gathered(index)
        products.append(queries @ keys[0, :, :tokens].astype(mx.float32).swapaxes(-1, -2))
        mx.async_eval(products[-1])
    shares = products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)
    shares = shares.reshape(heads, count, -1)
    if asked.cap is not None:
        shares = asked.cap * mx.tanh(shares / asked.cap)
    if asked.sinks is None:
        return mx.softmax(shares, axis=-1)
    sinks = mx.broadcast_to(asked.sinks.astype(mx.float32)[:, None, None], (heads, count, 1))
    return mx.softmax(mx.concatenate([shares, sinks], axis=-1), axis=-1)[..., :-1]


def sum_by_chunks(shares: mx.array) -> mx.array:
    """[..., chunks] of shares [..., tokens]: what the tokens of each chunk have of them, and the first behind it."""
    count = shares.shape[-1]
    chunks = -(-count // CHUNK_TOKENS)
    if count % CHUNK_TOKENS:
        shares = mx.pad(shares, [(0, 0)] * (shares.ndim - 1) + [(0, -count % CHUNK_TOKENS)])
    tokens = shares.reshape(*shares.shape[:-1], chunks, CHUNK_TOKENS)
    behind = tokens[..., 1:, :TOKENS_BEHIND].sum(axis=-1)
    return tokens.sum(axis=-1) + mx.pad(behind, [(0, 0)] * (shares.ndim - 1) + [(0, 1)])


class NarrowedAttention:
    """While it is open, passes over one row, and nothing else, see what is chosen in each layer that keeps all tokens.
    What the last tokens of a prompt ask of all others is not computed in such a pass. As long as there is nothing to
    choose from, layers are left alone."""

    def __init__(self, rows: BatchState, row: Row) -> None:
        self._row = row
        self._choices = {state: PageSelection(state, row) for state in rows.states if type(state) is AppendState}

    def __enter__(self) -> None:
        for state, choice in self._choices.items():
            state.choice = choice if choice.narrows(self._row.length) else None

    def __exit__(self, *_: object) -> None:
        for state in self._choices:
            state.choice = None
