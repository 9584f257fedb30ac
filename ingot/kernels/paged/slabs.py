"""Memory that pages of keys and values lie in.

A layer has slabs [pages, kv_heads, page, size] of keys and as many of values. A page is known by its slab and its index
in there (`page_number`). Slabs are written in place: their arrays stay the same, and whoever reads what was written
takes the token that `PagedAttention.write` or `copy` gave. Nothing else orders them, as MLX does not know of the
writing: plain operations that read slabs find them by `ordered` indices, and who writes over what a launch under way
may still read takes a token that is `ordered` after what that launch gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import mlx.core as mx

from ingot.kernels.gpu.launchers import Launcher
from ingot.kernels.gpu.texts import Output, Work
from ingot.kernels.paged.texts import paged_kernel

PAGE_LIMIT = 1 << 20
"""Pages in a slab."""
SLAB_LIMIT = (1 << 11) - 1
"""Slabs that pages can be numbered in."""


def page_number(slab: int, index: int) -> int:
    return slab * PAGE_LIMIT + index


def ordered(array: mx.array, after: mx.array) -> mx.array:
    """A small `array`, which whoever reads it has only when the device has `after`.

    `mx.depends` would order evaluation alone: kernels run at once on a device unless one reads what the other made.
    """
    return mx.where(after.reshape(-1)[:1] == 0, array, array)


class Slabs:
    """A layer's memory: `keys[i]` and `values[i]` [pages, kv_heads, page, size] have as many pages; sizes may differ.

    Made anew when a slab is added, not at every call. Where kernels find them by their addresses, MLX does not know
    that they are read: who owns them keeps them until the device has done all that they are in. The host must never
    read one itself, as MLX moves memory that it reads.
    """

    def __init__(self, keys: Sequence[mx.array], values: Sequence[mx.array], *, before: Slabs | None = None) -> None:
        """`before` are those that had fewer, which knew some already. Raises ValueError where there are none, more than
        can be numbered, or of different kinds."""
        if not 0 < len(keys) == len(values) <= SLAB_LIMIT:
            raise ValueError(f"{len(keys)} slabs of keys and {len(values)} of values: at most {SLAB_LIMIT}, alike")
        self.keys, self.values, self.dtype = tuple(keys), tuple(values), keys[0].dtype
        if any(slab.dtype != self.dtype for slab in (*keys, *values)):
            raise ValueError("slabs of different dtypes")
        self._located = [] if before is None else before._located_in(self)
        self._addresses: mx.array | None = None
        self._padded: dict[int, list[mx.array]] = {}

    def found(self, count: int, run: Launcher) -> list[mx.array]:
        """What a kernel that takes so many slabs finds them by; with 0 it takes their addresses."""
        return self.inputs(count) if count else [self.addresses(run)]

    def inputs(self, count: int) -> list[mx.array]:
        """For a kernel that takes so many slabs, which are no fewer than there are."""
        if count not in self._padded:
            more = count - len(self.keys)
            self._padded[count] = [*self.keys, *[self.keys[0]] * more, *self.values, *[self.values[0]] * more]
        return self._padded[count]

    def addresses(self, run: Launcher) -> mx.array:
        """Where each lies, its keys and its values: found once."""
        if self._addresses is None:
            new = range(len(self._located), len(self.keys))
            mx.eval(self.keys[new.start :], self.values[new.start :])
            self._located += [self._locate(run, number) for number in new]
            self._addresses = mx.concatenate(self._located)
            mx.eval(self._addresses)
        return self._addresses

    @contextmanager
    def standing_for(self, addresses: mx.array) -> Iterator[None]:
        """While this is open, they lie there."""
        own, self._addresses = self._addresses, addresses
        try:
            yield
        finally:
            self._addresses = own

    def _locate(self, run: Launcher, number: int) -> mx.array:
        work = Work((("T", self.dtype),), (1, 1, 1), 32, (Output((4,), mx.int32),))
        [found] = run(paged_kernel("locate"), [self.keys[number], self.values[number]], work)
        return found

    def _located_in(self, larger: Slabs) -> list[mx.array]:
        """What is known of those that both have."""
        both = zip(self.keys, larger.keys, self.values, larger.values, strict=False)
        same = takewhile(lambda slab: slab[0] is slab[1] and slab[2] is slab[3], both)
        return self._located[: sum(1 for _ in same)]
