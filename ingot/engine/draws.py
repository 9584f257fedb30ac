"""Draws for sequences, now and behind what was guessed: what their penalties look at, and what their guides allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from itertools import groupby

import mlx.core as mx

from ingot.engine import guided
from ingot.engine.penalties import TokenHistory, needs_history
from ingot.engine.sampling import Drawn, draw
from ingot.engine.sequence import Sequence
from ingot.engine.speculation.ahead import Ahead
from ingot.kernels.sampling import Drawing
from ingot.text.grammar.matcher import Mask


class Draws:
    def __init__(self, vocab: int, drawing: Drawing | None = None) -> None:
        """With a `drawing` tokens are drawn by that kernel, else by plain operations."""
        self._vocab, self._drawing = vocab, drawing
        self._histories: dict[Sequence, TokenHistory] = {}  # of those with penalties, from their first draw on

    def draw(self, logits: mx.array, places: Many[Ahead], catch_up: Callable[[], None]) -> Drawn:
        """A token for each row of `logits` [places, vocab]; a sequence's places stand one behind another.

        `catch_up` sees to it that sequences know the tokens that were drawn before.
        """
        histories = [self._history(place) for place in places]
        drawn = draw(logits, places, histories, self._masks(logits, places, catch_up), self._drawing)
        for number, (place, history) in enumerate(zip(places, histories, strict=True)):
            if history is not None and _is_sure(place, places[number + 1 :]):
                history.learn(drawn.tokens[number])
        return drawn

    def learn(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """Tokens that a sequence was given after a guess was verified."""
        history = self._histories.get(sequence)
        if history is not None:
            for token in tokens:
                history.learn(mx.array(token))

    def forget(self, sequence: Sequence) -> None:
        self._histories.pop(sequence, None)

    def clear(self) -> None:
        self._histories.clear()

    def _history(self, place: Ahead) -> TokenHistory | None:
        row = place.sequence
        if needs_history(row.sampling) and row not in self._histories:
            self._histories[row] = TokenHistory(self._vocab, row.whole_prompt, row.generated)
        history = self._histories.get(row)
        return history if history is None or not place.guessed else history.ahead(place.guessed)

    def _masks(self, logits: mx.array, places: Many[Ahead], catch_up: Callable[[], None]) -> list[Mask | None]:
        if all(place.sequence.guide is None for place in places):
            return []
        mx.async_eval(logits)  # the device works while tokens are read and masks are made
        if any(guided.needs_tokens(place.sequence) for place in places):
            catch_up()
        by_row = [list(own) for _, own in groupby(places, key=lambda place: place.sequence)]
        return [mask for own in by_row for mask in guided.masks(own[0].sequence, own[-1].guessed)]


def _is_sure(place: Ahead, following: Many[Ahead]) -> bool:
    """Whether what is drawn there is the sequence's next token, whatever else is drawn: nothing was guessed."""
    return not place.guessed and (not following or following[0].sequence is not place.sequence)
