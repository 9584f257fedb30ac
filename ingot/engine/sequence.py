"""A sequence: one answer in the making, and the layout of its prompt.

A few integers are all that scheduling needs of it. `PromptMedia` knows which images and videos are where in the prompt,
`ThinnedPrompt` which tokens SpecPrefill left out: both give RoPE positions, and the keys by which the prefix cache
knows tokens. Everything here belongs to the engine thread once a sequence runs.

No record ends inside a medium. Where the tokens of an image attend to each other (Gemma 3), prompt chunks end before or
after the image, and attention computes its tokens once more over all keys up to its end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from sys import maxsize

import numpy as np

from ingot.cache.codecs.names import RAW
from ingot.cache.forward_batch import Row
from ingot.engine.request import CacheReport, Phase, Request, Sampling, SpecPrefillReport
from ingot.engine.specprefill.selection import KeptPositions
from ingot.errors import IngotError
from ingot.media.items import MediaItem, TokenSpan
from ingot.models.vision.tower import PositionArray, VisionFeatures, VisionTower
from ingot.text.grammar.matcher import GrammarMatcher
from ingot.text.tokenizer.tokenizer import PromptTranslation


@dataclass(eq=False, slots=True)
class TokenSequence:
    """`tokens` are those that were read, `computed` of them have their KV in a row, `sampled` new ones were sampled.

    A sampled token may not be read yet: the engine reads a step's tokens while the next step runs.
    """

    request: Request
    index: int
    ticket: int  # order of arrival
    prompt: tuple[int, ...]
    limit: int  # most new tokens
    seed: int
    stop_tokens: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    sampled: int = 0
    reserved: int = 0
    row: Row | None = None  # while it runs
    decoding: bool = False
    ended: bool = False
    preemptions: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None  # when its newest token was read
    scored: int = 0  # prompt tokens whose logprobs are computed, or being computed
    prompt_media: PromptMedia | None = None  # the images and videos of its prompt
    thinned: ThinnedPrompt | None = None  # where SpecPrefill left out a part of its prompt
    specprefill: SpecPrefillReport | None = None  # once it is decided how much of its prompt is computed
    translated: PromptTranslation | None = None  # its prompt in the tokens of the SpecPrefill scorer
    scoring_at: float | None = None  # when SpecPrefill began to score it
    marks: frozenset[int] = frozenset()  # lengths at which a message of the prompt ends
    stops: frozenset[int] = frozenset()  # further lengths at which its KV is worth caching
    common_prefixes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By another's ticket: its own length, the other's, and how many tokens they have in common."""
    cached: int = 0  # tokens that were reused when it first ran
    report: CacheReport | None = None  # the same, explained
    kept: int = 0  # tokens of it that the prefix index holds
    codec: str = RAW  # of the KV that was reused
    proposed: int = 0  # draft tokens
    accepted: int = 0  # of those
    passes: int = 0  # forward passes that decoded it
    unread: list[int] = field(default_factory=list)  # verified, but not yet in `tokens`
    matcher: GrammarMatcher | None = None  # has accepted `tokens`, each once
    mask_error: IngotError | None = None  # why there was no mask for its next token, which is not used
    failure: IngotError | None = None  # of its grammar: it must end without its newest token

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def live_row(self) -> Row:
        """The row of a running sequence."""
        assert self.row is not None
        return self.row

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def arrived(self) -> float:
        return self.request.arrived

    @property
    def stored(self) -> Sequence[int]:
        """The tokens whose KV its row has, and perhaps more."""
        return [*self.tokens, *self.unread] if self.unread else self.tokens

    @property
    def keys(self) -> Sequence[int]:
        """Its tokens as the prefix index knows them."""
        return self.keyed(self.tokens)

    def keyed(self, tokens: Sequence[int]) -> Sequence[int]:
        layout = self._layout
        return tokens if layout is None else layout.keyed(tokens)

    @property
    def _layout(self) -> ThinnedPrompt | PromptMedia | None:
        """The layout of its prompt, where its positions are not consecutive."""
        return self.thinned or self.prompt_media

    def position(self, index: int) -> int:
        """The RoPE position of the token at `index`."""
        layout = self._layout
        return index if layout is None else layout.position(index)

    def explicit_positions(self, begin: int, end: int) -> PositionArray | None:
        """Positions of the tokens [begin, end), where they are not consecutive."""
        layout = self._layout
        return None if layout is None else layout.explicit_positions(begin, end)

    def thin(self, selection: KeptPositions) -> None:
        """Shorten its prompt to a selection, before any of it is computed."""
        assert self.row is None and not self.sampled
        self.prompt_media = None if self.prompt_media is None else self.prompt_media.thinned(selection)
        self.thinned = ThinnedPrompt(self.prompt, selection, self.prompt_media)
        self.prompt = self.thinned.tokens
        self.tokens = list(self.prompt)
        self.marks = self.thinned.shortened(self.marks)
        self.common_prefixes.clear()

    def with_prompt(self, prompt: tuple[int, ...]) -> TokenSequence:
        """Another sequence of its request, of which nothing is computed yet."""
        return TokenSequence(self.request, self.index, self.ticket, prompt, self.limit, self.seed)

    @property
    def whole_prompt(self) -> tuple[int, ...]:
        """Its prompt as it was sent."""
        return self.prompt if self.thinned is None else self.thinned.whole

    @property
    def most_reusable(self) -> int:
        """Tokens that it may reuse: one always stays to be computed, and no image is cut."""
        most = len(self.tokens) - 1
        item = None if self.prompt_media is None else self.prompt_media.inside(most)
        return most if item is None else item.begin

    @property
    def generated(self) -> Sequence[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def produced(self) -> int:
        """New tokens that were read."""
        return len(self.tokens) - len(self.prompt)

    @property
    def total(self) -> int:
        """Its length, with tokens that are not read yet."""
        return len(self.prompt) + self.sampled

    @property
    def known(self) -> bool:
        """Whether every sampled token has been read back."""
        return len(self.tokens) == self.total

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return self.total - self.computed

    @property
    def peak(self) -> int:
        """Tokens of its row when it is longest: the KV of the last token is never computed."""
        return len(self.prompt) + max(0, self.limit - 1)

    @property
    def exhausted(self) -> bool:
        """Whether all its tokens are sampled, though some may be unread."""
        return self.sampled >= max(1, self.limit)  # a prompt that is only scored still runs to its end

    def banned_at(self, sampled: int) -> Sequence[int]:
        """Tokens that may not come next after so many are sampled."""
        return sorted(self.stop_tokens) if sampled < self.request.stop.min_tokens else ()

    @property
    def scoring(self) -> bool:
        """Whether logprobs of its prompt are still to be computed."""
        return self.sampling.prompt_logprobs is not None and self.scored < len(self.prompt) - 1

    @property
    def phase(self) -> Phase:
        if self.row is None:
            return "queued"
        return "decode" if self.decoding else "prefill"


DIGEST_WORDS = 4
"""Words of a digest that become keys, one for each of an item's first tokens."""


@dataclass(eq=False, slots=True)
class PromptMedia:
    items: tuple[MediaItem, ...]
    positions: PositionArray | None = None  # [3, tokens of the prompt], where the model has three axes
    bidirectional: bool = False  # whether the tokens of an item all attend to each other
    features: dict[bytes, VisionFeatures] = field(default_factory=dict)
    """By digest, of the items that are still to be prefilled."""

    @classmethod
    def of(cls, prompt: Sequence[int], items: tuple[MediaItem, ...], tower: VisionTower) -> PromptMedia:
        return cls(items, tower.positions(len(prompt), items), tower.bidirectional)

    def keyed(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as the prefix index knows them: the first placeholder tokens of an item are replaced by its digest, as
        negative numbers, so that prompts are equal up to the first item in which they differ."""
        keys = list(tokens)
        for item in self.items:
            # Words of 64 bits, as record files hold them.
            words = struct.iter_unpack("<Q", item.digest[: 8 * DIGEST_WORDS])
            for index, (word,) in zip(range(item.begin, min(item.end, len(keys))), words, strict=False):
                keys[index] = -1 - (word >> 1)
        return keys

    def thinned(self, selection: PositionArray) -> PromptMedia:
        """The same for a selection of the tokens: of each item all of them, or none."""
        remaining = set(selection.tolist())
        items = []
        for item in self.items:
            if item.begin in remaining:
                moved = int(np.searchsorted(selection, item.begin)) - item.begin
                items.append(replace(item, runs=tuple((begin + moved, end + moved) for begin, end in item.runs)))
        positions = None if self.positions is None else self.positions[:, selection]
        return PromptMedia(tuple(items), positions, self.bidirectional, self.features)

    @property
    def spans(self) -> list[TokenSpan]:
        """Tokens that are kept or left out together: each item with its begin and end markers, a token on each side
        unless that belongs to another item."""
        ends = [0, *(item.end for item in self.items)]
        begins = [item.begin for item in self.items]
        return [
            (max(previous, begin - 1), min(following, end + 1))
            for previous, begin, end, following in zip(ends, begins, ends[1:], [*begins[1:], maxsize], strict=False)
        ]

    def inside(self, index: int) -> MediaItem | None:
        """The item that the first `index` tokens would cut."""
        return next((item for item in self.items if item.begin < index < item.end), None)

    def uncut(self, begin: int, count: int) -> int:
        """How many tokens from `begin` on can be computed at once: `count`, or as many as it takes to cut no item whose
        tokens attend to each other."""
        for start, stop in self._mutual_spans:
            if start < begin + count < stop:
                return (start if start > begin else stop) - begin
        return count

    def mutual_within(self, begin: int, end: int) -> tuple[TokenSpan, ...]:
        """Items in tokens [begin, end) whose tokens attend to each other, relative to `begin`."""
        return tuple((start - begin, stop - begin) for start, stop in self._mutual_spans if begin <= start < end)

    @property
    def _mutual_spans(self) -> Iterator[TokenSpan]:
        return ((item.begin, item.end) for item in self.items if self.bidirectional)

    def ahead(self, computed: int) -> list[MediaItem]:
        """Items whose features a sequence needs after so many computed tokens, each content once."""
        return list({item.digest: item for item in self.items if item.end > computed}.values())

    def position(self, index: int) -> int:
        """The position of a text token at `index`, or of the item that begins there."""
        if self.positions is None:
            return index
        prompt = self.positions.shape[1]
        if index < prompt:
            return int(self.positions[:, index].min())
        return int(self.positions.max()) + 1 + index - prompt

    def explicit_positions(self, begin: int, end: int) -> PositionArray | None:
        """[3, end - begin], or None where all of the tokens are text, or positions have one axis."""
        if self.positions is None or not any(True for _ in self.seen(begin, end)):
            return None
        return self.axes(self.positions, begin, end)

    def axes(self, positions: PositionArray, begin: int, end: int) -> PositionArray:
        """[3, end - begin]: the prompt's tokens at `positions`, and text after it."""
        own, behind = positions[:, begin:end], end - max(begin, positions.shape[1])
        if behind <= 0:
            return own
        text = np.arange(behind, dtype=np.int32) + self.position(end - behind)
        return np.concatenate([own, np.broadcast_to(text, (3, behind))], axis=1)

    def seen(self, begin: int, end: int) -> Iterator[tuple[bytes, range, range]]:
        """For each run, or its part, in tokens [begin, end): the item's digest, which of its features, and for which
        tokens."""
        for item in self.items:
            first = 0
            for start, stop in item.runs:
                low, high = max(start, begin), min(stop, end)
                if low < high:
                    yield item.digest, range(first + low - start, first + high - start), range(low, high)
                first += stop - start


GAP_KEY = 1 << 32
"""Added to a token's key for each token that was left out before it, so that it equals no token."""


@dataclass(frozen=True, eq=False, slots=True)
class ThinnedPrompt:
    whole: tuple[int, ...]  # all of the prompt
    selection: KeptPositions  # of the tokens that are left, in order; the prompt's last is among them
    prompt_media: PromptMedia | None = None  # what is left of it

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.whole[index] for index in self.selection.tolist())

    def keyed(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as the prefix index knows them. KV depends on which tokens came before, and where: what follows a gap
        is reused only by prompts that left out the same."""
        count = len(self.selection)
        keys = tokens if self.prompt_media is None else self.prompt_media.keyed(tokens)
        gaps = np.diff(self.selection, prepend=-1).astype(np.int64) - 1
        prompt = np.asarray(keys[:count], dtype=np.int64) + GAP_KEY * gaps[: len(keys)]
        return [*prompt.tolist(), *keys[count:]]

    def position(self, index: int) -> int:
        """After the prompt, positions are consecutive again."""
        if self.prompt_media is not None and self.prompt_media.positions is not None:
            return self.prompt_media.position(index)
        count = len(self.selection)
        return int(self.selection[index]) if index < count else len(self.whole) + index - count

    def explicit_positions(self, begin: int, end: int) -> PositionArray | None:
        """Of tokens [begin, end); None where they and the next one are consecutive."""
        prompt_media, consecutive = self.prompt_media, self.position(end) - self.position(begin) == end - begin
        if prompt_media is not None and prompt_media.positions is not None:
            seen = prompt_media.explicit_positions(begin, end)
            return seen if seen is not None or consecutive else prompt_media.axes(prompt_media.positions, begin, end)
        if consecutive:
            return None
        after = np.arange(len(self.whole), len(self.whole) + end - len(self.selection), dtype=np.int32)
        return np.concatenate([self.selection[begin:end], after])

    def shortened(self, lengths: frozenset[int]) -> frozenset[int]:
        """Lengths of the whole prompt as lengths of the selection."""
        return frozenset(int(np.searchsorted(self.selection, length)) for length in lengths)
