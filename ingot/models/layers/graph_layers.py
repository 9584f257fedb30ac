"""Decoder layers as launches of a decode graph.

`graph_layers_of` finds the parts (`graph_parts`) of all layers of a model whose modules were swapped. Parts that no
kernels cover are computed by their own modules, between two graphs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels.decode_graph.kernels import ResidualNorm
from ingot.kernels.dense_matmul.kernels import MOST_ROWS
from ingot.models.families.description import SharedKvSpec
from ingot.models.layers.gpu_linear import FEW_ROWS, DenseKernelLinear, JoinedLinear
from ingot.models.layers.graph_parts import (
    AttentionPart,
    BranchesPart,
    GraphPart,
    LayerInputPart,
    MoePart,
    RecurrentPart,
    UncoveredPartError,
    norm_weights,
    part_of,
    rms_norm_weights,
)
from ingot.models.layers.layer_program import (
    LayerProgram,
    ResidualBlock,
    decoder_layers_of,
    layer_program_of,
)
from ingot.models.layers.modules import own_class
from ingot.models.layers.streamed_runs import GraphRun, RunExperts, StreamedLayer, StreamedRuns


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayer:
    """The parts of a layer's residual blocks."""

    parts: tuple[GraphPart, ...]

    @property
    def shared_kv(self) -> SharedKvSpec | None:
        """How its KV is passed on to later layers."""
        shared = self.mixer.module._spec.shared_kv if isinstance(self.mixer, AttentionPart) else None
        return None if shared is None or shared.argument is None else shared

    @property
    def mixer(self) -> AttentionPart | RecurrentPart | None:
        """The part that has a state, if there is one."""
        return next((part for part in leaves_of(self.parts) if isinstance(part, AttentionPart | RecurrentPart)), None)


def leaves_of(parts: Iterable[GraphPart]) -> list[GraphPart]:
    """These, and instead of a sum what is added."""
    branches = [part.parts if isinstance(part, BranchesPart) else (part,) for part in parts]
    return [part for each in branches for part in each]


@dataclass(frozen=True, slots=True, eq=False)
class OwnBlock:
    """A residual block whose part has no kernels: its own module computes it, between two graphs."""

    program: LayerProgram
    block: ResidualBlock

    def __call__(self, x: mx.array) -> mx.array:
        block, program = self.block, self.program
        y = block.part(x if block.norm_before is None else block.norm_before(x))
        y = y if block.norm_after is None else block.norm_after(y)
        x = x + (y if program.multiplier is None else y * program.multiplier)
        return x if program.scale is None or block is not program.blocks[-1] else x * program.scale


