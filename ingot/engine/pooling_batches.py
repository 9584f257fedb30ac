"""Pooling requests as they wait, and which inputs share a batch. Pure Python: no mlx, no clock, no threads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ingot.engine.request import PoolingModelCard, PoolingOutput, PoolingRequest
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
    """A loaded encoder: its card, and how texts become its inputs."""

    card: PoolingModelCard
    inputs: TextInputs | RerankInputs
    model: PoolingModel


@dataclass(eq=False, slots=True)
class RunningPooling:
    """A request while it runs. `waiting` are the indices of inputs that are not yet computed, the longest first."""

    request: PoolingRequest
    reply: OnPoolingOutput
    waiting: list[int] = field(default_factory=list)
    rows: list[PooledRow | None] = field(default_factory=list)
    began: float | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        inputs = self.request.inputs
        self.waiting = sorted(range(len(inputs)), key=lambda index: (-len(inputs[index].tokens), index))
        self.rows = [None] * len(inputs)

    def length(self, index: int) -> int:
        return len(self.request.inputs[index].tokens)

    @property
    def remaining(self) -> int:
        """Tokens of the inputs that are not yet begun."""
        return sum(self.length(index) for index in self.waiting)

    @property
    def computed(self) -> int:
        return sum(self.length(index) for index, row in enumerate(self.rows) if row is not None)


@dataclass(frozen=True, slots=True)
class BatchedInput:
    """One input of a request, in a batch."""

    job: RunningPooling
    index: int


@dataclass(slots=True)
class PoolingBatch:
    inputs: list[BatchedInput]
    work: Generator[None, None, list[PooledRow]]
    spent: float = 0.0

    @property
    def padded_tokens(self) -> int:
        return len(self.inputs) * max(each.job.length(each.index) for each in self.inputs)


def pooling_urgency(job: RunningPooling, cost_ms: float, now: float) -> tuple[float, float]:
    """Sorts requests, the most urgent first.

    The least work goes first, but a second of age weighs as much as a second of work, so that a question gets past a
    library that is being indexed and the library still gets done.
    """
    return cost_ms - 1000 * (now - job.request.arrived), job.request.arrived


def pick_batch(jobs: Sequence[RunningPooling], budget: int) -> list[BatchedInput]:
    """The inputs to compute together: the longest of the first request, and what is about as long, of it and the
    others.

    They take at most `budget` tokens with their padding, but one is always among them.
    """
    first = width = jobs[0].length(jobs[0].waiting[0])
    most_apart = max(PADDING_SHARE * first, PADDING_TOKENS)
    inputs: list[BatchedInput] = []
    for job in jobs:
        for index in job.waiting:
            length = job.length(index)
            if abs(length - first) > most_apart:
                continue
            if inputs and (len(inputs) + 1) * max(width, length) > budget:
                return inputs
            width = max(width, length)
            inputs.append(BatchedInput(job, index))
    return inputs
