"""Graph capture: kernels in the order in which they are launched, noted once and replayed at every step.

`GraphCapture` is a launcher that launches nothing. What it gives stands for what will be there whenever the capture is
replayed: it is never evaluated, and goes to nothing but further kernels of the same capture. What it was neither
`given` nor has made is the same at every replay: weights, tables of addresses.

On CUDA a replay is one graph, elsewhere its kernels are launched one by one. A graph reads its inputs from memory of
its own. A kernel puts them there, and another one takes what the graph made. The graph itself is launched between the
two by an operation of MLX, on MLX's own stream (`gpu/cuda_graph.py`), so the stream alone orders everything. Where that
extension cannot be compiled, the host waits for the first kernel, launches the graph on a stream of its own, and waits
for it. No kernel ever waits for another stream or for the host: MLX loads kernels of its own whenever it first meets
them, loading waits for everything that runs on the device, and a kernel that waits for something launched later would
wait for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ingot.kernels.decode_graph.kernels import post_inputs, take_result
from ingot.kernels.device import Device
from ingot.kernels.gpu.cuda_graph import CudaDriver, CudaError, ExtensionBuildError, GraphKernelLaunch, graph_extension
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, KernelKind, LaunchConfig, OutputSpec, kernel_kind, shaped_inputs
from ingot.kernels.gpu.launcher import CudaLauncher, Launcher, kernel_launcher
from ingot.kernels.paged_attention.inputs import paged_kernel

ALIGNMENT_BYTES = 256
"""Bytes: where arrays begin in the memory that a score is replayed in."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedLaunch:
    """One launch."""

    kind: KernelKind
    work: LaunchConfig
    inputs: tuple[mx.array, ...]
    outputs: tuple[mx.array, ...]

    @property
    def sizes(self) -> list[int]:
        """What the kernel is told of its inputs' shapes."""
        return [size for number in shaped_inputs(self.kind.kernel) for size in self.inputs[number].shape]


