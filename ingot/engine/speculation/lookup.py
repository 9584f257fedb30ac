"""Prompt lookup: drafts are what followed where the newest tokens stood earlier, in the same text or in an earlier
answer to the same owner. Owners share nothing.

Places are found by an index of n-grams, for a few lengths n. Each length has a table from an n-gram's hash to
where it last stood. Tables have no chains: who comes later takes the place, and what is found is compared with the
text. So an entry may be lost, never wrong; a table takes as little memory as it says, and what is old makes way by
itself.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections import OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from ingot.cache.prefix_tree import CacheOwner
from ingot.engine.request import Request
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.proposer import DraftOffer, Proposal

SHORTEST_MATCH = 1
"""Tokens that two places must have in common. One says little, but in a text that is copied, that is much."""
NGRAM_LENGTHS = (24, 12, 6, 3, 2, SHORTEST_MATCH)
"""Of the n-grams that are indexed."""
LONGEST_MATCH = 64
"""Tokens that are compared to say how long a match is."""
LEAST_SLOTS, MOST_SLOTS = 1 << 12, 1 << 18
"""Of a table. One that is to hold more n-grams than that forgets old ones."""
SLOTS_PER_NGRAM = 4
"""Slots for each n-gram, at least, as long as there may be more: of two that share one the older is lost."""
SLOT_BYTES = 4 * len(NGRAM_LENGTHS)
"""What a slot takes in all tables; a token takes twice SPARE slots at most."""

_MOST_GONE = 1 << 30
_ONE_BY_ONE_TOKENS = 16  # tokens up to which it is faster to index them one after another


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """The text's end stands somewhere else as well, `length` tokens of it, before place `at`."""

    at: int
    length: int


class SuffixIndex:
    """Of a list of tokens that grows at its end, and is its owner's. It may shrink at its beginning, if told so."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._gone = 0  # tokens that once stood before the first
        self._next = 1  # the next place to be indexed, counted from the first token that ever was
        self._tables = _empty_tables(len(tokens))

    @property
    def unlearned(self) -> int:
        """Tokens that are not indexed yet."""
        return max(0, self._gone + len(self._tokens) - self._next)

    @property
    def nbytes(self) -> int:
        return sum(len(table) * table.itemsize for table in self._tables)

    def learn(self, most: int) -> int:
        """Index so many more tokens at most; returns how many that were. The last one is left out until there is
        something to follow it."""
        if self.unlearned and SLOTS_PER_NGRAM * len(self._tokens) > len(self._tables[0]) < MOST_SLOTS:
            self._begin_anew(2 * len(self._tokens))
        count = max(0, min(most, self.unlearned))
        begin = self._next
        self._next += count
        if count > _ONE_BY_ONE_TOKENS:
            self._index_all(begin, self._next)
        else:
            self._index_each(range(begin, self._next))
        return count

    def drop(self, count: int) -> None:
        """The first so many tokens go."""
        del self._tokens[:count]
        self._gone += count
        self._next = max(self._next, self._gone + 1)
        if self._gone > _MOST_GONE or len(self._tables[0]) > max(4 * SLOTS_PER_NGRAM * len(self._tokens), LEAST_SLOTS):
            self._begin_anew(len(self._tokens))

    def following(self, at: int, most: int) -> list[int]:
        """The tokens that follow a match, so many at most."""
        return self._tokens[at : at + most]

    def find(self, newest: list[int]) -> SuffixMatch | None:
        """The longest match of a text that ends with the tokens `newest`, as far as is known: of those of a length, the
        latest."""
        for length, table in zip(NGRAM_LENGTHS, self._tables, strict=True):
            ending = newest[-length:]
            at = table[hash(tuple(ending)) & len(table) - 1] - self._gone
            if at >= length == len(ending) and self._tokens[at - length : at] == ending:
                return SuffixMatch(at, self._common(at, newest, length))
        return None

    def _begin_anew(self, tokens: int) -> None:
        """With empty tables for so many tokens; what is there is learned again, a piece at a time as ever."""
        self._tables, self._gone, self._next = _empty_tables(tokens), 0, 1

    def _common(self, at: int, newest: list[int], known: int) -> int:
        """How many tokens before `at` are the newest ones."""
        most = min(at, len(newest), LONGEST_MATCH)
        if self._tokens[at - most : at] == newest[-most:]:
            return most
        while known < most and self._tokens[at - known - 1] == newest[-known - 1]:
            known += 1
        return known

    def _index_each(self, places: Iterable[int]) -> None:
        for place in places:
            at = place - self._gone
            for length, table in zip(NGRAM_LENGTHS, self._tables, strict=True):
                if at >= length:
                    table[hash(tuple(self._tokens[at - length : at])) & len(table) - 1] = place

    def _index_all(self, begin: int, end: int) -> None:
        """The same at once: what is done to each token, no code of ours does."""
        for length, table in zip(NGRAM_LENGTHS, self._tables, strict=True):
            first = max(begin, self._gone + length)
            if first < end:
                text = self._tokens[first - self._gone - length : end - self._gone - 1]
                ngrams = zip(*(text[place:] for place in range(length)), strict=False)
                hashes = np.fromiter(map(hash, ngrams), dtype=np.int64, count=end - first)
                np.frombuffer(table, dtype=np.int32)[hashes & len(table) - 1] = np.arange(first, end)


def _empty_tables(tokens: int) -> list[array[int]]:
    slots = LEAST_SLOTS
    while slots < min(SLOTS_PER_NGRAM * tokens, MOST_SLOTS):
        slots *= 2
    return [array("i", [-1]) * slots for _ in NGRAM_LENGTHS]


MOST_ANSWER_TOKENS = 1 << 18
"""Of all answers that are remembered. Owners have an equal share of them each,"""
MOST_ANSWER_OWNERS = 64
"""of so many owners, those that came last."""
END_OF_ANSWER = -1
"""Behind each answer: no token, so that none seems to go on with the next."""


class _OwnerAnswers:
    """Of one owner, one behind another."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.index = SuffixIndex(self.tokens)


