"""Graphs with experts that are read when they are needed.

A run with such experts is launched with those that are in slots, before the host knows which are needed, and so are the
runs behind it. Each graph notes which experts tokens have chosen. Where one was missing, it is read, and so are those
that later layers have chosen from states that were nearly right; then the run is launched again. Attention writes the
same keys and values to the same places; recurrent states are no part of such runs. A run whose tokens need more experts
than a layer has slots is computed part by part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np

from ingot.kernels.decode_graph.kernels import ResidualNorm, take_result
from ingot.kernels.gpu.kernel_source import OutputSpec
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.moe.kernels import ExpertPlaces
from ingot.models.experts.files import READERS
from ingot.models.experts.streaming import Arriving, LayerExperts
from ingot.models.layers.graph_inputs import GraphStep, StepInputs
from ingot.models.layers.graph_parts import GraphPart, MoePart

LEARNING: Final = 0.1
"""How much of what is known of a run the last pass makes up."""
SHARED: Final = 2
"""How many tokens have an expert, on average, where they fit in slots."""
LAUNCHED_GUESSES: Final = READERS // 2
"""Experts that are read at once because runs have chosen them whose states were nearly right: most are needed."""
LIKELY: Final = 0.5
"""Runs are launched ahead as long as it is likelier than that that none has to be launched again."""


class StreamedLayer(NamedTuple):
    experts: LayerExperts
    top: int
    """How many are a token's."""


@dataclass(frozen=True, slots=True)
class LaunchedRun:
    result: mx.array
    choices: mx.array
    """The experts that each layer's tokens have chosen, one layer's behind another's: the host waits for them."""
    slots: Sequence[np.ndarray]
    """Of each layer, those that it was launched with."""


class RunExperts:
    """The layers of a run whose experts are read when they are needed."""

    def __init__(self, layers: Sequence[StreamedLayer]) -> None:
        self.layers = [layer for layer, _ in layers]
        self._tops = [top for _, top in layers]
        # By tokens that there is room for: where they are noted, and what is taken from there.
        self._notes: dict[int, tuple[mx.array, mx.array, OutputSpec]] = {}
        self._slots, self._table = np.zeros(0, np.int32), mx.zeros(0, mx.int32)
        self.all_there = 1.0
        """The share of passes in which no expert was missing: of late, on average."""

    @property
    def guesses(self) -> bool:
        """Whether guesses of what they need are acted on."""
        return any(layer.guesses for layer in self.layers)

    @property
    def is_reading(self) -> bool:
        return any(layer.is_reading for layer in self.layers)

    @property
    def experts(self) -> int:
        """Of all layers together."""
        return sum(layer.slots.slot_of.size for layer in self.layers)

    def may_fit(self, tokens: int) -> bool:
        """Whether so many tokens' experts are likely to fit in the slots: many are those of several tokens."""
        return all(
            tokens * top <= SHARED * layer.slots.count or layer.slots.is_complete
            for layer, top in zip(self.layers, self._tops, strict=True)
        )

    def notes(self, tokens: int) -> tuple[mx.array, mx.array, OutputSpec]:
        """Where a graph with room for so many tokens writes the experts that they have chosen, and what `take_result`
        takes from there: all of it."""
        if tokens not in self._notes:
            size = tokens * sum(self._tops)
            arrays = mx.zeros(size, mx.int32), mx.array([0, size, *[0] * 6], mx.int32)
            mx.eval(arrays)
            self._notes[tokens] = (*arrays, OutputSpec((1, size), mx.int32))
        return self._notes[tokens]

    def places(self, table: mx.array, tokens: int) -> Iterator[ExpertPlaces]:
        """Of each layer, in such a graph."""
        sizes = [layer.slots.slot_of.size for layer in self.layers]
        ends = zip(accumulate(sizes), accumulate(self._tops), strict=True)
        for (end, end_of_top), size, top in zip(ends, sizes, self._tops, strict=True):
            begins = mx.array([end - size, (end_of_top - top) * tokens, *[0] * 6], mx.int32)
            yield ExpertPlaces(table, begins, self.notes(tokens)[0])

    def table(self, slots: Sequence[np.ndarray]) -> mx.array:
        """For the device."""
        joined = np.concatenate(slots)
        if not np.array_equal(joined, self._slots):
            self._slots, self._table = joined, mx.array(joined)
        return self._table

    def choices(self, launched: LaunchedRun, tokens: int) -> list[np.ndarray]:
        """The experts [tokens, top] that each layer's tokens have chosen. Waits for the device."""
        mx.eval(launched.choices)
        noted = np.array(launched.choices).reshape(-1)
        room, ends = noted.size // sum(self._tops), accumulate(self._tops)
        return [
            noted[(end - top) * room : end * room].reshape(room, top)[:tokens]
            for end, top in zip(ends, self._tops, strict=True)
        ]

    def check(self, launched: LaunchedRun, choices: Sequence[np.ndarray], known: int) -> _Checked:
        """Of layers from that number on, until experts are missing, which are then being read, or are too many."""
        for number in range(known, len(self.layers)):
            layer, chosen = self.layers[number], choices[number]
            if not layer.has_room_for(chosen):
                return _Checked(number, None)
            reads = layer.begin_missing(chosen, launched.slots[number])
            if reads is not None:
                self.all_there -= LEARNING * self.all_there
                return _Checked(number + 1, reads)
        self.all_there += LEARNING * (1 - self.all_there) * (known == 0)
        return _Checked(len(self.layers), None)


