"""Pooling requests as they wait, and which inputs share a batch. Pure Python: no mlx, no clock, no threads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ingot.engine.request import PoolingModelCard, PoolingOutput, PoolingRequest, PoolingTask
from ingot.errors import IngotError
from ingot.text.tokenizer.encoder_inputs import RerankInputs, TextInputs

PADDING_SHARE = 0.25
"""Texts are computed together when their lengths differ from the first one's by no more than this part of it..."""
PADDING_TOKENS = 16
"""...or by no more than this many tokens, as very short ones always do."""

PooledRow: TypeAlias = "array[float]"
OnPoolingOutput = Callable[[PoolingOutput | IngotError], None]


class PoolingModel(Protocol):
    """An encoder, as the loop sees it."""

    def run(
        self, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]]
    ) -> Generator[None, None, list[PooledRow]]:
        """Compute a batch, part by part; the end's value has one row an input."""
        ...

    def rest(self) -> None:
        """Give back scratch memory."""
        ...


@dataclass(frozen=True, slots=True)
class ServedPoolingModel:
    """An encoder that is served: what it is, and how texts become its inputs."""

    card: PoolingModelCard
    inputs: TextInputs | RerankInputs
    model: PoolingModel


@dataclass(eq=False, slots=True)
class RunningPooling:
    """A request while it runs. `waiting` are the places of inputs that are not yet begun, the longest first."""

    request: PoolingRequest
    reply: OnPoolingOutput
    waiting: list[int] = field(default_factory=list)
    rows: list[PooledRow | None] = field(default_factory=list)
    began: float | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        inputs = self.request.inputs
        self.waiting = sorted(range(len(inputs)), key=lambda place: (-len(inputs[place].tokens), place))
        self.rows = [None] * len(inputs)

    def length(self, place: int) -> int:
        return len(self.request.inputs[place].tokens)

    @property
    def remaining(self) -> int:
        """Tokens of the inputs that are not yet begun."""
        return sum(self.length(place) for place in self.waiting)

    @property
    def computed(self) -> int:
        return sum(self.length(place) for place, row in enumerate(self.rows) if row is not None)


@dataclass(frozen=True, slots=True)
class BatchedInput:
    """One input of an encoding, in a batch."""

    encoding: RunningPooling
    place: int

    @property
    def length(self) -> int:
        return self.encoding.length(self.place)


@dataclass(slots=True)
class PoolingBatch:
    role: PoolingTask
    shares: list[BatchedInput]
    work: Generator[None, None, list[PooledRow]]
    spent: float = 0.0

    @property
    def padded_tokens(self) -> int:
        return len(self.shares) * max(share.length for share in self.shares)


def pooling_urgency(encoding: RunningPooling, cost_ms: float, now: float) -> tuple[float, float]:
    """What sorts encodings, the most urgent first.

    The least work goes first, but a second of age weighs as much as a second of work, so that a question gets past a
    library that is being indexed and the library still gets done.
    """
    return cost_ms - 1000 * (now - encoding.request.arrived), encoding.request.arrived


def pick_batch(urgent: Sequence[RunningPooling], budget: int) -> list[BatchedInput]:
    """The inputs to compute together: the first one's longest, and what is about as long, of it and the others.

    They take at most `budget` tokens with their padding, but one is always among them.
    """
    first = width = urgent[0].length(urgent[0].waiting[0])
    apart = max(PADDING_SHARE * first, PADDING_TOKENS)
    shares: list[BatchedInput] = []
    for encoding in urgent:
        for place in encoding.waiting:
            length = encoding.length(place)
            if abs(length - first) > apart:
                continue
            if shares and (len(shares) + 1) * max(width, length) > budget:
                return shares
            width = max(width, length)
            shares.append(BatchedInput(encoding, place))
    return shares