class PastAnswers:
    def __init__(self, most: int = MOST_ANSWER_TOKENS) -> None:
        self._most = most
        self._owners: OrderedDict[CacheOwner, _OwnerAnswers] = OrderedDict()

    def add(self, owner: CacheOwner, answer: Iterable[int]) -> None:
        held = self._owners.setdefault(owner, _OwnerAnswers())
        self._owners.move_to_end(owner)
        held.tokens.extend(answer)
        held.tokens.append(END_OF_ANSWER)
        while len(self._owners) > MOST_ANSWER_OWNERS:
            self._owners.popitem(last=False)
        for each in self._owners.values():
            each.index.drop(max(0, len(each.tokens) - self._most // len(self._owners)))

    def learn(self, owner: CacheOwner, most: int) -> int:
        """Index so many more of an owner's tokens; returns how many that were."""
        held = self._owners.get(owner)
        return 0 if held is None else held.index.learn(most)

    def find(self, owner: CacheOwner, newest: list[int]) -> SuffixMatch | None:
        held = self._owners.get(owner)
        return None if held is None else held.index.find(newest)

    def following(self, owner: CacheOwner, at: int, most: int) -> list[int]:
        """What followed at a place that was just found."""
        found = self._owners[owner].index.following(at, most)
        return found[: found.index(END_OF_ANSWER)] if END_OF_ANSWER in found else found

    @property
    def count(self) -> int:
        """Tokens that are remembered."""
        return sum(len(each.tokens) for each in self._owners.values())


MOST_LOOKUP_TOKENS = 24
"""Tokens of a guess. How many of them are worth it, whoever chooses knows by how sure each is."""
INDEXED_A_STEP = 2048
"""Tokens of all sequences that are indexed in one step, which takes some milliseconds: of a long prompt, what comes
late in it is found some steps late."""
LEADING_TOKENS = NGRAM_LENGTHS[0]
"""Tokens of the prompt that are remembered with an answer, so that its beginning is found as well."""

_LENGTH_STEPS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)
"""Lengths of matches between which guesses come true alike."""
_STEP_OF_LENGTH = [bisect(_LENGTH_STEPS, length) for length in range(LONGEST_MATCH + MOST_LOOKUP_TOKENS + 1)]
_FIRST_RATES = (0.2, 0.35, 0.45, 0.5, 0.6, 0.65, 0.75, 0.85, 0.85, 0.9, 0.95, 0.97)
"""What to expect before anything is known: between fresh text, where a few tokens in common say little, and text that
is edited, as measured with the default model's tokenizer."""
_MEMORY, _SHARED_MEMORY = 1 / 8, 1 / 64
"""How much a guessed token says of the next one's chances: of its own sequence's, and of others'."""


class MatchRates:
    """How often the next token is what followed a match, by the match's length."""

    def __init__(self, known: Many[float], memory: float) -> None:
        self._rates, self._memory = list(known), memory

    def expected(self, length: int, count: int) -> tuple[float, ...]:
        """For so many tokens behind a match: each that comes true makes it longer."""
        return tuple([self._rates[step] for step in _STEP_OF_LENGTH[length : length + count]])

    def observe(self, length: int, right: bool) -> None:
        step = _STEP_OF_LENGTH[length]
        self._rates[step] += self._memory * (right - self._rates[step])

    def copy(self, memory: float) -> MatchRates:
        return MatchRates(self._rates, memory)


@dataclass(eq=False, slots=True)
class _FollowedSequence:
    """A sequence that is guessed for."""

    index: SuffixIndex
    rates: MatchRates
    known: int = -1  # tokens that it had when the guess was made
    length: int = 0  # of the match
    guess: tuple[int, ...] = field(default=())


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
        """Index what is new of a sequence and its owner's; returns how many tokens that were."""
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
            self._guess(row, followed)
        guess = followed.guess
        if not guess:
            return None
        return DraftOffer(self.name, len(guess), followed.rates.expected(followed.length, len(guess)), free=True)

    def _proposal(self, row: TokenSequence, count: int) -> Proposal:
        followed = self._followed[row]
        guess = followed.guess[:count]
        return Proposal(guess, self.name, followed.rates.expected(followed.length, len(guess)))

    def _judge(self, row: TokenSequence, followed: _FollowedSequence) -> None:
        """Learn from what came instead of the guess, or as guessed, whether or not it was used."""
        guess, came = followed.guess, row.tokens[followed.known : followed.known + len(followed.guess)]
        for place, (mine, own) in enumerate(zip(guess, came, strict=False)):
            right = mine == own
            followed.rates.observe(followed.length + place, right)
            self._rates.observe(followed.length + place, right)
            if not right:
                return

    def _guess(self, row: TokenSequence, followed: _FollowedSequence) -> None:
        newest, owner = row.tokens[-LONGEST_MATCH:], _owner_of(row.request)
        own = followed.index.find(newest)
        past = self._past.find(owner, newest) if _shares_answers(row.request) else None
        match = past if own is None or (past is not None and past.length > own.length) else own
        followed.known, followed.length, followed.guess = len(row.tokens), 0, ()
        if match is None:
            return
        followed.length = match.length
        if match is own:
            followed.guess = tuple(followed.index.following(match.at, MOST_LOOKUP_TOKENS))
        else:
            followed.guess = tuple(self._past.following(owner, match.at, MOST_LOOKUP_TOKENS))


def _owner_of(request: Request) -> CacheOwner:
    return CacheOwner(request.tenant, request.salt, lora=request.lora_digest)


def _shares_answers(request: Request) -> bool:
    """Whether a request has to do with what others left. A prompt that is scored has not, as with kept prefixes."""
    return request.cache and request.sampling.prompt_logprobs is None
