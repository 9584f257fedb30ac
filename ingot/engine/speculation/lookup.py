"""Prompt lookup: draft tokens are what followed the newest tokens where they occurred earlier, in the same text or in
an earlier answer to the same owner. Owners share nothing.

Matches are found by an index of n-grams, for a few lengths n. Each length has a table from an n-gram's hash to where it
last occurred. Tables have no chains: a later n-gram overwrites an earlier one, and a match is compared with the text.
So an entry may be lost, never wrong; a table has a fixed size, and old entries make way by themselves.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections import OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from ingot.cache.prefix_tree import CacheOwner
from ingot.engine.request import Request
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.proposer import DraftOffer, Proposal

SHORTEST_MATCH = 1
"""Tokens of the shortest match. One says little, but much in a text that is copied."""
NGRAM_LENGTHS = (24, 12, 6, 3, 2, SHORTEST_MATCH)
"""Of the n-grams that are indexed."""
LONGEST_MATCH = 64
"""Tokens that are compared to say how long a match is."""
LEAST_SLOTS, MOST_SLOTS = 1 << 12, 1 << 18
"""Of a table. One that is to hold more n-grams than that forgets old ones."""
SLOTS_PER_NGRAM = 4
"""Slots for each n-gram, at least, while a table may grow: of two that share one the older is lost."""
SLOT_BYTES = 4 * len(NGRAM_LENGTHS)
"""What a slot takes in all tables; a token takes twice SLOTS_PER_NGRAM slots at most."""

_MOST_GONE = 1 << 30
_ONE_BY_ONE_TOKENS = 16  # tokens up to which it is faster to index them one after another


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """The last `length` tokens of the text also occur before offset `at`."""

    at: int
    length: int


class SuffixIndex:
    """Of a list of tokens that grows at its end, and is its owner's. It shrinks at its beginning by `drop`."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._dropped = 0  # tokens that were before the first
        self._next = 1  # the next offset to index, dropped tokens included
        self._tables = _empty_tables(len(tokens))

    @property
    def unlearned(self) -> int:
        """Tokens that are not indexed yet."""
        return max(0, self._dropped + len(self._tokens) - self._next)

    @property
    def nbytes(self) -> int:
        return sum(len(table) * table.itemsize for table in self._tables)

    def learn(self, most: int) -> int:
        """Index so many more tokens at most; returns how many that were. The last one is left out until another follows
        it."""
        if self.unlearned and SLOTS_PER_NGRAM * len(self._tokens) > len(self._tables[0]) < MOST_SLOTS:
            self._reset(2 * len(self._tokens))
        count = max(0, min(most, self.unlearned))
        begin = self._next
        self._next += count
        if count > _ONE_BY_ONE_TOKENS:
            self._index_all(begin, self._next)
        else:
            self._index_each(range(begin, self._next))
        return count

    def drop(self, count: int) -> None:
        """Remove the first so many tokens."""
        del self._tokens[:count]
        self._dropped += count
        self._next = max(self._next, self._dropped + 1)
        if self._dropped > _MOST_GONE or len(self._tables[0]) > max(
            4 * SLOTS_PER_NGRAM * len(self._tokens), LEAST_SLOTS
        ):
            self._reset(len(self._tokens))

    def following(self, at: int, most: int) -> list[int]:
        """The tokens that follow a match, so many at most."""
        return self._tokens[at : at + most]

    def find(self, newest: list[int]) -> SuffixMatch | None:
        """The longest indexed match of a text that ends with the tokens `newest`: of those of a length, the latest."""
        for length, table in zip(NGRAM_LENGTHS, self._tables, strict=True):
            ending = newest[-length:]
            at = table[hash(tuple(ending)) & len(table) - 1] - self._dropped
            if at >= length == len(ending) and self._tokens[at - length : at] == ending:
                return SuffixMatch(at, self._match_length(at, newest, length))
        return None

    def _reset(self, tokens: int) -> None:
        """Begin with empty tables for so many tokens; all tokens are indexed again, some at a time as ever."""
        self._tables, self._dropped, self._next = _empty_tables(tokens), 0, 1

    def _match_length(self, at: int, newest: list[int], length: int) -> int:
        """How many tokens before `at` are the newest ones: at least `length`."""
        most = min(at, len(newest), LONGEST_MATCH)
        if self._tokens[at - most : at] == newest[-most:]:
            return most
        while length < most and self._tokens[at - length - 1] == newest[-length - 1]:
            length += 1
        return length

    def _index_each(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            at = offset - self._dropped
            for length, table in zip(NGRAM_LENGTHS, self._tables, strict=True):
                if at >= length:
                    table[hash(tuple(self._tokens[at - length : at])) & len(table) - 1] = offset

    def _index_all(self, begin: int, end: int) -> None:
        """The same at once, without a loop over tokens in Python."""
        for length, table in zip(NGRAM_LENGTHS, self._tables, strict=True):
            first = max(begin, self._dropped + length)
            if first < end:
                text = self._tokens[first - self._dropped - length : end - self._dropped - 1]
                ngrams = zip(*(text[start:] for start in range(length)), strict=False)
                hashes = np.fromiter(map(hash, ngrams), dtype=np.int64, count=end - first)
                np.frombuffer(table, dtype=np.int32)[hashes & len(table) - 1] = np.arange(first, end)


def _empty_tables(tokens: int) -> list[array[int]]:
    slots = LEAST_SLOTS
    while slots < min(SLOTS_PER_NGRAM * tokens, MOST_SLOTS):
        slots *= 2
    return [array("i", [-1]) * slots for _ in NGRAM_LENGTHS]


MOST_ANSWER_TOKENS = 1 << 18
"""Of all answers that are remembered, in equal shares for owners,"""
MOST_ANSWER_OWNERS = 64
"""the latest of them, at most so many."""
END_OF_ANSWER = -1
"""No token, so that no answer seems to go on with the next one."""


class _OwnerAnswers:
    """All answers to one owner, concatenated."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.index = SuffixIndex(self.tokens)


class PastAnswers:
    def __init__(self, most: int = MOST_ANSWER_TOKENS) -> None:
        self._most = most
        self._owners: OrderedDict[CacheOwner, _OwnerAnswers] = OrderedDict()

    def add(self, owner: CacheOwner, answer: Iterable[int]) -> None:
        answers = self._owners.setdefault(owner, _OwnerAnswers())
        self._owners.move_to_end(owner)
        answers.tokens.extend(answer)
        answers.tokens.append(END_OF_ANSWER)
        while len(self._owners) > MOST_ANSWER_OWNERS:
            self._owners.popitem(last=False)
        for each in self._owners.values():
            each.index.drop(max(0, len(each.tokens) - self._most // len(self._owners)))

    def learn(self, owner: CacheOwner, most: int) -> int:
        """Index so many more of an owner's tokens; returns how many that were."""
        answers = self._owners.get(owner)
        return 0 if answers is None else answers.index.learn(most)

    def find(self, owner: CacheOwner, newest: list[int]) -> SuffixMatch | None:
        answers = self._owners.get(owner)
        return None if answers is None else answers.index.find(newest)

    def following(self, owner: CacheOwner, at: int, most: int) -> list[int]:
        """What follows a match that was just found."""
        tokens = self._owners[owner].index.following(at, most)
        return tokens[: tokens.index(END_OF_ANSWER)] if END_OF_ANSWER in tokens else tokens

    @property
    def count(self) -> int:
        """Tokens that are remembered."""
        return sum(len(each.tokens) for each in self._owners.values())


MOST_LOOKUP_TOKENS = 24
"""Tokens of an offer. By its confidences the controller chooses how many to verify."""
INDEXED_A_STEP = 2048
"""Tokens of all sequences that are indexed in one step, which takes some milliseconds: the end of a long prompt is
found some steps late."""
LEADING_TOKENS = NGRAM_LENGTHS[0]
"""Tokens of the prompt that are remembered with an answer, so that its beginning is found as well."""

_LENGTH_STEPS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)
"""Lengths of matches between which draft tokens are accepted alike."""
_STEP_OF_LENGTH = [bisect(_LENGTH_STEPS, length) for length in range(LONGEST_MATCH + MOST_LOOKUP_TOKENS + 1)]
_FIRST_RATES = (0.2, 0.35, 0.45, 0.5, 0.6, 0.65, 0.75, 0.85, 0.85, 0.9, 0.95, 0.97)
"""The first estimates: between fresh text, where a few tokens in common say little, and edited text, as measured with
the default model's tokenizer."""
_MEMORY, _SHARED_MEMORY = 1 / 8, 1 / 64
"""How much one token changes the rates: those of its own sequence, and the shared ones."""


