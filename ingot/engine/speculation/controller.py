from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.engine.speculation.proposal import Offer


@dataclass(frozen=True, slots=True)
class Asked:
    key: object
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    source: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Outcome:
    key: object
    source: str
    proposed: int
    accepted: int
    cut: bool


@dataclass(frozen=True, slots=True)
class Round:
    seconds: float
    rows: int
    tokens: int
    prompt_tokens: int
    plain: bool
    outcomes: tuple[Outcome, ...] = ()


class Controller:
    def __init__(self, most: int = 16, fixed: int | None = None) -> None:
        self.most, self.fixed = most, fixed

    def choose(self, rows: Sequence[Asked], prompt_tokens: int = 0) -> list[Chosen]:
        return [
            Chosen(r.offers[0].source, min(r.offers[0].most, self.fixed or self.most)) if r.offers else Chosen(None, 0)
            for r in rows
        ]

    def observe(self, round: Round) -> None: ...
    def forget(self, key: object) -> None: ...
