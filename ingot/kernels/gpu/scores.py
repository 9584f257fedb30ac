"""A score: kernels in the order in which they are launched, noted down once and replayed at every step.

It is a launcher that launches nothing. What it gives stands for what will be there whenever the score is replayed: it
is never evaluated, and goes to nothing but further kernels of the same score. What it was neither `given` nor has made
is the same at every replay, and is kept: weights, tables of addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ingot.kernels.gpu.kernel_source import Kind, kind_of, shaped
from ingot.kernels.gpu.texts import Kernel, Work

ALIGNED = 256
"""Bytes: where arrays begin in the memory that a score is replayed in."""


@dataclass(frozen=True, slots=True, eq=False)
class Note:
    """One launch."""

    kind: Kind
    work: Work
    inputs: tuple[mx.array, ...]
    outputs: tuple[mx.array, ...]

    @property
    def sizes(self) -> list[int]:
        """What the kernel is told of its inputs' shapes."""
        return [size for number in shaped(self.kind.kernel) for size in self.inputs[number].shape]


class Score:
    def __init__(self) -> None:
        self.notes: list[Note] = []
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
        """What it has its numbers from: itself, unless it was `shaped`."""
        return self._views[id(array)][1] if id(array) in self._views else array

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]:
        outputs = [mx.zeros(output.shape, output.dtype) for output in work.outputs]
        self._own.update(map(id, outputs))
        self.notes.append(Note(kind_of(kernel, inputs, work), work, tuple(inputs), tuple(outputs)))
        return outputs

    @property
    def kinds(self) -> list[Kind]:
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
            size = -(-max(array.nbytes, 1) // ALIGNED) * ALIGNED
            begin = _free(taken, size)
            places[id(array)] = begin
            taken.append((begin, begin + size, last.get(id(array), when)))
            taken.sort()
        sizes = {id(array): array.nbytes for _, array in self._begun()}
        return places, max((begin + sizes[array] for array, begin in places.items()), default=0)

    def _begun(self) -> Iterator[tuple[int, mx.array]]:
        """Arrays, and the launch at which each has to have its place. What is given is there before the first."""
        yield from ((0, array) for array in self.given)
        yield from ((when, array) for when, note in enumerate(self.notes) for array in note.outputs)


def _free(taken: list[tuple[int, int, int]], size: int) -> int:
    """The first gap that is large enough, of what is sorted."""
    begin = 0
    for other, end, _ in taken:
        if other - begin >= size:
            break
        begin = max(begin, end)
    return begin
