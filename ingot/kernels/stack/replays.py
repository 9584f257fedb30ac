"""Replaying scores: on CUDA each is one graph beside MLX's stream, elsewhere its kernels are launched one by one.

A graph reads what it is given from memory of its own. A kernel of MLX's stream puts it there (`post`), another one says
so and waits (`hand_over`), and a third takes what the graph made (`take`). The graph is launched behind those, on a
stream that waits for the word; so the host never waits, and orders nothing but steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.cuda import CudaLauncher
from ingot.kernels.gpu.driver import CudaError, Driver, Launch
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kinds import Kind
from ingot.kernels.gpu.launchers import Launcher, launcher
from ingot.kernels.gpu.scores import Score
from ingot.kernels.gpu.texts import Output, Work
from ingot.kernels.paged.texts import paged_kernel
from ingot.kernels.stack.kernels import hand_over, post, take

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

    def prepare(self, kinds: Iterable[Kind]) -> None:
        """Compile them at once."""

    def ready(self, score: Score) -> Replay: ...

    def forget(self, arrays: Sequence[mx.array]) -> None:
        """No score that is still to be replayed reads them."""


class EmulatedStage:
    takes_time = False

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


class GraphStage:
    """Of one device."""

    takes_time = True

    def __init__(self, run: CudaLauncher, driver: Driver) -> None:
        """Raises CudaError or RuntimeError where graphs cannot be launched beside MLX's stream."""
        self.run, self.driver = run, driver
        self.stream = driver.stream()
        self.begun, self.done = words = [driver.memory(1), driver.memory(1)]
        self.flags = mx.array(np.array(words, np.int64).view(np.int32))
        self.memory = mx.zeros(LEAST // 4, mx.int32)
        self.number = 0
        self._addresses: dict[int, tuple[mx.array, int]] = {}
        mx.eval(self.flags, self.memory)
        # A first launch is waited for: that of what waits for a graph must find nothing to wait for.
        mx.eval(hand_over(run, mx.zeros(1, mx.int32), 0, self.flags))

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
        with suppress(CudaError):
            self.driver.synchronize(self.stream)
            self.driver.end(self.stream)
            for address in (self.begun, self.done):
                self.driver.free(address)


class _GraphReplay:
    def __init__(self, stage: GraphStage, score: Score) -> None:
        assert score.result is not None
        places, size = score.layout()
        self._stage, self._score = stage, score
        self._memory = stage.memory_for(size)
        base = stage.addresses([self._memory])[id(self._memory)]
        there = stage.addresses(score.fixed()) | {array: base + place for array, place in places.items()}
        stage.prepare(score.kinds)
        self._graph = stage.driver.graph(
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
        stage = self._stage
        driver, stream = stage.driver, stage.stream
        stage.number = number = (stage.number + 1) & 0xFFFFFFFF
        posted = post(stage.run, given, after, self._memory, self._spots)
        done = hand_over(stage.run, posted, number, stage.flags)
        mx.async_eval(done)  # before the graph: whatever evaluating may wait for does not wait for it
        driver.wait(stream, stage.begun, number)
        driver.launch(self._graph, stream)
        driver.write(stream, stage.done, number)
        return take(stage.run, done, self._memory, *self._part(self._score.tokens(given[0]))), done

    def _part(self, tokens: int) -> tuple[mx.array, Output]:
        """Where so many tokens' result is, and what it is."""
        if tokens not in self._taken:
            result = self._score.result
            assert result is not None
            made = Output((tokens, result.shape[1]), result.dtype)
            self._taken[tokens] = (_words([self._result, made.shape[0] * made.shape[1]]), made)
        return self._taken[tokens]

    def __del__(self) -> None:
        if hasattr(self, "_graph"):
            self._stage.driver.forget(self._graph)


def _words(numbers: Sequence[int]) -> mx.array:
    return mx.array([*numbers, *[0] * (8 - len(numbers))], mx.int32)


def stage(device: Device) -> Stage:
    """Raises CudaError or RuntimeError where there is none."""
    run = launcher(device)
    if isinstance(run, Emulator):
        return EmulatedStage(run)
    if isinstance(run, CudaLauncher):
        return GraphStage(run, Driver.find())
    raise CudaError("kernels are not compiled here")