class _Checked(NamedTuple):
    known: int
    """Layers of whose choice all experts are there, or will be."""
    reads: Sequence[Arriving] | None
    """Of missing experts of the last of them; None where none is missing."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphRun:
    """Residual blocks, one after another, that are one graph."""

    parts: Sequence[tuple[int, GraphPart]]
    """With the numbers of their layers."""
    residuals: Sequence[ResidualNorm]
    """What is between parts: one before each of them, and one behind the last."""
    experts: RunExperts | None = None
    """Those that are read when they are needed, if it has any: it may have to be launched again."""
    singles: Sequence[GraphRun] = ()
    """Each of its parts as a run, where the experts may be too many to launch it."""


Replay = Callable[..., tuple[mx.array, mx.array]]
"""Of a run and what it is known by, on states [tokens, size] and what else its graph is given: what it makes of them,
and a token for what follows."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamedRuns:
    """Runs, one after another, that all have experts which are read when they are needed."""

    first: int
    """The number of the first run."""
    runs: list[GraphRun]

    def compute(self, x: mx.array, step: GraphStep, launcher: Launcher, replay: Replay) -> mx.array:
        """What they make of states [tokens, size]. Raises WeightsUnreadable."""
        experts = [run.experts for run in self.runs if run.experts is not None]
        launched, number, known, most, again = deque[LaunchedRun](), 0, 0, _launched_ahead(experts), False
        while number < len(experts):
            run = experts[number]
            if not run.may_fit(step.tokens):
                x, number = self._by_parts(number, x, 0, step, launcher, replay), number + 1
                launched.clear()
                continue
            if not launched:
                for ahead, each in enumerate(experts[number : number + most], number):
                    if launched and again and each.is_reading:
                        break  # it would be launched in vain
                    slots = [layer.readable_slots(waits=again and not launched) for layer in each.layers]
                    states = launched[-1].result if launched else x
                    launched.append(self._launch(ahead, states, slots, step, launcher, replay))
            first = launched.popleft()
            choices = run.choices(first, step.tokens)
            checked = run.check(first, choices, known)
            if checked.reads is None and checked.known == len(run.layers):
                x, number, known = first.result, number + 1, 0
                continue
            if checked.reads is None:
                x, number, known = self._by_parts(number, x, checked.known, step, launcher, replay), number + 1, 0
            else:
                _read_ahead(run.layers[checked.known :], choices[checked.known :])
                for other, later in zip(experts[number + 1 :], launched, strict=False):
                    if other.guesses:
                        _read_ahead(other.layers, other.choices(later, step.tokens))
                known = checked.known
                run.layers[known - 1].settle(checked.reads)
            launched.clear()
            again, most = True, len(experts) if run.guesses else 1
        return x

    def _launch(
        self,
        number: int,
        states: mx.array,
        slots: Sequence[np.ndarray],
        step: GraphStep,
        launcher: Launcher,
        replay: Replay,
    ) -> LaunchedRun:
        """A run, with the slots of its layers."""
        experts = self.runs[number].experts
        assert experts is not None
        y, done = replay(self.first + number, self.runs[number], states, experts.table(slots))
        launched = LaunchedRun(y, take_result(launcher, done, *experts.notes(step.key.tokens)), slots)
        mx.async_eval(launched.result, launched.choices)
        return launched

    def _by_parts(
        self, number: int, states: mx.array, known: int, step: GraphStep, launcher: Launcher, replay: Replay
    ) -> mx.array:
        """A run, of so many of whose layers all experts are there."""
        given = StepInputs(None, step.slots[0], step.token_loras, None, step.has_fixed_experts)
        for place, single in enumerate(self.runs[number].singles):
            if single.experts is None:
                states = replay((self.first + number, place), single, states)[0]
                continue
            [(_, part)], (before, behind) = single.parts, single.residuals
            assert isinstance(part, MoePart)
            normed = before(launcher, states, None)[1]
            added = part.compute(launcher, normed, given, are_there=known > 0)
            states, known = behind(launcher, states, added)[0], known - 1
        return states


def _read_ahead(layers: Sequence[LayerExperts], choices: Sequence[np.ndarray]) -> None:
    for layer, chosen in zip(layers, choices, strict=True):
        if layer.guesses:
            layer.read_ahead(chosen, at_once=LAUNCHED_GUESSES)


def _launched_ahead(runs: Sequence[RunExperts]) -> int:
    """How many runs are launched before the first is checked: all of them where what they choose is a guess that is
    acted on."""
    if any(run.guesses for run in runs):
        return len(runs)
    likely = list(takewhile(lambda chance: chance > LIKELY, accumulate((run.all_there for run in runs), mul)))
    return max(1, len(likely))
