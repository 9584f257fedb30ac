"""A sequence: one answer in the making, and where the tokens of its prompt stand.

A few integers say all that scheduling needs to know of it. `PromptMedia` says which images and videos stand where
in the prompt, `ThinnedPrompt` which tokens SpecPrefill left out: both give RoPE positions and the keys under which
tokens are known to the prefix cache. Everything here belongs to the engine thread once a sequence runs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from sys import maxsize

import numpy as np

from ingot.cache.codecs.names import RAW
from ingot.cache.forward_batch import Row
from ingot.engine.request import CacheReport, Phase, Request, Sampling, SpecPrefillReport
from ingot.engine.specprefill.selection import KeptPlaces
from ingot.errors import IngotError
from ingot.media.items import MediaItem, TokenSpan
from ingot.models.vision.tower import PositionArray, VisionFeatures, VisionTower
from ingot.text.grammar.matcher import GrammarMatcher
from ingot.text.tokenizer.tokenizer import PromptTranslation


@dataclass(eq=False, slots=True)
class TokenSequence:
    """`tokens` are known, `computed` of them have their states in a row, `sampled` new ones were drawn.

    A drawn token may not be known yet: the engine reads a step's tokens while the next step runs.
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
    scored: int = 0  # prompt tokens whose logprobs are computed or on their way; each is told once
    sight: PromptMedia | None = None  # what its prompt shows besides tokens
    thinned: ThinnedPrompt | None = None  # its prompt as it was sent, where only some of it is computed
    sparse: SpecPrefillReport | None = None  # what came of asking for that, once that is settled
    translated: PromptTranslation | None = None  # its prompt as who scores it has it, where that is in other tokens
    scoring_at: float | None = None  # when it began to be scored
    marks: frozenset[int] = frozenset()  # lengths at which a message of the prompt ends
    stops: frozenset[int] = frozenset()  # further lengths at which it is worth keeping what it computed
    agreed: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By another's ticket: its own length, the other's, and how many tokens they have in common."""
    cached: int = 0  # tokens that were taken over when it first ran
    report: CacheReport | None = None  # the same, explained
    kept: int = 0  # tokens that the prefix index holds of it
    codec: str = RAW  # what its states went through that were taken over
    proposed: int = 0  # tokens that were guessed ahead for it
    accepted: int = 0  # those of them that it would have drawn anyway
    passes: int = 0  # forward passes that drew for it, behind its prompt's
    unread: list[int] = field(default_factory=list)  # drawn and verified, but not yet among its known tokens
    guide: GrammarMatcher | None = None  # what it is held to; has accepted the known tokens, each once
    mask_error: IngotError | None = None  # why its guide could not say what may come next: that draw will not count
    failure: IngotError | None = None  # of its guide: it must end, and its newest token is not to be shown

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
    def stored(self) -> Many[int]:
        """The tokens whose states its row has, and perhaps more."""
        return [*self.tokens, *self.unread] if self.unread else self.tokens

    @property
    def keys(self) -> Many[int]:
        """Its known tokens as the prefix index knows them."""
        return self.keyed(self.tokens)

    def keyed(self, tokens: Many[int]) -> Many[int]:
        placed = self._placed
        return tokens if placed is None else placed.keyed(tokens)

    @property
    def _placed(self) -> ThinnedPrompt | PromptMedia | None:
        """Who knows where its tokens stand, where they do not stand one behind another."""
        return self.thinned or self.sight

    def position(self, place: int) -> int:
        """What RoPE is told of the token that is stored at `place`."""
        placed = self._placed
        return place if placed is None else placed.position(place)

    def stated(self, begin: int, end: int) -> PositionArray | None:
        """Positions of the tokens at places [begin, end), where they do not follow each other."""
        placed = self._placed
        return None if placed is None else placed.stated(begin, end)

    def thin(self, kept: KeptPlaces) -> None:
        """Go on with so much of its prompt, before any of it is computed. From now on it is what is left that counts
        wherever tokens are stored."""
        assert self.row is None and not self.sampled
        self.sight = None if self.sight is None else self.sight.thinned(kept)
        self.thinned = ThinnedPrompt(self.prompt, kept, self.sight)
        self.prompt = self.thinned.tokens
        self.tokens = list(self.prompt)
        self.marks = self.thinned.places(self.marks)
        self.agreed.clear()

    @property
    def whole_prompt(self) -> tuple[int, ...]:
        """As it was sent."""
        return self.prompt if self.thinned is None else self.thinned.whole

    @property
    def most_reusable(self) -> int:
        """Of its tokens, those that it may take over: one always stays to be computed, and no medium is cut."""
        most = len(self.tokens) - 1
        item = None if self.sight is None else self.sight.inside(most)
        return most if item is None else item.begin

    @property
    def generated(self) -> Many[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def produced(self) -> int:
        """New tokens that are known."""
        return len(self.tokens) - len(self.prompt)

    @property
    def total(self) -> int:
        """Tokens that exist, known or not."""
        return len(self.prompt) + self.sampled

    @property
    def known(self) -> bool:
        """Every drawn token has been read back."""
        return len(self.tokens) == self.total

    @property
    def remaining(self) -> int:
        """Tokens whose states are still to be computed."""
        return self.total - self.computed

    @property
    def peak(self) -> int:
        """Tokens that its row holds when it is longest: the last one drawn is never computed."""
        return len(self.prompt) + max(0, self.limit - 1)

    @property
    def exhausted(self) -> bool:
        """All its tokens are drawn; what is left is to read them."""
        return self.sampled >= max(1, self.limit)  # a prompt that is only scored still runs to its end

    def banned_at(self, sampled: int) -> Many[int]:
        """Tokens that may not come next when so many are drawn."""
        return sorted(self.stop_tokens) if sampled < self.request.stop.min_tokens else ()

    @property
    def scoring(self) -> bool:
        """Its prompt's logprobs are asked for and not all on their way yet."""
        return self.sampling.prompt_logprobs is not None and self.scored < len(self.prompt) - 1

    @property
    def phase(self) -> Phase:
        if self.row is None:
            return "queued"
        return "decode" if self.decoding else "prefill"