@dataclass(frozen=True, slots=True, eq=False)
class OwnLayer:
    """A layer that its own module computes, between two graphs."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayers:
    """The parts of all layers that have kernels, and in which graphs they are."""

    layers: Sequence[GraphLayer]
    runs: Sequence[GraphRun | OwnBlock | OwnLayer]
    """What is computed one after another."""
    steps: Sequence[tuple[int, GraphRun | StreamedRuns | OwnBlock | OwnLayer]]
    """The same, each with its number; those as one that follow one another and read experts when they are needed."""
    size: int
    """Of hidden states."""
    lacking: str | None
    """Which part is computed by its own module, if one is."""

    @property
    def graph_count(self) -> int:
        """How many graphs a step is."""
        return sum(isinstance(run, GraphRun) for run in self.runs)

    @property
    def most_tokens(self) -> int:
        """Tokens that a graph is captured for."""
        return min(MOST_ROWS if isinstance(each.linear, DenseKernelLinear) else FEW_ROWS for each in self.products)

    @property
    def has_experts(self) -> bool:
        return self.lacking is not None or any(isinstance(part, MoePart) for part in self._parts)

    @property
    def streams_experts(self) -> bool:
        """Whether experts are read when they are needed."""
        return any(isinstance(step, StreamedRuns) for _, step in self.steps)

    @property
    def has_fixed_experts(self) -> bool:
        """Whether all tokens are to go to the same expert now."""
        return any(part.has_fixed_experts for part in self._parts if isinstance(part, MoePart))

    @property
    def takes_layer_inputs(self) -> bool:
        """Whether layers are given something besides hidden states."""
        return any(isinstance(part, LayerInputPart) for part in self._parts)

    @property
    def products(self) -> list[JoinedLinear]:
        return [product for part in self._parts for product in part.products]

    @property
    def _parts(self) -> list[GraphPart]:
        return leaves_of(part for layer in self.layers for part in layer.parts)


LEAST_RUN = 2
"""Residual blocks: launching a graph of fewer costs as much as launching their kernels."""


class _PlannedBlock(NamedTuple):
    """A residual block of a layer, and its part, if there are kernels for it."""

    layer: int
    program: LayerProgram
    block: ResidualBlock
    part: GraphPart | None


def graph_layers_of(model: Any) -> GraphLayers:
    """Raises UncoveredPartError where too few parts have kernels for graphs to be worth it."""
    modules, planned, lacking = decoder_layers_of(model), list[list[_PlannedBlock]](), list[str]()
    if not modules:
        raise UncoveredPartError("layers of this model, which are not where others have theirs")
    for number, layer in enumerate(modules):
        try:
            planned.append(_planned_blocks(layer, number, lacking))
        except UncoveredPartError as error:
            planned.append([])
            lacking.append(str(error))
    planned = _without_short_runs(planned)
    layers = [GraphLayer(tuple(each.part for each in blocks if each.part is not None)) for blocks in planned]
    attention = next((layer.mixer for layer in layers if isinstance(layer.mixer, AttentionPart)), None)
    passes_kv = any(layer.shared_kv is not None for layer in layers)
    if attention is None or (passes_kv and not all(planned)):
        raise UncoveredPartError(lacking[0] if lacking else "layers without attention")
    size = attention.out.linear.weight.shape[0]
    runs = _runs_of(planned)
    return GraphLayers(layers, runs, _steps_of(runs), size, lacking[0] if lacking else None)


def why_uncovered(model: Any) -> str | None:
    """Which part of its layers keeps a model, whose modules were swapped, from being run as graphs."""
    try:
        graph_layers_of(model)
    except UncoveredPartError as error:
        return str(error)
    return None


def _planned_blocks(layer: Any, number: int, lacking: list[str]) -> list[_PlannedBlock]:
    """Of the layer with this number; adds what has no kernels to what is `lacking`. Raises UncoveredPartError if all of
    the layer has to be computed by its own module."""
    program = layer_program_of(layer)
    if program is None:
        raise UncoveredPartError(f"layers of {own_class(layer).__name__}")
    blocks = []
    for block in program.blocks:
        part: GraphPart | None = None
        try:
            part = part_of(block.part, number)
            norm_weights(block.norm_before)
            rms_norm_weights(block.norm_after)
        except UncoveredPartError as error:
            if program.clipped or not _takes_states_alone(block.part):
                raise
            lacking.append(str(error))
            part = None
        blocks.append(_PlannedBlock(number, program, block, part))
    return blocks


def _takes_states_alone(module: Any) -> bool:
    """Whether a part is called with hidden states and nothing else."""
    return isinstance(module, nn.Module) and len(inspect.signature(own_class(module).__call__).parameters) == 2


def _without_short_runs(planned: list[list[_PlannedBlock]]) -> list[list[_PlannedBlock]]:
    """Without the blocks of layers that have none in a run of enough blocks."""
    blocks = list[_PlannedBlock | None]()
    for own in planned:
        blocks += own or [None]
    enough = set[int]()
    for covered, run in groupby(blocks, key=lambda each: each is not None and each.part is not None):
        found = [each.layer for each in run if each is not None]
        if covered and len(found) >= LEAST_RUN:
            enough.update(found)
    return [own if number in enough else [] for number, own in enumerate(planned)]


MOST_STREAMED = 4
"""Mixtures of a run whose experts are read when they are needed: all of it is launched again where one was missing."""


def _runs_of(planned: list[list[_PlannedBlock]]) -> list[GraphRun | OwnBlock | OwnLayer]:
    runs, open_run = list[GraphRun | OwnBlock | OwnLayer](), list[_PlannedBlock]()

    def close() -> None:
        if open_run:
            runs.append(_run_of(open_run))
            open_run.clear()

    for number, blocks in enumerate(planned):
        if not blocks:
            close()
            runs.append(OwnLayer(number))
        for each in blocks:
            if each.part is None:
                close()
                runs.append(OwnBlock(each.program, each.block))
            else:
                if _is_apart(open_run, each.part):
                    close()
                open_run.append(each)
    close()
    return runs


def _steps_of(
    runs: Sequence[GraphRun | OwnBlock | OwnLayer],
) -> list[tuple[int, GraphRun | StreamedRuns | OwnBlock | OwnLayer]]:
    steps = list[tuple[int, GraphRun | StreamedRuns | OwnBlock | OwnLayer]]()
    for number, run in enumerate(runs):
        if not isinstance(run, GraphRun) or run.experts is None:
            steps.append((number, run))
        elif steps and isinstance(before := steps[-1][1], StreamedRuns):
            before.runs.append(run)
        else:
            steps.append((number, StreamedRuns(number, [run])))
    return steps


def _run_of(blocks: Sequence[_PlannedBlock]) -> GraphRun:
    parts = [(each.layer, each.part) for each in blocks if each.part]
    streamed = [_streamed_of(part) for _, part in parts]
    if not any(streamed):
        return GraphRun(parts, _residuals_of(blocks))
    singles = [
        GraphRun([part], _residuals_of([block]), own and RunExperts([own]))
        for part, block, own in zip(parts, blocks, streamed, strict=True)
    ]
    return GraphRun(parts, _residuals_of(blocks), RunExperts([each for each in streamed if each]), singles)


def _streamed_of(part: GraphPart | None) -> StreamedLayer | None:
    if not isinstance(part, MoePart) or part.streamed is None:
        return None
    return StreamedLayer(part.streamed, part.kernels.router.shape.top)


def _is_apart(before: Sequence[_PlannedBlock], part: GraphPart) -> bool:
    """Whether a part is of another run than those before it. A run with experts that may be missing has no recurrent
    states, which no launch may write twice."""
    streamed = sum(_streamed_of(each.part) is not None for each in before)
    if isinstance(part, RecurrentPart):
        return streamed > 0
    has_states = any(isinstance(each.part, RecurrentPart) for each in before)
    return streamed == MOST_STREAMED or (has_states and _streamed_of(part) is not None)


def _residuals_of(blocks: Sequence[_PlannedBlock]) -> list[ResidualNorm]:
    """Each adds what one block gave, and norms the sums for the next block."""
    norms = [ResidualNorm(norm_weights(blocks[0].block.norm_before))]
    for (_, program, block, _), following in zip_longest(blocks, blocks[1:]):
        norms.append(
            ResidualNorm(
                None if following is None else norm_weights(following.block.norm_before),
                rms_norm_weights(block.norm_after),
                multiplier=program.multiplier,
                clipped=program.clipped,
                scale=program.scale if block is program.blocks[-1] else None,
            )
        )
    return norms


MOST_APART = 0.05
"""The largest difference allowed, as a share of the largest number."""
MOST_ROUNDING = 0.5
"""The same for deep models whose own numbers move by more than that when their input is off by its last bit."""
ROUNDING_FACTOR = 2
"""How much farther than that a graph may be off, as its products are rounded otherwise in every layer."""


def difference_beyond_rounding(
    right: Sequence[mx.array], found: Sequence[mx.array], moved: Sequence[mx.array]
) -> str | None:
    """How a graph's numbers differ from the right ones by more than rounding explains, which has moved those."""
    apart, rounding = (max(map(_distance, right, others)) for others in (found, moved))
    largest = max(float(mx.abs(each).max()) for each in right)
    bound = max(MOST_APART * largest, min(ROUNDING_FACTOR * rounding, MOST_ROUNDING * largest), MOST_APART * 1e-6)
    if apart <= bound:
        return None
    return f"they differ by {apart:.2g}, where numbers are up to {largest:.2g}"


def _distance(one: mx.array, other: mx.array) -> float:
    """The largest difference; infinite if some number is none."""
    largest = float(mx.abs(one - other).max())
    return largest if math.isfinite(largest) else math.inf
