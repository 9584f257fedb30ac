"""Graph capture: kernel launches, recorded once and replayed at every step.

`GraphCapture` is a launcher that launches nothing. The arrays that it returns are placeholders: they are never
evaluated, and only passed to further kernels of the same capture. Arrays that are neither inputs (`given`) nor outputs
of the capture are the same at every replay: weights, tables of addresses.

On CUDA a replay is one graph; elsewhere its kernels are launched one by one. A graph reads its inputs from memory of
its own. A kernel copies them there, and another one copies the result out. Between the two, an MLX operation launches
the graph on MLX's own stream (`gpu/cuda_graph.py`), so that the stream orders everything. Where that extension cannot
be compiled, the host waits for the first kernel, launches the graph on another stream, and waits for it. No kernel may
wait for another stream or for the host: MLX loads its own kernels on first use, loading waits for everything on the
device, and a kernel that waits for something launched later would deadlock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""The alignment of arrays in a graph's memory."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedLaunch:
    """A recorded launch."""

    kind: KernelKind
    work: LaunchConfig
    inputs: tuple[mx.array, ...]
    outputs: tuple[mx.array, ...]

    @property
    def sizes(self) -> list[int]:
        """The sizes of inputs that are passed to the kernel."""
        return [size for number in shaped_inputs(self.kind.kernel) for size in self.inputs[number].shape]


class GraphCapture:
    def __init__(self) -> None:
        self.notes: list[CapturedLaunch] = []
        self.given: list[mx.array] = []
        self.result: mx.array | None = None
        """What a replay returns."""
        self.token = mx.zeros(1, mx.int32)
        """What the next access to pages waits for."""
        self._own: set[int] = set()  # ids of placeholders
        self._views: dict[int, tuple[mx.array, mx.array]] = {}

    def give(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """A placeholder for an input of each replay, in this order."""
        self.given.append(mx.zeros(shape, dtype))
        self._own.add(id(self.given[-1]))
        return self.given[-1]

    def tokens(self, states: mx.array) -> int:
        """The number of tokens of the first input, whose placeholder may have room for more."""
        return states.size // self.given[0].shape[-1]

    def shaped(self, array: mx.array, shape: Sequence[int]) -> mx.array:
        """A placeholder for the same numbers in another shape, or for the first of them."""
        view = mx.zeros(shape, array.dtype)
        self._views[id(view)] = (view, self.origin(array))
        return view

    def origin(self, array: mx.array) -> mx.array:
        """The array that a view is of: itself, unless it was made by `shaped`."""
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
        """The arrays that are the same at every replay."""
        read = {id(array): array for note in self.notes for array in map(self.origin, note.inputs)}
        return [array for key, array in read.items() if key not in self._own]

    def layout(self) -> tuple[dict[int, int], int]:
        """The offsets of inputs and outputs in the graph's memory, by id, and its size. Arrays that are not read any
        more make room for others."""
        last = {
            id(array): when
            for when, note in enumerate(self.notes)
            for array in (*note.outputs, *map(self.origin, note.inputs))
        }
        if self.result is not None:
            last[id(self.result)] = len(self.notes)
        offsets: dict[int, int] = {}
        live: list[tuple[int, int, int]] = []  # begin, end, and the last launch that reads it
        for when, array in self._allocations():
            live = [each for each in live if each[2] >= when]
            size = -(-max(array.nbytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            begin = _first_gap(live, size)
            offsets[id(array)] = begin
            live.append((begin, begin + size, last.get(id(array), when)))
            live.sort()
        sizes = {id(array): array.nbytes for _, array in self._allocations()}
        return offsets, max((begin + sizes[array] for array, begin in offsets.items()), default=0)

    def _allocations(self) -> Iterator[tuple[int, mx.array]]:
        """Inputs and outputs, each with the launch from which on it needs memory."""
        yield from ((0, array) for array in self.given)
        yield from ((when, array) for when, note in enumerate(self.notes) for array in note.outputs)


def _first_gap(live: list[tuple[int, int, int]], size: int) -> int:
    """The first gap between sorted arrays that is large enough."""
    begin = 0
    for other, end, _ in live:
        if other - begin >= size:
            break
        begin = max(begin, end)
    return begin


log = logging.getLogger("ingot.kernels")
PLACE_UNIT = 16
"""Bytes: the unit of offsets in a graph's memory."""
LEAST_GRAPH_BYTES = 1 << 22


class GraphReplay(Protocol):
    """Returns a capture's result, and a dependency token for later reads and writes, of pages too. Inputs may have
    fewer tokens than the capture has room for; the result has as many."""

    def __call__(self, given: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]: ...