class MatchRates:
    """How often the next token is what followed a match, by the match's length."""

    def __init__(self, rates: Many[float], memory: float) -> None:
        self._rates, self._memory = list(rates), memory

    def expected(self, length: int, count: int) -> tuple[float, ...]:
        """For so many tokens behind a match: each that is accepted makes it longer."""
        return tuple([self._rates[step] for step in _STEP_OF_LENGTH[length : length + count]])

    def observe(self, length: int, right: bool) -> None:
        step = _STEP_OF_LENGTH[length]
        self._rates[step] += self._memory * (right - self._rates[step])

    def copy(self, memory: float) -> MatchRates:
        return MatchRates(self._rates, memory)


@dataclass(eq=False, slots=True)
class _FollowedSequence:
    """A sequence and its latest draft."""

    index: SuffixIndex
    rates: MatchRates
    known: int = -1  # tokens that it had when the draft was made
    length: int = 0  # of the match
    draft: tuple[int, ...] = ()


class LookupProposer:
    name = "lookup"

    def __init__(self, past: PastAnswers | None = None) -> None:
        self._past = past or PastAnswers()
        self._followed: dict[TokenSequence, _FollowedSequence] = {}
        self._rates = MatchRates(_FIRST_RATES, _SHARED_MEMORY)

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        left = INDEXED_A_STEP
        for row in rows:
            left -= self._learn(row, left)
        return [self._offer(row) for row in rows]

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        return [self._proposal(row, count) for row, count in zip(rows, counts, strict=True)]

    def forget(self, sequence: TokenSequence) -> None:
        self._followed.pop(sequence, None)
        if sequence.ended and _shares_answers(sequence.request) and sequence.produced:
            self._past.add(
                _owner_of(sequence.request), sequence.tokens[max(0, len(sequence.prompt) - LEADING_TOKENS) :]
            )

    @property
    def follows(self) -> Collection[TokenSequence]:
        return self._followed.keys()

    def rest(self) -> None:
        pass

    def _learn(self, row: TokenSequence, most: int) -> int:
        """Index new tokens of a sequence and of its owner; returns how many that were."""
        if (followed := self._followed.get(row)) is None:
            followed = self._followed[row] = _FollowedSequence(SuffixIndex(row.tokens), self._rates.copy(_MEMORY))
        learned = followed.index.learn(most)
        if _shares_answers(row.request):
            learned += self._past.learn(_owner_of(row.request), most - learned)
        return learned

    def _offer(self, row: TokenSequence) -> DraftOffer | None:
        followed = self._followed[row]
        if followed.known != len(row.tokens):
            self._judge(row, followed)
            self._find_draft(row, followed)
        draft = followed.draft
        if not draft:
            return None
        return DraftOffer(self.name, len(draft), followed.rates.expected(followed.length, len(draft)), free=True)

    def _proposal(self, row: TokenSequence, count: int) -> Proposal:
        followed = self._followed[row]
        draft = followed.draft[:count]
        return Proposal(draft, self.name, followed.rates.expected(followed.length, len(draft)))

    def _judge(self, row: TokenSequence, followed: _FollowedSequence) -> None:
        """Compare the draft with what came, whether or not it was verified."""
        sampled = row.tokens[followed.known : followed.known + len(followed.draft)]
        for depth, (token, own) in enumerate(zip(followed.draft, sampled, strict=False)):
            right = token == own
            followed.rates.observe(followed.length + depth, right)
            self._rates.observe(followed.length + depth, right)
            if not right:
                return

    def _find_draft(self, row: TokenSequence, followed: _FollowedSequence) -> None:
        newest, owner = row.tokens[-LONGEST_MATCH:], _owner_of(row.request)
        own = followed.index.find(newest)
        past = self._past.find(owner, newest) if _shares_answers(row.request) else None
        match = past if own is None or (past is not None and past.length > own.length) else own
        followed.known, followed.length, followed.draft = len(row.tokens), 0, ()
        if match is None:
            return
        followed.length = match.length
        if match is own:
            followed.draft = tuple(followed.index.following(match.at, MOST_LOOKUP_TOKENS))
        else:
            followed.draft = tuple(self._past.following(owner, match.at, MOST_LOOKUP_TOKENS))


def _owner_of(request: Request) -> CacheOwner:
    return CacheOwner(request.tenant, request.salt, lora=request.lora_digest)


def _shares_answers(request: Request) -> bool:
    """Whether a request reads earlier answers and leaves its own. A prompt that is scored does not, as with the prefix
    cache."""
    return request.cache and request.sampling.prompt_logprobs is None