DIGEST_WORDS = 4
"""Words that a digest is told in, one for each of a medium's first tokens."""


@dataclass(eq=False, slots=True)
class PromptMedia:
    items: tuple[MediaItem, ...]
    positions: PositionArray | None = None  # [3, tokens of the prompt], where the model has three axes
    bidirectional: bool = False  # whether the tokens of a run all see each other
    features: dict[bytes, VisionFeatures] = field(default_factory=dict)
    """By digest, those of items that are still to be computed, while the sequence waits for them or computes them."""

    @classmethod
    def of(cls, prompt: Many[int], items: tuple[MediaItem, ...], tower: VisionTower) -> PromptMedia:
        return cls(items, tower.positions(len(prompt), items), tower.bidirectional)

    def keyed(self, tokens: Many[int]) -> list[int]:
        """Tokens as the prefix index knows them: two prompts are the same up to the first medium in which they differ,
        whatever tokens stand for it. What stands for its content is no token: it is negative."""
        keys = list(tokens)
        for item in self.items:
            for place, word in zip(range(item.begin, item.end), _digest_words(item.digest), strict=False):
                if place < len(keys):
                    keys[place] = word
        return keys

    def thinned(self, kept: PositionArray) -> PromptMedia:
        """The same where only the tokens at these places are left: of each medium all of them, or none."""
        left = set(kept.tolist())
        items = []
        for item in self.items:
            if item.begin in left:
                moved = int(np.searchsorted(kept, item.begin)) - item.begin
                items.append(replace(item, runs=tuple((begin + moved, end + moved) for begin, end in item.runs)))
        positions = None if self.positions is None else self.positions[:, kept]
        return PromptMedia(tuple(items), positions, self.bidirectional, self.features)

    @property
    def spans(self) -> list[TokenSpan]:
        """What is kept or left out together: each medium with a token on each side, which mark where it begins and
        ends, unless that is another one's."""
        ends = [0, *(item.end for item in self.items)]
        begins = [item.begin for item in self.items]
        return [
            (max(before, begin - 1), min(behind, end + 1))
            for before, begin, end, behind in zip(ends, begins, ends[1:], [*begins[1:], maxsize], strict=False)
        ]

    def inside(self, place: int) -> MediaItem | None:
        """The medium in the middle of which a sequence of so many tokens would end."""
        return next((item for item in self.items if item.begin < place < item.end), None)

    def uncut(self, begin: int, count: int) -> int:
        """How many tokens from `begin` on can be computed at once: `count`, or fewer, so that no run is cut whose
        tokens see each other; all of it where that is the first."""
        for start, stop in self._mutual_runs:
            if start < begin + count < stop:
                return (start if start > begin else stop) - begin
        return count

    def mutual_within(self, begin: int, end: int) -> tuple[TokenSpan, ...]:
        """Runs among tokens [begin, end) whose tokens see each other, counted from `begin`."""
        return tuple((start - begin, stop - begin) for start, stop in self._mutual_runs if begin <= start < end)

    @property
    def _mutual_runs(self) -> Iterator[TokenSpan]:
        return (run for item in self.items if self.bidirectional for run in item.runs)

    def ahead(self, computed: int) -> list[MediaItem]:
        """Those whose features are needed by a sequence that has so many tokens computed, each content once."""
        return list({item.digest: item for item in self.items if item.end > computed}.values())

    def position(self, place: int) -> int:
        """That of the token at `place`, where that is text, or of what begins there."""
        if self.positions is None:
            return place
        prompt = self.positions.shape[1]
        if place < prompt:
            return int(self.positions[:, place].min())
        return int(self.positions.max()) + 1 + place - prompt

    def stated(self, begin: int, end: int) -> PositionArray | None:
        """[3, end - begin]: where those tokens stand; None where all of them are text, or there are no axes."""
        if self.positions is None or not any(True for _ in self.seen(begin, end)):
            return None
        return self.axes(self.positions, begin, end)

    def axes(self, positions: PositionArray, begin: int, end: int) -> PositionArray:
        """[3, end - begin]: where those tokens stand, the prompt's at `positions`, and text behind it."""
        own, behind = positions[:, begin:end], end - max(begin, positions.shape[1])
        if behind <= 0:
            return own
        text = np.arange(behind, dtype=np.int32) + self.position(end - behind)
        return np.concatenate([own, np.broadcast_to(text, (3, behind))], axis=1)

    def seen(self, begin: int, end: int) -> Iterator[tuple[bytes, range, range]]:
        """For each run that stands in tokens [begin, end), or the part of it that does: whose digest's features, which
        of them, and at which places."""
        for item in self.items:
            first = 0
            for start, stop in item.runs:
                low, high = max(start, begin), min(stop, end)
                if low < high:
                    yield item.digest, range(first + low - start, first + high - start), range(low, high)
                first += stop - start


