"""SpecPrefill scorers, which estimate how much each token of a prompt matters.

`StatisticsScorer` runs no model: tokens that are rare in a prompt and also occur at its end matter. `DraftScorer` lets
a draft model with the same tokenizer read the prompt and generate a few tokens; what those attend to, over all layers
and heads, matters, as well as what the prompt's end names. What it read is cached for the next turn of a conversation.
In a long prompt, it attends to selected pages, so that the cost per token does not grow. `TranslatedScorer` does the
same with a draft of another tokenizer. For the engine thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import mlx.core as mx
import numpy as np

from ingot.cache.attention_state import AppendState, PageSelection
from ingot.cache.batch_state import BatchState
from ingot.cache.footprint import round_up_capacity
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.cache.page_groups import PageGroup, PageIndex
from ingot.cache.pages import PAGE, pages_for_tokens
from ingot.engine.sequence import TokenSequence
from ingot.engine.specprefill.selection import CHUNK_TOKENS, PromptScores, ScoredPrompt
from ingot.engine.speculation.draft_model import (
    CATCH_UP_TOKENS,
    LONGEST_DRAFT_PASS,
    DraftModel,
    ReservedTokens,
    draft_view_of,
)
from ingot.errors import ModelError, Overloaded
from ingot.models.layers.attention import AttentionQueries

ScoringWork = Generator[None, None, ScoredPrompt]
"""Advances by a bounded piece each time, and returns a score for each token in the end. May be closed early."""


class PromptScorer:
    name: str

    def unread(self, sequence: TokenSequence) -> int:
        """Tokens of its prompt that would have to be read."""
        return len(sequence.whole_prompt)

    def able(self, sequence: TokenSequence) -> bool:
        """Whether such a prompt can be scored."""
        return True

    def score(self, sequence: TokenSequence) -> ScoringWork:
        raise NotImplementedError

    def rest(self) -> None:
        """Nothing runs."""

    def check(self) -> None:
        """Raises AssertionError if its state is inconsistent."""


TAIL_TOKENS = 64
"""Tokens at the end of a prompt that are searched for in all of it."""


class StatisticsScorer(PromptScorer):
    name = "statistics"

    def score(self, sequence: TokenSequence) -> ScoringWork:
        return ScoredPrompt(rarity_scores(sequence.whole_prompt))
        yield  # makes it a generator of a single piece


def rarity_scores(prompt: tuple[int, ...]) -> PromptScores:
    """How rare a token is, if it also occurs at the end."""
    tokens = np.asarray(prompt)
    _, which, often = np.unique(tokens, return_inverse=True, return_counts=True)
    return np.where(np.isin(tokens, tokens[-TAIL_TOKENS:]), 1 / often[which], 0.0).astype(np.float32)


class TranslatedScorer(PromptScorer):
    def __init__(self, scorer: PromptScorer, ends: frozenset[int]) -> None:
        """`ends` are the draft's EOS tokens."""
        self._scorer, self._ends = scorer, ends
        self.name = scorer.name

    def unread(self, sequence: TokenSequence) -> int:
        return self._scorer.unread(self._own(sequence))

    def able(self, sequence: TokenSequence) -> bool:
        """Prompts with images cannot be translated."""
        own = self._own(sequence)
        return sequence.prompt_media is None and bool(own.prompt) and self._scorer.able(own)

    def score(self, sequence: TokenSequence) -> ScoringWork:
        assert sequence.translated is not None
        scores, mass = yield from self._scorer.score(self._own(sequence))
        back = sequence.translated.back
        return ScoredPrompt(back(scores), None if mass is None else back(mass))

    def rest(self) -> None:
        self._scorer.rest()

    def check(self) -> None:
        self._scorer.check()

    def _own(self, sequence: TokenSequence) -> TokenSequence:
        """The sequence in the draft's tokens."""
        translated = sequence.translated
        assert translated is not None, "prompts are translated at admission"
        own = sequence.with_prompt(translated.tokens)
        own.stop_tokens, own.marks = self._ends, translated.places(sequence.marks)
        return own


LOOKAHEAD_TOKENS = 24
"""Tokens that the draft generates: what matters may be attended to only once an answer has begun."""
UNREAD_TOKENS = 8
"""Of them, those that are queued before any is read: some may turn out to come after the answer's end."""
NAMED_WEIGHT = 0.5
"""Weight of what the prompt's end names, relative to attention: a draft may miss it."""
QUICK_S, SLOW_S = 0.03, 0.25
"""Pieces of a prompt that take less time are made longer, those that take more shorter."""


