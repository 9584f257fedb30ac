"""What all live layer states share, the forward batch that they are the caches of; and recurrent layers' states, which
only move forward, in a slot for each row. Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import mlx.core as mx

from ingot.cache.arrays import copy_array, pad_to_length, resize_rows
from ingot.cache.forward_batch import AttentionMask, CacheOffset, ForwardBatch, MixedBatch, PerBatch, TokenSpan
from ingot.upstream import ArraysCache

LayerKind = Literal["append", "window", "recurrent"]


class LayerState:
    """What the three kinds share: the launch that they are the caches of."""

    kind: LayerKind

    def __init__(self) -> None:
        self.launch: ForwardBatch | None = None
        self.mixed: MixedBatch | None = None
        self.neighbours: Sequence[Any] = ()  # all layers' states, this one among them

    @property
    def open_batch(self) -> ForwardBatch:
        assert self.launch is not None, "a layer state is used outside a launch"
        return self.launch

    @property
    def whole(self) -> MixedBatch | None:
        """The mixed launch that is open, unless one of its launches is being computed."""
        return self.mixed if self.launch is None else None

    @property
    def opened(self) -> ForwardBatch | MixedBatch:
        return self.open_batch if self.whole is None else self.whole

    @contextmanager
    def computing(self, launch: ForwardBatch) -> Iterator[None]:
        """While this is open, the state is the cache of one launch, which may be part of a mixed one."""
        self.open(launch)
        try:
            yield
        finally:
            self.close()

    def open(self, launch: ForwardBatch) -> None:
        self.launch = launch

    def close(self) -> None:
        self.launch = None

    @property
    def offset(self) -> CacheOffset:
        return self.opened.offset

    @property
    def pieces(self) -> Sequence[TokenSpan]:
        """The sequences that are being computed."""
        return self.opened.pieces

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> AttentionMask | PerBatch:
        if self.whole is None:
            return self._mask(width, return_array, window_size)
        parts = tuple(self._mask_of(part, return_array, window_size) for part in self.whole.parts)
        return None if all(part is None for part in parts) else self._masks(parts, window_size)

    def _mask_of(self, part: ForwardBatch, return_array: bool, window_size: int | None) -> AttentionMask:
        with self.computing(part):
            return self._mask(part.width, return_array, window_size)

    def _masks(self, parts: tuple[AttentionMask, ...], window_size: int | None) -> PerBatch:
        """The masks of the launches of a mixed one."""
        assert self.whole is not None
        return PerBatch(self.whole, parts)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> AttentionMask:
        """Which of its sequence's tokens each token of the open launch sees."""
        raise NotImplementedError

    def pending(self) -> list[mx.array]:
        """What was written to since the last time."""
        raise NotImplementedError


class RecurrentState(LayerState, ArraysCache):
    """Convolution tails, SSM and gated-delta states. An ArraysCache, since models tell recurrent layers by that."""

    kind: LayerKind = "recurrent"
    left_padding = None
    lengths = None  # no launch is padded

    def __init__(self, parts: int, slots: int = 1) -> None:
        LayerState.__init__(self)
        self.cache: list[mx.array | None] = [None] * parts
        self._slots = slots
        self._written: set[int] = set()
        self.gives_earlier_states = False
        """Whether who computes it natively gives earlier states, too."""
        self.wanted = 0  # of these, for how many of a launch's last tokens
        self._earlier: tuple[Sequence[mx.array], list[int]] = ((), [])  # and the slots that they are of

    # What rows ask for.

    def resize(self, slots: int) -> None:
        self._slots = slots
        self.cache = [None if part is None else resize_rows(part, slots) for part in self.cache]
        mx.eval(self.arrays())

    def free(self) -> None:
        """Let go of all slots. The last call."""
        self.cache = [None] * len(self.cache)
        self.forget_earlier()

    def arrays(self) -> list[mx.array]:
        return [part for part in self.cache if part is not None]

    def pending(self) -> list[mx.array]:
        return self.arrays()

    def row(self, slot: int) -> list[mx.array | None]:
        """Copies of the row's state, in memory of their own; None where the model keeps nothing."""
        return [None if part is None else copy_array(part[slot : slot + 1]) for part in self.cache]

    def put(self, slot: int, parts: Sequence[mx.array | None]) -> None:
        """Give a row a state that `row` gave, which stays as it is."""
        for index, part in enumerate(parts):
            if part is not None:
                # A copy: with one slot, what is stored would be all of the state, and states are written in place.
                self._store(index, slice(slot, slot + 1), copy_array(part))

    def earlier(self, slot: int) -> tuple[Sequence[mx.array], int]:
        """What the row's state was without the last tokens of the launch: parts for all its rows, and which it is."""
        parts, slots = self._earlier
        return parts, slots.index(slot)

    def forget_earlier(self) -> None:
        self.wanted, self._earlier = 0, ((), [])

    def _store(self, index: int, slots: slice | mx.array, rows: mx.array) -> None:
        part = self.cache[index]
        if part is None:
            part = mx.zeros((self._slots, *rows.shape[1:]), rows.dtype)
        # A history of the newest tokens grows with its sequence at first; before that lies nothing.
        part, rows = pad_to_length(part, rows), pad_to_length(rows, part)
        part[slots] = rows
        self.cache[index] = part

    # What layers that are computed natively ask for.

    def lend(self, *rows: tuple[int, ...]) -> list[mx.array]:
        """All slots' parts, of these shapes a row, for whoever writes them in place and gives them back."""
        parts = [
            mx.zeros((self._slots, *shape), mx.float32) if part is None else part.astype(mx.float32)
            for part, shape in zip(self.cache, rows, strict=True)
        ]
        self.cache = [None] * len(parts)
        return parts

    def take_back_parts(self, parts: Sequence[mx.array]) -> None:
        """The parts, and behind them the earlier ones, as many as `wanted`."""
        self.cache, earlier = list(parts[: len(self.cache)]), parts[len(self.cache) :]
        self._earlier = (earlier, [slot for _, _, slot, _ in self.pieces] if earlier else [])

    # What mlx-lm's models ask for.

    def open(self, launch: ForwardBatch) -> None:
        self._written = set()
        super().open(launch)

    def __getitem__(self, index: int) -> mx.array | None:
        launch, part = self.open_batch, self.cache[index]
        # Models know a sequence's beginning by the lack of a state, which need not be the same to them as zeros.
        if part is None or (not any(launch.starts) and index not in self._written):
            return None
        return part[_batch_slots(launch)]

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._written.add(index)
        self._store(index, _batch_slots(self.open_batch), value)

    # Models in a pipeline of ranks tie what they send to their last layer's state; ours is `pending`.

    @property
    def keys(self) -> mx.array:
        return mx.zeros(0)

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        pass

    def advance(self, count: int) -> None:
        """Lengths belong to the rows, which are longer when the launch ends."""

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> AttentionMask:
        return None


def _batch_slots(launch: ForwardBatch) -> slice | mx.array:
    """Where its rows' states lie: as they lie, where that is one behind another."""
    slots = [row.slot for row in launch.rows]
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return launch.slots
