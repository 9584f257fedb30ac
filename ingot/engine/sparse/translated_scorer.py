"""A draft of another tokenizer scores: it reads the prompt's text in tokens of its own, and what it says of them counts
for the tokens that stand for the same characters."""

from __future__ import annotations

from ingot.engine.sequence import Sequence
from ingot.engine.sparse.scorer import Scorer, Scoring


class TranslatedScorer:
    def __init__(self, scorer: Scorer, ends: frozenset[int]) -> None:
        """`ends` are the draft's tokens that end an answer."""
        self._scorer, self._ends = scorer, ends
        self.name = scorer.name

    def unread(self, sequence: Sequence) -> int:
        return self._scorer.unread(self._own(sequence))

    def able(self, sequence: Sequence) -> bool:
        """What stands for pictures is no text."""
        own = self._own(sequence)
        return sequence.sight is None and bool(own.prompt) and self._scorer.able(own)

    def score(self, sequence: Sequence) -> Scoring:
        assert sequence.translated is not None
        scores = yield from self._scorer.score(self._own(sequence))
        return sequence.translated.back(scores)

    def rest(self) -> None:
        self._scorer.rest()

    def check(self) -> None:
        self._scorer.check()

    def _own(self, sequence: Sequence) -> Sequence:
        """The sequence as the draft has it."""
        translated = sequence.translated
        assert translated is not None, "a prompt is translated at the door"
        own = Sequence(
            sequence.request, sequence.index, sequence.ticket, translated.tokens, sequence.limit, sequence.seed
        )
        own.stop_tokens, own.marks = self._ends, translated.places(sequence.marks)
        return own