class DraftScorer(PromptScorer):
    name = "draft"

    def __init__(self, model: DraftModel) -> None:
        """Raises ModelError where the model's attention cannot be captured."""
        self._model, self.adapter, self._rows = model, model.adapter, model.rows
        self._own: TokenSequence | None = None  # the sequence that is being read, as the draft has it
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
        return len(own.prompt) - self._model.prefix_cache.known(own)

    def score(self, sequence: TokenSequence) -> ScoringWork:
        own = draft_view_of(sequence)
        self._admit(own)
        try:
            yield from self._read(own)
            capture = self._write(own, sequence.stop_tokens)
            names = NAMED_WEIGHT * named_scores(own.prompt)  # while the device computes the queries
            yield
            scores, mass = capture.scored(own.live_row, len(own.prompt))
            return ScoredPrompt(scores + names, mass)
        finally:
            self._rows.leave(own.live_row)
            own.row = self._own = None

    def rest(self) -> None:
        """Free memory, but not that of the last prompt right after it: the next one would have to allocate it again."""
        if not self._used:
            self._rows.trim()
        self._used = False

    def check(self) -> None:
        self._model.check()

    def _reserved(self) -> list[ReservedTokens]:
        return [] if self._own is None else [_reserved_for(self._own)]

    def _admit(self, own: TokenSequence) -> None:
        """A prompt may take all the memory: then the draft's other rows are released."""
        if not self._model.fits([_reserved_for(own)]):
            self._model.release_all_rows()
        if not self._model.fits([_reserved_for(own)]):
            raise Overloaded("There is no memory to score this prompt with the draft model")
        self._model.prefix_cache.admit(own)
        own.row = self._rows.new()
        self._own, self._used = own, True
        self._model.prefix_cache.restore(own)
        self._model.make_room_for_running()

    def _read(self, own: TokenSequence) -> Generator[None, None, None]:
        """Prefill all but the last of its tokens, in pieces. A piece is awaited once the next one runs; the last is not
        awaited."""
        prefix_cache, budget, narrowing = (
            self._model.prefix_cache,
            self._model.budget,
            NarrowedAttention(self._rows, own.live_row),
        )
        before: list[mx.array] = []
        while own.remaining > 1:
            began = time.monotonic()
            stop = min(prefix_cache.next_stop(own) - own.computed, budget.widest_pass(own.computed), self._width)
            width = min(own.remaining - 1, stop)
            tokens = mx.array(own.tokens[own.computed : own.computed + width], dtype=mx.uint32)
            with narrowing:
                logits = self.adapter.run(self._rows, tokens, [ForwardPart((own.live_row,), width)], [width - 1])
            running = [logits, *self._rows.pending()]
            mx.async_eval(running)
            mx.eval(before)
            before = running
            own.computed += width
            prefix_cache.keep(own)
            self._pace(time.monotonic() - began, width)
            yield

    def _pace(self, seconds: float, width: int) -> None:
        """Read more at once where pieces are quick, so that their fixed cost is paid seldom."""
        if seconds < QUICK_S and width == self._width:
            self._width = min(2 * self._width, LONGEST_DRAFT_PASS)
        elif seconds > SLOW_S:
            self._width = max(self._width // 2, CATCH_UP_TOKENS)

    def _write(self, own: TokenSequence, ends: frozenset[int]) -> AttentionCapture:
        """The queries of its last token and of the tokens generated after it, up to an EOS token."""
        capture, row = AttentionCapture(self._rows), own.live_row
        if not self._rewinds:
            with capture:
                self._chain(own, ends, 1, lambda token, _: self._run_captured(row, token))
            return capture
        # First by the fastest path; then all of them once more, to capture their queries.
        written = self._chain(
            *(own, ends, UNREAD_TOKENS),
            lambda token, count: self.adapter.run(self._rows, token, [ForwardPart((row,), 1, tentative=count)]),
        )
        self._rows.rewind(row, len(own.prompt) - 1)
        with capture:
            self._run_captured(row, mx.array(written, dtype=mx.uint32))  # only the queries are needed
        mx.async_eval(self._rows.pending(), capture.pending())
        return capture

    def _chain(
        self, own: TokenSequence, ends: frozenset[int], unread: int, step: Callable[[mx.array, int], mx.array]
    ) -> list[int]:
        """The prompt's last token and those generated after it, each computed by `step`, which gets their count.
        `unread` of them are queued before any is read: each needs the one before on the device alone."""
        written, token = own.tokens[-1:], mx.array(own.tokens[-1:], dtype=mx.uint32)
        while len(written) <= LOOKAHEAD_TOKENS and (len(written) == 1 or written[-1] not in ends):
            sampled: list[mx.array] = []
            for _ in range(min(unread, LOOKAHEAD_TOKENS + 1 - len(written))):
                logits = step(token, len(written) + len(sampled))
                token = mx.argmax(logits[-1:], axis=-1).astype(mx.uint32)
                sampled.append(token)
                mx.async_eval(token, self._rows.pending())
                if len(written) == len(sampled) == 1:
                    own.computed += 1
                    self._model.prefix_cache.keep(own, last=True)
            read: list[int] = mx.concatenate(sampled).tolist()  # type: ignore[assignment]
            end = next((at for at, each in enumerate(read) if each in ends), len(read))
            written = [*written, *read[: end + 1]]
        return written

    def _run_captured(self, row: Row, tokens: mx.array) -> mx.array:
        """Run tokens by the layers' own modules, which report their queries: explicit positions use no captured
        graph."""
        begin, end = row.position, row.position + tokens.size
        stated = mx.arange(begin, end, dtype=mx.int32)
        return self.adapter.run(self._rows, tokens, [ForwardPart((row,), tokens.size, stated, end)], [tokens.size - 1])

    def _try(self) -> None:
        """Check that layers report their queries."""
        row, capture = self._rows.new(), AttentionCapture(self._rows)
        try:
            with capture:
                if self.adapter.mixed:
                    mx.eval(self._run_captured(row, mx.array([0], dtype=mx.uint32)), self._rows.pending())
        finally:
            self._rows.leave(row)
        if not capture.answered:
            raise ModelError(
                f"A model of type {self.adapter.family} cannot score prompts: it has no attention layer over whole "
                "prompts. Choose a draft with plain attention."
            )


def named_scores(prompt: tuple[int, ...]) -> PromptScores:
    """By chunk, how rare its rarest token is that also occurs at the prompt's end."""
    begins = np.arange(0, len(prompt), CHUNK_TOKENS)
    return np.repeat(np.maximum.reduceat(rarity_scores(prompt), begins), CHUNK_TOKENS)[: len(prompt)]


def _reserved_for(own: TokenSequence) -> ReservedTokens:
    return own, round_up_capacity(len(own.prompt) + LOOKAHEAD_TOKENS)


TOKENS_BEHIND = 8
"""Tokens after a chunk whose shares count for it as well: they carry what they know of it."""
CONCENTRATED = 8
"""Attention to a chunk counts as mass beyond so many times the share that it would have if attention were even: what is
spread over everything does not say what matters."""
SLICE_PAGES = 256
"""Pages whose keys are read at once."""


class AttentionCapture:
    """Captures the queries of tokens in each layer that attends to all tokens, pass by pass."""

    def __init__(self, rows: BatchState) -> None:
        # Layers with windows have forgotten most keys.
        self.layers = [state for state in rows.states if type(state) is AppendState]
        self._queries: dict[AppendState, list[AttentionQueries]] = {state: [] for state in self.layers}

    def __enter__(self) -> AttentionCapture:
        for state in self.layers:
            state.query_observer = self._queries[state].append
        return self

    def __exit__(self, *_: object) -> None:
        for state in self.layers:
            state.query_observer = None

    def pending(self) -> list[mx.array]:
        return [queries.rotated for layer in self._queries.values() for queries in layer]

    def scored(self, row: Row, tokens: int) -> ScoredPrompt:
        """The scores of the row's first tokens, equal within a chunk: the largest share of attention that any head of
        any layer gives the chunk, for any of the queries. Their mass is the mean of what is concentrated of those
        shares. Two layers at a time, so that little of it exists at once."""
        assert self.answered, "no layer has captured queries"
        slices, found, before = KeySlices(row, tokens), list[mx.array](), mx.array(0.0)
        for state, passes in self._queries.items():
            if passes:
                own, behind = sum_by_chunks(attention_shares(join_queries(passes), state, slices))
                found.append(mx.stack([(own + behind).max(axis=(0, 1)), concentrated(own)]))
                mx.async_eval(found[-1])
                mx.eval(before)
                before = found[-1]
        by_layer = np.array(mx.stack(found), dtype=np.float32)
        chunks = by_layer[:, 0].max(axis=0), by_layer[:, 1].mean(axis=0) / CHUNK_TOKENS
        return ScoredPrompt(*(np.repeat(each, CHUNK_TOKENS)[:tokens] for each in chunks))

    @property
    def answered(self) -> int:
        """Layers that captured queries."""
        return sum(bool(passes) for passes in self._queries.values())


class KeySlices:
    """A row's first tokens in slices whose keys are read at once; computed once for all layers of a group."""

    def __init__(self, row: Row, tokens: int) -> None:
        self._row, self._tokens = row, tokens
        self._found: dict[int, list[tuple[PageIndex, int]]] = {}

    def of(self, group: PageGroup) -> list[tuple[PageIndex, int]]:
        """The pages of each slice, and how many tokens they hold."""
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


def join_queries(passes: Sequence[AttentionQueries]) -> AttentionQueries:
    first = passes[0]
    rotated = first.rotated if len(passes) == 1 else mx.concatenate([each.rotated for each in passes])
    return AttentionQueries(rotated, first.scale, first.cap, first.sinks)


def attention_shares(captured: AttentionQueries, state: AppendState, slices: KeySlices) -> mx.array:
    """[heads, queries, tokens]: the share of attention of each of the row's first tokens. Keys are read in slices."""
    count, heads, size = captured.rotated.shape
    kv_heads = state.stored.heads
    queries = (captured.scale * captured.rotated.astype(mx.float32)).swapaxes(0, 1)
    queries = queries.reshape(kv_heads, heads // kv_heads * count, size)
    products: list[mx.array] = []
    for index, tokens in slices.of(state.group):
        keys, _ = state.stored.gathered(index)
        products.append(queries @ keys[0, :, :tokens].astype(mx.float32).swapaxes(-1, -2))
        mx.async_eval(products[-1])
    shares = products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)
    shares = shares.reshape(heads, count, -1)
    if captured.cap is not None:
        shares = captured.cap * mx.tanh(shares / captured.cap)
    if captured.sinks is None:
        return mx.softmax(shares, axis=-1)
    sinks = mx.broadcast_to(captured.sinks.astype(mx.float32)[:, None, None], (heads, count, 1))
    return mx.softmax(mx.concatenate([shares, sinks], axis=-1), axis=-1)[..., :-1]


def sum_by_chunks(shares: mx.array) -> tuple[mx.array, mx.array]:
    """[..., chunks] of shares [..., tokens], twice: the sum over each chunk, and over the first tokens after it."""
    count = shares.shape[-1]
    chunks = -(-count // CHUNK_TOKENS)
    if count % CHUNK_TOKENS:
        shares = mx.pad(shares, [(0, 0)] * (shares.ndim - 1) + [(0, -count % CHUNK_TOKENS)])
    tokens = shares.reshape(*shares.shape[:-1], chunks, CHUNK_TOKENS)
    behind = tokens[..., 1:, :TOKENS_BEHIND].sum(axis=-1)
    return tokens.sum(axis=-1), mx.pad(behind, [(0, 0)] * (shares.ndim - 1) + [(0, 1)])


def concentrated(by_chunks: mx.array) -> mx.array:
    """[chunks] of [heads, queries, chunks]: the mean of what each is given beyond CONCENTRATED times the even share."""
    return mx.maximum(by_chunks - CONCENTRATED / by_chunks.shape[-1], 0).mean(axis=(0, 1))


class NarrowedAttention:
    """While it is open, passes over one row attend to selected pages in each layer that attends to all tokens, once the
    row is long enough. Not for the passes whose queries are captured."""

    def __init__(self, rows: BatchState, row: Row) -> None:
        self._row = row
        self._choices = {state: PageSelection(state, row) for state in rows.states if type(state) is AppendState}

    def __enter__(self) -> None:
        for state, choice in self._choices.items():
            state.choice = choice if choice.narrows(self._row.length) else None

    def __exit__(self, *_: object) -> None:
        for state in self._choices:
            state.choice = None
