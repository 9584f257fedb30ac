"""Guesses from what was written before: what followed where the newest tokens stood earlier, in the same text or in an
earlier answer to the same owner."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from ingot.cache.tree import Owner
from ingot.engine.request import Request
from ingot.engine.sequence import Sequence
from ingot.engine.speculation.past_answers import PastAnswers
from ingot.engine.speculation.proposer import Offer, Proposal
from ingot.engine.speculation.suffixes import LENGTHS, LONGEST, Suffixes

MOST = 24
"""Tokens of a guess. How many of them are worth it, whoever chooses knows by how sure each is."""
SLICE = 2048
"""Tokens of all sequences that are indexed in one step, which takes some milliseconds: of a long prompt, what comes
late in it is found some steps late."""
LEAD = LENGTHS[0]
"""Tokens of the prompt that are remembered with an answer, so that its beginning is found as well."""

_STEPS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)
"""Lengths of matches between which guesses come true alike."""
_STEP = [bisect(_STEPS, length) for length in range(LONGEST + MOST + 1)]
_RATES = (0.2, 0.35, 0.45, 0.5, 0.6, 0.65, 0.75, 0.85, 0.85, 0.9, 0.95, 0.97)
"""What to expect before anything is known: between fresh text, where a few tokens in common say little, and text that
is edited, as measured with the default model's tokenizer."""
_MEMORY, _SHARED_MEMORY = 1 / 8, 1 / 64
"""How much a guessed token says of the next one's chances: of its own sequence's, and of others'."""


class Rates:
    """How often the next token is what followed a match, by the match's length."""

    def __init__(self, known: Many[float], memory: float) -> None:
        self._rates, self._memory = list(known), memory

    def expected(self, length: int, count: int) -> tuple[float, ...]:
        """For so many tokens behind a match: each that comes true makes it longer."""
        return tuple([self._rates[step] for step in _STEP[length : length + count]])

    def observe(self, length: int, right: bool) -> None:
        step = _STEP[length]
        self._rates[step] += self._memory * (right - self._rates[step])

    def copy(self, memory: float) -> Rates:
        return Rates(self._rates, memory)


@dataclass(eq=False, slots=True)
class _Followed:
    """A sequence that is guessed for."""

    index: Suffixes
    rates: Rates
    known: int = -1  # tokens that it had when the guess was made
    length: int = 0  # of the match
    guess: tuple[int, ...] = field(default=())


class Lookup:
    name = "lookup"

    def __init__(self, past: PastAnswers | None = None) -> None:
        self._past = past or PastAnswers()
        self._followed: dict[Sequence, _Followed] = {}
        self._rates = Rates(_RATES, _SHARED_MEMORY)

    def offers(self, rows: Many[Sequence]) -> list[Offer | None]:
        left = SLICE
        for row in rows:
            left -= self._learn(row, left)
        return [self._offer(row) for row in rows]

    def propose(self, rows: Many[Sequence], counts: Many[int]) -> list[Proposal]:
        return [self._proposal(row, count) for row, count in zip(rows, counts, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        self._followed.pop(sequence, None)
        if sequence.ended and _shares(sequence.request) and sequence.produced:
            self._past.add(_owner(sequence.request), sequence.tokens[max(0, len(sequence.prompt) - LEAD) :])

    @property
    def follows(self) -> Collection[Sequence]:
        return self._followed.keys()

    def rest(self) -> None:
        pass

    def _learn(self, row: Sequence, most: int) -> int:
        """Index what is new of a sequence and its owner's; returns how many tokens that were."""
        if (followed := self._followed.get(row)) is None:
            followed = self._followed[row] = _Followed(Suffixes(row.tokens), self._rates.copy(_MEMORY))
        learned = followed.index.learn(most)
        if _shares(row.request):
            learned += self._past.learn(_owner(row.request), most - learned)
        return learned

    def _offer(self, row: Sequence) -> Offer | None:
        followed = self._followed[row]
        if followed.known != len(row.tokens):
            self._judge(row, followed)
            self._guess(row, followed)
        guess = followed.guess
        if not guess:
            return None
        return Offer(self.name, len(guess), followed.rates.expected(followed.length, len(guess)), free=True)

    def _proposal(self, row: Sequence, count: int) -> Proposal:
        followed = self._followed[row]
        guess = followed.guess[:count]
        return Proposal(guess, self.name, followed.rates.expected(followed.length, len(guess)))

    def _judge(self, row: Sequence, followed: _Followed) -> None:
        """Learn from what came instead of the guess, or as guessed, whether or not it was used."""
        guess, came = followed.guess, row.tokens[followed.known : followed.known + len(followed.guess)]
        for place, (mine, own) in enumerate(zip(guess, came, strict=False)):
            right = mine == own
            followed.rates.observe(followed.length + place, right)
            self._rates.observe(followed.length + place, right)
            if not right:
                return

    def _guess(self, row: Sequence, followed: _Followed) -> None:
        newest, owner = row.tokens[-LONGEST:], _owner(row.request)
        own = followed.index.find(newest)
        past = self._past.find(owner, newest) if _shares(row.request) else None
        match = past if own is None or (past is not None and past.length > own.length) else own
        followed.known, followed.length, followed.guess = len(row.tokens), 0, ()
        if match is None:
            return
        followed.length = match.length
        if match is own:
            followed.guess = tuple(followed.index.following(match.at, MOST))
        else:
            followed.guess = tuple(self._past.following(owner, match.at, MOST))


def _owner(request: Request) -> Owner:
    return Owner(request.tenant, request.salt, lora=request.lora_digest)


def _shares(request: Request) -> bool:
    """Whether a request has to do with what others left. A prompt that is scored has not, as with kept prefixes."""
    return request.cache and request.sampling.prompt_logprobs is None
