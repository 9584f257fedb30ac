"""Whether a head is worth running, found out at load: how many of the model's own next tokens it guesses.

A head that was made from packed weights, or of another model, loads like any other and guesses nearly nothing; nobody
would notice but by the speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ingot.cache.forward_batch import Part
from ingot.errors import ModelError
from ingot.models.adapter import Adapter
from ingot.models.draft_heads.mtp import head_rows
from ingot.models.heads.head import Guesser

TOKENS = 48
"""The model writes so many, greedily, one forward pass each; then the head runs once over all of them."""
PROMPT = (5, 17, 3, 29, 11, 23, 7, 19, 2)
VERIFYING = 0.05
"""Of a pass's time, what it takes at the best of cases to verify one token more in it."""
MOST_ASKED = 0.2
"""However much a head costs: what the model writes here is one text of many."""


def check_head(head: Guesser, adapter: Adapter, prompt: Sequence[int] = PROMPT) -> float:
    """The share of the model's own tokens after `prompt` that the head guesses. Raises ModelError if that could not pay
    on any device."""
    share, least = acceptance(head, adapter, prompt), break_even(head.weight_bytes, adapter.weight_bytes)
    if share < least:
        raise ModelError(
            f"The head guesses {share:.0%} of {TOKENS} tokens that its model writes, and below {least:.0%} it only "
            "costs time: it does not belong to this model, or was made from packed weights. `ingot convert "
            "--head-from` takes one out of the original checkpoint."
        )
    return share


def break_even(head_bytes: int, model_bytes: int) -> float:
    """The share of right guesses below which a head loses time at the best of cases: where a pass takes as long as it
    takes to read the weights, the head's are read for each guess, and what is guessed is verified."""
    return min(VERIFYING + head_bytes / model_bytes, MOST_ASKED)


def acceptance(head: Guesser, adapter: Adapter, prompt: Sequence[int]) -> float:
    tokens, hidden = _written(adapter, list(prompt))
    rows = head_rows(head, adapter)
    with rows.launch([Part((rows.new(),), len(tokens) - 1)], mixed=adapter.mixed) as layers:
        states = head(hidden[None, :-1], mx.array([tokens[1:]]), layers[0])
    # What it makes of place p is about token p + 2, and the first that the model wrote follows the prompt.
    guesses = mx.argmax(head.logits(states[:, len(prompt) - 2 : -1]), axis=-1)
    right: Any = mx.sum(guesses[0] == mx.array(tokens[len(prompt) :])).item()
    return float(right / TOKENS)


def _written(adapter: Adapter, tokens: list[int]) -> tuple[list[int], mx.array]:
    """The prompt and what the model writes behind it, and the hidden states of all of them."""
    rows = adapter.new_rows()
    row, new, hidden = rows.new(), list(tokens), []
    for number in range(TOKENS + 1):
        logits, states = adapter.run(rows, mx.array(new), [Part((row,), len(new))], [len(new) - 1], hidden=True)
        hidden.append(states)
        if number < TOKENS:
            new = [int(mx.argmax(logits[0]).item())]  # type: ignore[arg-type]
            tokens.extend(new)
        mx.eval(hidden, rows.pending())
    return tokens, mx.concatenate(hidden)
