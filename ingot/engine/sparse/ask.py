"""The nouns of sparse prefill that cross the engine's door. Plain, frozen values; none refers to mlx."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Span = tuple[int, int]
"""Tokens [begin, end) of a prompt."""
Unused = Literal[
    "below_threshold",  # the prompt is too short for it
    "cached",  # too little of it was left to compute
    "unsupported",  # of such a prompt, all is computed
    "does_not_pay",  # scoring it would take longer than what it saves, as measured
]
"""Why all of a prompt was computed, though less was asked for."""


@dataclass(frozen=True, slots=True)
class SparseAsk:
    """Asks for an answer to what matters of a prompt. `keep` is the share of the rest that is computed, or the
    server's; `whole` says for each prompt what is computed in any case. `forced` asks for it also where the prompt, or
    what is new of it, is shorter than the server's threshold."""

    keep: float | None = None
    whole: tuple[tuple[Span, ...], ...] = ()
    forced: bool = False


@dataclass(frozen=True, slots=True)
class SparseReport:
    """Of one prompt: how many of its tokens were `scored`, those that were not taken over, and `kept` of them; how long
    scoring took; how many of its first tokens were thinned out by an earlier request, and are `reused` as they are
    left; or why all of them were computed."""

    scorer: str
    scored: int = 0
    kept: int = 0
    scoring_s: float = 0.0
    reused: int = 0
    unused: Unused | None = None
