"""Replaying scores: on CUDA each is one graph, elsewhere its kernels are launched one by one.

A graph reads its inputs from memory of its own. A kernel puts them there (`post`), and another one takes what the graph
made (`take`). The graph itself is launched between the two by an operation of MLX, on MLX's own stream
(`gpu/graph_launch.py`), so the stream alone orders everything. Where that extension cannot be compiled, the host waits
for `post`, launches the graph on a stream of its own, and waits for it. No kernel ever waits for another stream or for
the host: MLX loads kernels of its own whenever it first meets them, loading waits for everything that runs on the
device, and a kernel that waits for something launched later would wait for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ingot.kernels.decode_graph.kernels import post, take
from ingot.kernels.device import Device
from ingot.kernels.gpu.cuda_graph import CudaError, Driver, Launch
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.graph_launch import BuildError, extension
from ingot.kernels.gpu.kernel_source import Kind
from ingot.kernels.gpu.launcher import CudaLauncher
from ingot.kernels.gpu.launchers import Launcher, launcher
from ingot.kernels.gpu.scores import Score
from ingot.kernels.gpu.texts import Output, Work
from ingot.kernels.paged.texts import paged_kernel

log = logging.getLogger("ingot.kernels")
UNIT = 16
"""Bytes: what places in a graph's memory are counted in."""
LEAST = 1 << 22


class Replay(Protocol):
    """Gives a score's result, and a token of it for whoever reads or writes behind it, in pages too. What it is given
    may be less than the score has room for: the result is that of as many tokens as there are."""

    def __call__(self, given: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]: ...


class Stage(Protocol):
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

    def prepare(self, kinds: Iterable[Kind]) -> None:
        """Compile them at once."""

    def ready(self, score: Score) -> Replay: ...

    def forget(self, arrays: Sequence[mx.array]) -> None:
        """No score that is still to be replayed reads them."""


class EmulatedStage:
    takes_time = False
    slower = None

    def __init__(self, run: Emulator) -> None:
        self.run = run

    def prepare(self, kinds: Iterable[Kind]) -> None:
        self.run.prepare(kinds)

    def ready(self, score: Score) -> Replay:
        self.prepare(score.kinds)

        def replay(given: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]:
            padded = [_padded(array, room) for array, room in zip(given, score.given, strict=True)]
            there = dict(zip(map(id, score.given), padded, strict=True))
            for note in score.notes:
                origins = [(array, score.origin(array)) for array in note.inputs]
                inputs = [there.get(id(origin), origin).reshape(array.shape) for array, origin in origins]
                made = self.run(note.kind.kernel, inputs, note.work)
                there.update(zip(map(id, note.outputs), made, strict=True))
            return there[id(score.result)][: score.tokens(given[0])], mx.zeros(1, mx.int32)

        return replay

    def forget(self, arrays: Sequence[mx.array]) -> None: ...


def _padded(array: mx.array, room: mx.array) -> mx.array:
    """Behind what is given lies whatever was there before, of which nothing may be taken for something."""
    nothing = mx.full(room.size - array.size, -1 if array.dtype == mx.int32 else float("nan"), array.dtype)
    return mx.concatenate([array.reshape(-1), nothing]).reshape(room.shape)


class LaunchedGraph(Protocol):
    """An instantiated graph, which goes with its last reference."""

    def __call__(self, before: mx.array) -> mx.array:
        """Launch it behind `before`; gives a token for what comes behind the graph."""


class _InOrder:
    """On MLX's stream: nobody waits. It is launched at once, so that the device works while Python goes on."""

    def __init__(self, library: Any, handle: int) -> None:
        self._launch, self._graph = library.launch, library.Graph(handle)

    def __call__(self, before: mx.array) -> mx.array:
        done: mx.array = self._launch(self._graph, before)
        mx.async_eval(done)
        return done


class _ByHost:
    """On a stream of its own, for which the host waits."""

    def __init__(self, driver: Driver, stream: int, handle: int) -> None:
        self._driver, self._stream, self._handle = driver, stream, handle

    def __call__(self, before: mx.array) -> mx.array:
        mx.eval(before)
        self._driver.launch(self._handle, self._stream)
        self._driver.synchronize(self._stream)
        return before

    def __del__(self) -> None:
        with suppress(CudaError):
            self._driver.forget(self._handle)


class GraphStage:
    """Of one device."""

    takes_time = True

    def __init__(self, run: CudaLauncher, driver: Driver, library: Any | BuildError) -> None:
        """`library` is the extension that launches graphs, or why there is none."""
        self.run, self.driver, self._library = run, driver, library
        self.slower: str | None = None
        if isinstance(library, BuildError):
            self.slower = f"the host waits for every step, which is slower: {library}"
            log.warning("%s", self.slower)
        self._stream = driver.stream() if self.slower else None
        self.memory = mx.zeros(LEAST // 4, mx.int32)
        self._addresses: dict[int, tuple[mx.array, int]] = {}
        mx.eval(self.memory)

    def launched(self, launches: Sequence[Launch]) -> LaunchedGraph:
        """Raises CudaError."""
        handle = self.driver.graph(launches)
        if self._stream is not None:
            return _ByHost(self.driver, self._stream, handle)
        return _InOrder(self._library, handle)

    def prepare(self, kinds: Iterable[Kind]) -> None:
        self.run.prepare(dict.fromkeys(kinds))

    def ready(self, score: Score) -> Replay:
        return _GraphReplay(self, score)

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
        work = Work((("T", array.dtype),), (1, 1, 1), 32, (Output((4,), mx.int32),))
        return self.run(paged_kernel("locate"), [array, array], work)[0]

    def __del__(self) -> None:
        """Nothing waits for it: whatever was launched has been read."""
        if self._stream is not None:
            with suppress(CudaError):
                self.driver.end(self._stream)


class _GraphReplay:
    def __init__(self, stage: GraphStage, score: Score) -> None:
        assert score.result is not None
        places, size = score.layout()
        self._stage, self._score = stage, score
        self._memory = stage.memory_for(size)
        base = stage.addresses([self._memory])[id(self._memory)]
        there = stage.addresses(score.fixed()) | {array: base + place for array, place in places.items()}
        stage.prepare(score.kinds)
        self._graph = stage.launched(
            [
                Launch(
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
        self._spots = _words([places[id(array)] // UNIT for array in score.given])
        self._result, self._taken = places[id(score.result)] // UNIT, dict[int, tuple[mx.array, Output]]()
        mx.eval(self._spots)

    def __call__(self, given: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]:
        run = self._stage.run
        done = self._graph(post(run, given, after, self._memory, self._spots))
        return take(run, done, self._memory, *self._part(self._score.tokens(given[0]))), done

    def _part(self, tokens: int) -> tuple[mx.array, Output]:
        """Where so many tokens' result is, and what it is."""
        if tokens not in self._taken:
            result = self._score.result
            assert result is not None
            made = Output((tokens, result.shape[1]), result.dtype)
            self._taken[tokens] = (_words([self._result, made.shape[0] * made.shape[1]]), made)
        return self._taken[tokens]


def _words(numbers: Sequence[int]) -> mx.array:
    return mx.array([*numbers, *[0] * (8 - len(numbers))], mx.int32)


def stage(device: Device) -> Stage:
    """Raises CudaError or RuntimeError where there is none."""
    run = launcher(device)
    if isinstance(run, Emulator):
        return EmulatedStage(run)
    if isinstance(run, CudaLauncher):
        return GraphStage(run, Driver.find(), _library())
    raise CudaError("kernels are not compiled here")


def _library() -> Any | BuildError:
    try:
        return extension()
    except BuildError as error:
        return error
