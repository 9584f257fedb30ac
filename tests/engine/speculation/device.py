"""A simulated device and simulated texts: what a round would take, and how many draft tokens would be accepted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ingot.engine.speculation.controller import (
    DecodingRound,
    DraftChoice,
    DraftOutcome,
    RowOffers,
    SpeculationController,
)
from ingot.engine.speculation.proposer import DraftOffer
from ingot.engine.speculation.step_costs import round_size

Rates = Callable[[int, int], float]
"""By row and depth: how likely a draft token is accepted that follows accepted ones."""


@dataclass(frozen=True, slots=True)
class Device:
    """Milliseconds: of a round, of a row, of a token; of waiting for tokens, of a proposer's step."""

    fixed: float = 10.0
    row: float = 0.1
    token: float = 0.1
    wait: float = 0.5
    step: float = 0.0
    knee: int = 0  # where not 0: tokens beyond so many cost four times as much
    noise: float = 0.05
    ahead: bool = True  # plain rounds are launched before the tokens before them are read
    curve: tuple[tuple[int, float], ...] = ()  # instead of rows and tokens: how many times `fixed` so many tokens take
    making: float = 0.0  # the first round of each size takes longer by this

    def milliseconds(self, counts: Sequence[int], *, computed: bool) -> float:
        rows, drafted = len(counts), sum(counts)
        tokens = rows + drafted
        if self.curve:
            return self.fixed * _between(self.curve, tokens) + (self.wait if drafted else 0.0)
        beyond = max(0, tokens - self.knee) if self.knee else 0
        total = self.fixed + self.row * rows + self.token * (tokens + 3 * beyond)
        return total + (self.wait if drafted else 0.0) + (self.step * max(counts) if computed else 0.0)


def _between(curve: Sequence[tuple[int, float]], tokens: int) -> float:
    """On the lines between its points."""
    for (begin, low), (end, high) in pairwise(curve):
        if tokens <= end:
            return low + (high - low) * (tokens - begin) / (end - begin)
    raise ValueError(f"nothing is known of {tokens} tokens")


MEMORY_BOUND = Device()
COMPUTE_BOUND = Device(fixed=2.0, row=0.2, token=2.0)
BETWEEN = Device(fixed=8.0, row=0.1, token=0.8, wait=0.8)
DRAFTING = Device(step=1.5)
H200 = Device(
    fixed=4.8,
    wait=0.7,
    noise=0.03,
    curve=((1, 1.0), (4, 1.05), (8, 1.1), (16, 1.3), (32, 1.65), (64, 2.6), (128, 4.5), (288, 10.0)),
    making=35.0,
)
"""As measured: an 8B model in bfloat16, whose layers are a graph for each number of tokens."""
DEVICES = {"memory": MEMORY_BOUND, "compute": COMPUTE_BOUND, "between": BETWEEN, "drafting": DRAFTING}


def tokens(counts: Sequence[int], rates: Rates) -> float:
    """How many a round gives on average."""
    total = 0.0
    for row, count in enumerate(counts):
        survives = 1.0
        for position in range(count):
            total += survives
            survives *= rates(row, position)
        total += survives
    return total


def best_fixed(device: Device, rows: int, rates: Rates, most: int = 16, *, computed: bool = False) -> tuple[float, int]:
    """Tokens a millisecond at the best depth that is the same for all rows, and the depth."""
    return max(
        (tokens([depth] * rows, rates) / device.milliseconds([depth] * rows, computed=computed), depth)
        for depth in range(most + 1)
    )


class Simulation:
    """Runs a controller, which sees a noisy device and sampled texts; its choices are rated without noise."""

    def __init__(self, device: Device, rows: int, rates: Rates, seed: int, *, free: bool = True) -> None:
        self.device, self.rates, self.free = device, rates, free
        self.controller = SpeculationController()
        self.dice = random.Random(seed)
        self.offers = [RowOffers(row, (DraftOffer("some", 16, free=free),)) for row in range(rows)]
        self.rounds: list[tuple[float, float]] = []  # tokens and milliseconds of each round
        self.counts: list[list[int]] = []
        self.sizes: set[int] = set()  # that were met
        self._drafted_before = False

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round()

    def round(self, slowed: float = 1.0) -> list[int]:
        chosen = self.controller.choose(self.offers)
        counts = [one.count for one in chosen]
        expected = self.device.milliseconds(counts, computed=not self.free)
        drafts = any(counts)
        # Where steps are launched ahead, the first plain round behind others has to wait as they did.
        waited = drafts or (self.device.ahead and self._drafted_before)
        expected += self.device.wait * (waited and not drafts)
        self._drafted_before = drafts
        self.rounds.append((tokens(counts, self.rates), expected))
        self.counts.append(counts)
        size = round_size(len(counts) + sum(counts))
        captured_graph = bool(self.device.making) and size not in self.sizes
        self.sizes.add(size)
        made = self.device.making * captured_graph
        seconds = (expected * slowed * self.dice.lognormvariate(0.0, self.device.noise) + made) / 1000
        outcomes = tuple(self._verified(row, one) for row, one in enumerate(chosen) if one.count)
        self.controller.observe(
            DecodingRound(seconds, len(counts), len(counts) + sum(counts), 0, waited, outcomes, captured_graph)
        )
        return counts

    def rate(self, begin: int, end: int | None = None) -> float:
        """Tokens a millisecond from a round on."""
        some = self.rounds[begin:end]
        return sum(given for given, _ in some) / sum(spent for _, spent in some)

    def _verified(self, row: int, chosen: DraftChoice) -> DraftOutcome:
        accepted = 0
        while accepted < chosen.count and self.dice.random() < self.rates(row, accepted):
            accepted += 1
        assert chosen.source is not None
        return DraftOutcome(row, chosen.source, chosen.count, accepted, False)


def everywhere(rate: float) -> Rates:
    return lambda row, position: rate