def _digest_words(digest: bytes) -> Iterator[int]:
    """Negative numbers of 64 bits, as files of records hold them."""
    for (word,) in struct.iter_unpack("<Q", digest[: 8 * DIGEST_WORDS]):
        yield -1 - (word >> 1)


GAP_KEY = 1 << 32
"""What the key of a token is raised by for each token that was left out before it: then it is no token's number."""


@dataclass(frozen=True, eq=False, slots=True)
class ThinnedPrompt:
    whole: tuple[int, ...]  # all of the prompt
    kept: KeptPlaces  # where in it the tokens stand that are left, in order; the prompt's last is among them
    sight: PromptMedia | None = None  # what is left of what it shows

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.whole[place] for place in self.kept.tolist())

    def keyed(self, tokens: Many[int]) -> list[int]:
        """Tokens as the prefix index knows them. All that their states depend on is told: which tokens stand before
        them, and where. So what stands behind a gap is found by nobody who has not left out the same."""
        left = len(self.kept)
        shown = tokens if self.sight is None else self.sight.keyed(tokens)
        before = np.diff(self.kept, prepend=-1).astype(np.int64) - 1
        own = np.asarray(shown[:left], dtype=np.int64) + GAP_KEY * before[: len(shown)]
        keys: list[int] = own.tolist()
        return [*keys, *shown[left:]]

    def position(self, place: int) -> int:
        """Of what is stored at `place`: behind the prompt one follows another again."""
        if self.sight is not None and self.sight.positions is not None:
            return self.sight.position(place)
        left = len(self.kept)
        return int(self.kept[place]) if place < left else len(self.whole) + place - left

    def stated(self, begin: int, end: int) -> PositionArray | None:
        """Where the tokens at places [begin, end) stand; None where one follows another, the one behind them too."""
        sight, follow = self.sight, self.position(end) - self.position(begin) == end - begin
        if sight is not None and sight.positions is not None:
            seen = sight.stated(begin, end)
            return seen if seen is not None or follow else sight.axes(sight.positions, begin, end)
        if follow:
            return None
        behind = np.arange(len(self.whole), len(self.whole) + end - len(self.kept), dtype=np.int32)
        return np.concatenate([self.kept[begin:end], behind])

    def places(self, lengths: frozenset[int]) -> frozenset[int]:
        """How much is stored when so much of the whole prompt has passed."""
        return frozenset(int(np.searchsorted(self.kept, length)) for length in lengths)
