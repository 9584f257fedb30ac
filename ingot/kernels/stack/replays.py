"""Replaying scores: on CUDA each is one graph beside MLX's stream, elsewhere its kernels are launched one by one.

A graph reads what it is given from memory of its own. A kernel of MLX's stream puts it there (`post`), another one says
so and waits (`hand_over`), and a third takes what the graph made (`take`). The graph is launched behind those, on a
stream that waits for the word; so the host never waits, and orders nothing but steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.cuda import CudaLauncher
from ingot.kernels.gpu.driver import CudaError, Driver, Launch
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.launchers import launcher
from ingot.kernels.gpu.scores import Score
from ingot.kernels.gpu.texts import Output, Work
from ingot.kernels.paged.texts import paged_kernel
from ingot.kernels.stack.kernels import hand_over, post, take

UNIT = 16
"""Bytes: what places in a graph's memory are counted in."""
LEAST = 1 << 22


class Replay(Protocol):
    """Gives a score's result, and a token of it for whoever reads or writes behind it, in pages too."""

    def __call__(self, given: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]: ...


class Stage(Protocol):
    """Where scores are replayed, one after another."""

    def ready(self, score: Score) -> Replay: ...


class EmulatedStage:
    def __init__(self, run: Emulator) -> None:
        self._run = run

    def ready(self, score: Score) -> Replay:
        self._run.prepare(score.kinds)

        def replay(given: list[mx.array], after: mx.array) -> tuple[mx.array, mx.array]:
            there = dict(zip(map(id, score.given), given, strict=True))
            for note in score.notes:
                origins = [(array, score.origin(array)) for array in note.inputs]
                inputs = [there.get(id(origin), origin).reshape(array.shape) for array, origin in origins]
                made = self._run(note.kind.kernel, inputs, note.work)
                there.update(zip(map(id, note.outputs), made, strict=True))
            return there[id(score.result)], mx.zeros(1, mx.int32)

        return replay


class GraphStage:
    """Of one device."""

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

    def ready(self, score: Score) -> Replay:
        return _GraphReplay(self, score)

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


class _GraphReplay:
    def __init__(self, stage: GraphStage, score: Score) -> None:
        assert score.result is not None
        places, size = score.layout()
        self._stage, self._score = stage, score
        self._memory = stage.memory_for(size)
        base = stage.addresses([self._memory])[id(self._memory)]
        there = stage.addresses(score.fixed()) | {array: base + place for array, place in places.items()}
        stage.run.prepare(score.kinds)
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
        self._made = Output(score.result.shape, score.result.dtype)
        self._spot = _words([places[id(score.result)] // UNIT, score.result.size])
        mx.eval(self._spots, self._spot)

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
        return take(stage.run, done, self._memory, self._spot, self._made), done

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