class GraphCapture:
    def __init__(self) -> None:
        self.notes: list[CapturedLaunch] = []
        self.given: list[mx.array] = []
        self.result: mx.array | None = None
        """What a replay gives."""
        self._own: set[int] = set()  # all that stands for something else
        self._views: dict[int, tuple[mx.array, mx.array]] = {}

    def give(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """What stands for data that each replay is given, in this order."""
        self.given.append(mx.zeros(shape, dtype))
        self._own.add(id(self.given[-1]))
        return self.given[-1]

    def tokens(self, states: mx.array) -> int:
        """How many there are, of such states as the first that is given has room for."""
        return states.size // self.given[0].shape[-1]

    def shaped(self, array: mx.array, shape: Sequence[int]) -> mx.array:
        """The same numbers in another shape: of what is given or made."""
        view = mx.zeros(shape, array.dtype)
        self._views[id(view)] = (view, self.origin(array))
        return view

    def origin(self, array: mx.array) -> mx.array:
        """What it has its numbers from: itself, unless it was `shaped_inputs`."""
        return self._views[id(array)][1] if id(array) in self._views else array

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        outputs = [mx.zeros(output.shape, output.dtype) for output in work.outputs]
        self._own.update(map(id, outputs))
        self.notes.append(CapturedLaunch(kernel_kind(kernel, inputs, work), work, tuple(inputs), tuple(outputs)))
        return outputs

    @property
    def kinds(self) -> list[KernelKind]:
        return [*dict.fromkeys(note.kind for note in self.notes)]

    def fixed(self) -> list[mx.array]:
        """What is the same at every replay, each once."""
        read = {id(array): array for note in self.notes for array in map(self.origin, note.inputs)}
        return [array for key, array in read.items() if key not in self._own]

    def layout(self) -> tuple[dict[int, int], int]:
        """Where in one piece of memory each array may lie that is given or made, by its id, and how many bytes that is:
        what nobody reads any more makes room for others."""
        last = {
            id(array): when
            for when, note in enumerate(self.notes)
            for array in (*note.outputs, *map(self.origin, note.inputs))
        }
        if self.result is not None:
            last[id(self.result)] = len(self.notes)
        places: dict[int, int] = {}
        taken: list[tuple[int, int, int]] = []  # begin, end, and until when
        for when, array in self._begun():
            taken = [each for each in taken if each[2] >= when]
            size = -(-max(array.nbytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            begin = _first_gap(taken, size)
            places[id(array)] = begin
            taken.append((begin, begin + size, last.get(id(array), when)))
            taken.sort()
        sizes = {id(array): array.nbytes for _, array in self._begun()}
        return places, max((begin + sizes[array] for array, begin in places.items()), default=0)

    def _begun(self) -> Iterator[tuple[int, mx.array]]:
        """Arrays, and the launch at which each has to have its place. What is given is there before the first."""
        yield from ((0, array) for array in self.given)
        yield from ((when, array) for when, note in enumerate(self.notes) for array in note.outputs)


def _first_gap(taken: list[tuple[int, int, int]], size: int) -> int:
    """The first gap that is large enough, of what is sorted."""
    begin = 0
    for other, end, _ in taken:
        if other - begin >= size:
            break
        begin = max(begin, end)
    return begin


log = logging.getLogger("ingot.kernels")
PLACE_UNIT = 16
"""Bytes: what places in a graph's memory are counted in."""
LEAST_GRAPH_BYTES = 1 << 22


class GraphReplay(Protocol):
    """Gives a score's result, and a token of it for whoever reads or writes behind it, in pages too. What it is given
    may be less than the score has room for: the result is that of as many tokens as there are."""

    def __call__(self, given: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]: ...


class ReplayStage(Protocol):
    """Where scores are replayed, one after another."""

    @property
    def run(self) -> Launcher:
        """What launches kernels behind them, and before the next."""

    @property
    def takes_time(self) -> bool:
        """Whether making a score ready takes so long that it had better be done before it is asked for."""

    @property
    def slower(self) -> str | None:
        """Why replays are slower here than they could be; None where they are not."""

    def prepare(self, kinds: Iterable[KernelKind]) -> None:
        """Compile them at once."""

    def ready(self, score: GraphCapture) -> GraphReplay: ...

    def forget(self, arrays: Sequence[mx.array]) -> None:
        """No score that is still to be replayed reads them."""


class EmulatedReplayStage:
    takes_time = False
    slower = None

    def __init__(self, run: Emulator) -> None:
        self.run = run

    def prepare(self, kinds: Iterable[KernelKind]) -> None:
        self.run.prepare(kinds)

    def ready(self, score: GraphCapture) -> GraphReplay:
        self.prepare(score.kinds)

        def replay(given: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]:
            padded = [_pad_to_room(array, room) for array, room in zip(given, score.given, strict=True)]
            there = dict(zip(map(id, score.given), padded, strict=True))
            for note in score.notes:
                origins = [(array, score.origin(array)) for array in note.inputs]
                inputs = [there.get(id(origin), origin).reshape(array.shape) for array, origin in origins]
                made = self.run(note.kind.kernel, inputs, note.work)
                there.update(zip(map(id, note.outputs), made, strict=True))
            return there[id(score.result)][: score.tokens(given[0])], mx.zeros(1, mx.int32)

        return replay

    def forget(self, arrays: Sequence[mx.array]) -> None: ...


def _pad_to_room(array: mx.array, room: mx.array) -> mx.array:
    """Behind what is given lies whatever was there before, of which nothing may be taken for something."""
    nothing = mx.full(room.size - array.size, -1 if array.dtype == mx.int32 else float("nan"), array.dtype)
    return mx.concatenate([array.reshape(-1), nothing]).reshape(room.shape)


class LaunchedGraph(Protocol):
    """An instantiated graph, which goes with its last reference."""

    def __call__(self, before: mx.array) -> mx.array:
        """Launch it behind `before`; gives a token for what comes behind the graph."""


class _StreamGraph:
    """On MLX's stream: nobody waits. It is launched at once, so that the device works while Python goes on."""

    def __init__(self, library: Any, handle: int) -> None:
        self._launch, self._graph = library.launch, library.Graph(handle)

    def __call__(self, before: mx.array) -> mx.array:
        done: mx.array = self._launch(self._graph, before)
        mx.async_eval(done)
        return done


class _HostGraph:
    """On a stream of its own, for which the host waits."""

    def __init__(self, driver: CudaDriver, stream: int, handle: int) -> None:
        self._driver, self._stream, self._handle = driver, stream, handle

    def __call__(self, before: mx.array) -> mx.array:
        mx.eval(before)
        self._driver.launch(self._handle, self._stream)
        self._driver.synchronize(self._stream)
        return before

    def __del__(self) -> None:
        with suppress(CudaError):
            self._driver.forget(self._handle)


class CudaReplayStage:
    """Of one device."""

    takes_time = True

    def __init__(self, run: CudaLauncher, driver: CudaDriver, library: Any | ExtensionBuildError) -> None:
        """`library` is the extension that launches graphs, or why there is none."""
        self.run, self.driver, self._library = run, driver, library
        self.slower: str | None = None
        if isinstance(library, ExtensionBuildError):
            self.slower = f"the host waits for every step, which is slower: {library}"
            log.warning("%s", self.slower)
        self._stream = driver.stream() if self.slower else None
        self.memory = mx.zeros(LEAST_GRAPH_BYTES // 4, mx.int32)
        self._addresses: dict[int, tuple[mx.array, int]] = {}
        mx.eval(self.memory)

    def launched(self, launches: Sequence[GraphKernelLaunch]) -> LaunchedGraph:
        """Raises CudaError."""
        handle = self.driver.graph(launches)
        if self._stream is not None:
            return _HostGraph(self.driver, self._stream, handle)
        return _StreamGraph(self._library, handle)

    def prepare(self, kinds: Iterable[KernelKind]) -> None:
        self.run.prepare(dict.fromkeys(kinds))

    def ready(self, score: GraphCapture) -> GraphReplay:
        return _CudaReplay(self, score)

    def forget(self, arrays: Sequence[mx.array]) -> None:
        for array in arrays:
            self._addresses.pop(id(array), None)

    def memory_for(self, size: int) -> mx.array:
        """So many bytes. Graphs that are there already go on with what they have."""
        if size > self.memory.nbytes:
            self.memory = mx.zeros((1 << (size - 1).bit_length()) // 4, mx.int32)
            mx.eval(self.memory)
        return self.memory

    def addresses(self, arrays: Sequence[mx.array]) -> dict[int, int]:
        """Where arrays lie, by their ids. They are kept."""
        new = [array for array in arrays if id(array) not in self._addresses]
        mx.eval(new)
        found = [self._located(array) for array in new]
        mx.eval(found)
        for array, words in zip(new, found, strict=True):
            self._addresses[id(array)] = (array, int(np.array(words)[:2].view(np.int64)[0]))
        return {id(array): self._addresses[id(array)][1] for array in arrays}

    def _located(self, array: mx.array) -> mx.array:
        work = LaunchConfig((("T", array.dtype),), (1, 1, 1), 32, (OutputSpec((4,), mx.int32),))
        return self.run(paged_kernel("locate"), [array, array], work)[0]

    def __del__(self) -> None:
        """Nothing waits for it: whatever was launched has been read."""
        if self._stream is not None:
            with suppress(CudaError):
                self.driver.end(self._stream)


class _CudaReplay:
    def __init__(self, stage: CudaReplayStage, score: GraphCapture) -> None:
        assert score.result is not None
        places, size = score.layout()
        self._stage, self._score = stage, score
        self._memory = stage.memory_for(size)
        base = stage.addresses([self._memory])[id(self._memory)]
        there = stage.addresses(score.fixed()) | {array: base + place for array, place in places.items()}
        stage.prepare(score.kinds)
        self._graph = stage.launched(
            [
                GraphKernelLaunch(
                    stage.driver.function(*stage.run.compiled(note.kind)),
                    note.work.groups,
                    note.work.threads,
                    [there[id(score.origin(array))] for array in (*note.inputs, *note.outputs)],
                    note.sizes,
                    note.work.lent,
                )
                for note in score.notes
            ]
        )
        self._spots = _padded_words([places[id(array)] // PLACE_UNIT for array in score.given])
        self._result, self._taken = places[id(score.result)] // PLACE_UNIT, dict[int, tuple[mx.array, OutputSpec]]()
        mx.eval(self._spots)

    def __call__(self, given: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]:
        run = self._stage.run
        done = self._graph(post_inputs(run, given, after, self._memory, self._spots))
        return take_result(run, done, self._memory, *self._part(self._score.tokens(given[0]))), done

    def _part(self, tokens: int) -> tuple[mx.array, OutputSpec]:
        """Where so many tokens' result is, and what it is."""
        if tokens not in self._taken:
            result = self._score.result
            assert result is not None
            made = OutputSpec((tokens, result.shape[1]), result.dtype)
            self._taken[tokens] = (_padded_words([self._result, made.shape[0] * made.shape[1]]), made)
        return self._taken[tokens]


def _padded_words(numbers: Sequence[int]) -> mx.array:
    return mx.array([*numbers, *[0] * (8 - len(numbers))], mx.int32)


def replay_stage(device: Device) -> ReplayStage:
    """Raises CudaError or RuntimeError where there is none."""
    run = kernel_launcher(device)
    if isinstance(run, Emulator):
        return EmulatedReplayStage(run)
    if isinstance(run, CudaLauncher):
        return CudaReplayStage(run, CudaDriver.find(), _graph_extension_or_error())
    raise CudaError("kernels are not compiled here")


def _graph_extension_or_error() -> Any | ExtensionBuildError:
    try:
        return graph_extension()
    except ExtensionBuildError as error:
        return error