class ReplayStage(Protocol):
    """Replays captures, one after another."""

    @property
    def run(self) -> Launcher:
        """Launches kernels between replays."""

    @property
    def takes_time(self) -> bool:
        """Whether preparing a capture takes so long that it should be done ahead of time."""

    @property
    def slower(self) -> str | None:
        """Why replays are slower than they could be, if they are."""

    def prepare(self, kinds: Iterable[KernelKind]) -> None:
        """Compile these kernels, several at a time."""

    def ready(self, score: GraphCapture) -> GraphReplay: ...

    def forget(self, arrays: Sequence[mx.array]) -> None:
        """No later replay reads these arrays."""


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
                inputs = [_shaped(there.get(id(origin), origin), array.shape) for array, origin in origins]
                made = self.run(note.kind.kernel, inputs, note.work)
                there.update(zip(map(id, note.outputs), made, strict=True))
            return there[id(score.result)][: score.tokens(given[0])], mx.zeros(1, mx.int32)

        return replay

    def forget(self, arrays: Sequence[mx.array]) -> None: ...


def _shaped(array: mx.array, shape: Sequence[int]) -> mx.array:
    """The first numbers of an array."""
    count = math.prod(shape)
    return array.reshape(shape) if count == array.size else array.reshape(-1)[:count].reshape(shape)


def _pad_to_room(array: mx.array, room: mx.array) -> mx.array:
    """Pad an input with invalid values, since a graph's memory has old data behind its inputs, which must not
    matter."""
    padding = mx.full(room.size - array.size, -1 if array.dtype == mx.int32 else float("nan"), array.dtype)
    return mx.concatenate([array.reshape(-1), padding]).reshape(room.shape)


LaunchedGraph = Callable[[mx.array], mx.array]
"""Launches an instantiated graph behind an array, and returns a token for what follows. The graph is destroyed with the
last reference to it."""


class _StreamGraph:
    """On MLX's stream. It is launched at once, so that the device works while Python continues."""

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
    """Replays on one CUDA device."""

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
        """At least so many bytes. Existing graphs keep the memory they have."""
        if size > self.memory.nbytes:
            self.memory = mx.zeros((1 << (size - 1).bit_length()) // 4, mx.int32)
            mx.eval(self.memory)
        return self.memory

    def addresses(self, arrays: Sequence[mx.array]) -> dict[int, int]:
        """The addresses of arrays, by id. The arrays are kept alive."""
        new = [array for array in arrays if id(array) not in self._addresses]
        mx.eval(new)
        for array, address in zip(new, locate_arrays(self.run, new), strict=True):
            self._addresses[id(array)] = (array, address)
        return {id(array): self._addresses[id(array)][1] for array in arrays}

    def __del__(self) -> None:
        """All results of what was launched have been read."""
        if self._stream is not None:
            with suppress(CudaError):
                self.driver.end(self._stream)


class _CudaReplay:
    def __init__(self, stage: CudaReplayStage, score: GraphCapture) -> None:
        assert score.result is not None
        offsets, size = score.layout()
        self._stage, self._score = stage, score
        self._memory = stage.memory_for(size)
        base = stage.addresses([self._memory])[id(self._memory)]
        addresses = stage.addresses(score.fixed()) | {array: base + offset for array, offset in offsets.items()}
        stage.prepare(score.kinds)
        self._graph = stage.launched(
            [
                GraphKernelLaunch(
                    stage.driver.function(*stage.run.compiled(note.kind)),
                    note.work.groups,
                    note.work.threads,
                    [addresses[id(score.origin(array))] for array in (*note.inputs, *note.outputs)],
                    note.sizes,
                    note.work.lent,
                )
                for note in score.notes
            ]
        )
        self._spots = _padded_words([offsets[id(array)] // PLACE_UNIT for array in score.given])
        self._result, self._parts = offsets[id(score.result)] // PLACE_UNIT, dict[int, tuple[mx.array, OutputSpec]]()
        mx.eval(self._spots)

    def __call__(self, given: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]:
        run = self._stage.run
        done = self._graph(post_inputs(run, given, after, self._memory, self._spots))
        return take_result(run, done, self._memory, *self._part(self._score.tokens(given[0]))), done

    def _part(self, tokens: int) -> tuple[mx.array, OutputSpec]:
        """The location and the shape of the result of so many tokens."""
        if tokens not in self._parts:
            result = self._score.result
            assert result is not None
            output = OutputSpec((tokens, result.shape[1]), result.dtype)
            self._parts[tokens] = (_padded_words([self._result, output.shape[0] * output.shape[1]]), output)
        return self._parts[tokens]


def _padded_words(numbers: Sequence[int]) -> mx.array:
    return mx.array([*numbers, *[0] * (-len(numbers) % 8)], mx.int32)


def locate_arrays(run: Launcher, arrays: Sequence[mx.array]) -> list[int]:
    """The addresses of evaluated arrays."""

    def located(array: mx.array) -> mx.array:
        seen = array.view(mx.int32) if array.dtype == mx.uint32 else array  # which kernels know
        work = LaunchConfig((("T", seen.dtype),), (1, 1, 1), 32, (OutputSpec((4,), mx.int32),))
        return run(paged_kernel("locate"), [seen, seen], work)[0]

    words = [located(array) for array in arrays]
    mx.eval(words)
    return [int(np.array(each)[:2].view(np.int64)[0]) for each in words]


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
