"""Live layer states: what running sequences have computed, in slots, for three kinds of layer.

*Append* holds every key and value, *window* the last few, *recurrent* a state that only moves forward. `Slots` owns
one state per layer and a length per slot. A launch runs the model over consecutive slots, each with its own number
of tokens before it; while it is open, the states are the caches that mlx-lm's models call.

Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import mlx.core as mx

from ingot.cache.arrays import as_long, assign, blank, copied, empty_like, resized, with_rows
from ingot.cache.footprint import CAPACITY_STEP, window_capacity
from ingot.cache.launch import Launch, LaunchSpan, Mask, Masks, Mixed, Parted
from ingot.cache.positions import Offset
from ingot.upstream import ArraysCache, caches

LayerKind = Literal["append", "window", "recurrent"]


class LayerState:
    """What the three kinds share: the launch they are part of and how to move a row from slot to slot."""

    kind: LayerKind

    def __init__(self) -> None:
        self.launch: Launch | None = None
        self.mixed: Mixed | None = None
        self.neighbours: Sequence[Any] = ()  # all layers' states, this one among them

    @property
    def open_launch(self) -> Launch:
        assert self.launch is not None, "a layer state is used outside a launch"
        return self.launch

    @property
    def whole(self) -> Mixed | None:
        """The mixed launch that is open, unless one of its launches is being computed."""
        return self.mixed if self.launch is None else None

    @contextmanager
    def computing(self, launch: Launch) -> Iterator[None]:
        """While this is open, the state is the cache of one launch, which may be part of a mixed one."""
        self.open(launch)
        try:
            yield
        finally:
            self.close()

    def open(self, launch: Launch) -> None:
        self.launch = launch

    def close(self) -> None:
        self.launch = None

    @property
    def offset(self) -> Offset:
        return self.open_launch.offset if self.whole is None else self.whole.offset

    @property
    def pieces(self) -> Sequence[LaunchSpan]:
        """The sequences that are being computed, without padding."""
        return self.open_launch.pieces if self.whole is None else self.whole.pieces

    def make_mask(self, width: int, return_array: bool = False, window_size: int | None = None) -> Mask | Parted:
        if self.whole is None:
            return self._mask(width, return_array, window_size)
        parts = tuple(self._mask_of(part, return_array, window_size) for part in self.whole.parts)
        return None if all(part is None for part in parts) else self._masks(parts, window_size)

    def _mask_of(self, part: Launch, return_array: bool, window_size: int | None) -> Mask:
        with self.computing(part):
            return self._mask(part.width, return_array, window_size)

    def _masks(self, parts: tuple[Mask, ...], window_size: int | None) -> Parted:
        """The masks of the launches of a mixed one."""
        assert self.whole is not None
        return Parted(self.whole, parts)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> Mask:
        """Which of its sequence's tokens each token of the open launch sees."""
        raise NotImplementedError

    def resize(self, slots: int, capacity: int) -> None:
        """Make room for `slots` rows of `capacity` tokens; rows below `slots` keep what they hold."""
        raise NotImplementedError

    def lifted(self, rows: list[int], length: int) -> list[mx.array]:
        """Copies of what rows of at most `length` tokens hold, in memory of their own."""
        raise NotImplementedError

    def laid(self, rows: list[int], copies: list[mx.array], sources: list[int]) -> None:
        """Give rows what was lifted from others."""
        raise NotImplementedError

    def clear(self, slot: int, written: int) -> None:
        """Make `slot` hold an empty sequence, and nothing of the one whose first `written` tokens were written there:
        whoever sits there next must find no trace of it, by whatever mistake."""
        raise NotImplementedError

    def prepare(self, launch: Launch) -> None:
        """Called before the model runs, once a launch."""

    def arrays(self) -> list[mx.array]:
        raise NotImplementedError


class AppendState(LayerState):
    kind: LayerKind = "append"

    def __init__(self, slots: int = 1, capacity: int = CAPACITY_STEP) -> None:
        super().__init__()
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.kept: mx.Dtype | None = None
        """What keys and values are rounded to; None: they stay as they are computed."""
        self._slots, self._capacity = slots, capacity

    # What slots ask for.

    def resize(self, slots: int, capacity: int) -> None:
        self._slots, self._capacity = slots, capacity
        if self.keys is not None and self.values is not None:
            self.keys = resized(self.keys, slots, capacity)
            self.values = resized(self.values, slots, capacity)
            # One layer at a time: old and new of one layer are alive together, never of all.
            mx.eval(self.keys, self.values)

    def lifted(self, rows: list[int], length: int) -> list[mx.array]:
        return [copied(array[row : row + 1, :, :length]) for array in self.arrays() if length for row in rows]

    def laid(self, rows: list[int], copies: list[mx.array], sources: list[int]) -> None:
        places = [(array, row) for array in self.arrays() if copies for row in rows]
        for (array, row), own in zip(places, copies, strict=True):
            array[row : row + 1, :, : own.shape[2]] = own

    def clear(self, slot: int, written: int) -> None:
        for array in self.arrays():
            blank(array, slot, written)

    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    def oldest(self, slot: int, length: int) -> int:
        """The first token that a row of this length holds and can still see."""
        return 0

    def tokens(self, slot: int, begin: int, end: int) -> list[mx.array]:
        """Keys and values of a row's tokens [begin, end), as views."""
        return [array[slot : slot + 1, :, begin:end] for array in self.arrays()]

    def begin_row(self, slot: int, oldest: int) -> None:
        """The row is about to be given tokens from `oldest` on."""

    def put(self, slot: int, begin: int, arrays: Sequence[mx.array]) -> None:
        """Give a row keys and values computed earlier, of consecutive tokens from `begin` on."""
        for array, tokens in zip(self._made(arrays[0], arrays[1]), arrays, strict=True):
            assign(array, slot, begin, tokens)

    # What layers that are computed together ask for.

    def allocate(self, heads: int, size: int, dtype: mx.Dtype) -> None:
        """See that there are arrays, before anything was written; `dtype` is what keys and values are computed in."""
        if self.keys is None or self.values is None:
            sample = mx.zeros((1, heads, 1, size), dtype)
            self._made(sample, sample)

    def _made(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """All keys and values, made for ones like these if there are none yet."""
        if self.keys is None or self.values is None:
            self.keys = empty_like(keys, self._slots, self._capacity, self.kept)
            self.values = empty_like(values, self._slots, self._capacity, self.kept)
        return self.keys, self.values

    def release(self) -> None:
        """Let go of the arrays: whoever took them writes them in place, and gives them back."""
        self.keys = self.values = None

    # What models ask for.

    def _begins(self) -> Sequence[int]:
        """Where each row's new tokens go in the buffer."""
        return self.open_launch.starts

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.write(keys, values)
        return self.keys_and_values()

    def write(self, keys: mx.array, values: mx.array) -> None:
        all_keys, all_values = self._made(keys, values)
        begins = self._begins()
        _write(all_keys, keys, self.open_launch, begins)
        _write(all_values, values, self.open_launch, begins)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        launch = self.open_launch
        assert self.keys is not None and self.values is not None
        end = max(self._begins()) + launch.width
        rows = slice(launch.first, launch.last)
        return self.keys[rows, :, :end], self.values[rows, :, :end]

    def place(self, slot: int, position: int) -> int:
        """Where in the buffer a token of a row stands."""
        return position

    def _masks(self, parts: tuple[Mask, ...], window_size: int | None) -> Parted:
        assert self.whole is not None
        return Masks(self.whole, parts, window_size)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> Mask:
        launch = self.open_launch
        if not launch.ragged and window_size is None and not return_array:
            return None if width == 1 else "causal"
        starts = launch.starts
        return _visible(starts, [0] * launch.rows, width, max(starts) + width, window_size)

    # Llama 4's chunked attention masks for itself and asks its cache to forget; this one need not.

    start_position = 0

    def maybe_trim_front(self) -> None:
        pass


class WindowState(AppendState):
    """Keeps a row's last tokens in order; `_first[slot]` is the position of the oldest one in the buffer."""

    kind: LayerKind = "window"

    def __init__(self, window: int, widest: int, slots: int = 1, capacity: int = CAPACITY_STEP) -> None:
        super().__init__(slots, window_capacity(window, widest, capacity))
        self.window, self.widest = window, widest
        self.asked = window
        """The widest window that the model's masks have shown it."""
        self._first = [0] * slots

    def resize(self, slots: int, capacity: int) -> None:
        super().resize(slots, window_capacity(self.window, self.widest, capacity))
        self._first = (self._first + [0] * slots)[:slots]

    def clear(self, slot: int, written: int) -> None:
        super().clear(slot, min(written, self._capacity))
        self._first[slot] = 0

    def laid(self, rows: list[int], copies: list[mx.array], sources: list[int]) -> None:
        super().laid(rows, copies, sources)
        for row, first in zip(rows, [self._first[source] for source in sources], strict=True):
            self._first[row] = first

    def oldest(self, slot: int, length: int) -> int:
        return max(self._first[slot], length - self.window + 1)

    def tokens(self, slot: int, begin: int, end: int) -> list[mx.array]:
        return super().tokens(slot, begin - self._first[slot], end - self._first[slot])

    def begin_row(self, slot: int, oldest: int) -> None:
        self._first[slot] = oldest

    def put(self, slot: int, begin: int, arrays: Sequence[mx.array]) -> None:
        super().put(slot, begin - self._first[slot], arrays)

    def prepare(self, launch: Launch) -> None:
        for slot, start in zip(range(launch.first, launch.last), launch.starts, strict=True):
            if start - self._first[slot] + launch.width > self._capacity:
                self._forget(slot, start)

    def _forget(self, slot: int, length: int) -> None:
        """Move the part of the row that a later token can still see to the front of its buffer."""
        keep = min(length, self.window - 1)
        begin = length - keep - self._first[slot]
        for array in self.arrays():
            array[slot, :, :keep] = array[slot, :, begin : begin + keep]
        self._first[slot] = length - keep

    def _firsts(self) -> list[int]:
        return self._first[self.open_launch.first : self.open_launch.last]

    def _begins(self) -> Sequence[int]:
        launch = self.open_launch
        return [start - first for start, first in zip(launch.starts, self._firsts(), strict=True)]

    def place(self, slot: int, position: int) -> int:
        return position - self._first[slot]

    def _masks(self, parts: tuple[Mask, ...], window_size: int | None) -> Parted:
        return super()._masks(parts, window_size or self.window)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> Mask:
        launch = self.open_launch
        window = window_size or self.window
        self.asked = max(self.asked, window)
        end = max(self._begins()) + width
        if launch.rows == 1 and end <= window and not return_array:
            return None if width == 1 else "causal"
        return _visible(launch.starts, self._firsts(), width, end, window)


class RecurrentState(LayerState, ArraysCache):
    """Convolution tails, SSM and gated-delta states. An ArraysCache, since models tell recurrent layers by that."""

    kind: LayerKind = "recurrent"
    left_padding = None

    def __init__(self, parts: int, slots: int = 1) -> None:
        LayerState.__init__(self)
        self.cache: list[mx.array | None] = [None] * parts
        self._slots = slots
        self._written: set[int] = set()

    # What slots ask for.

    def resize(self, slots: int, capacity: int) -> None:
        self._slots = slots
        self.cache = [None if part is None else with_rows(part, slots) for part in self.cache]
        mx.eval(self.arrays())

    def lifted(self, rows: list[int], length: int) -> list[mx.array]:
        return [copied(part[row : row + 1]) for part in self.arrays() for row in rows]

    def laid(self, rows: list[int], copies: list[mx.array], sources: list[int]) -> None:
        for (part, row), own in zip(((part, row) for part in self.arrays() for row in rows), copies, strict=True):
            part[row : row + 1] = own

    def clear(self, slot: int, written: int) -> None:
        for part in self.arrays():
            part[slot] = mx.zeros_like(part[slot])

    def arrays(self) -> list[mx.array]:
        return [part for part in self.cache if part is not None]

    def row(self, slot: int) -> list[mx.array | None]:
        """Copies of the row's state, in memory of their own; None where the model keeps nothing."""
        return [None if part is None else copied(part[slot : slot + 1]) for part in self.cache]

    def put(self, slot: int, parts: Sequence[mx.array | None]) -> None:
        """Give a row a state that `row` gave, which stays as it is."""
        for index, part in enumerate(parts):
            if part is not None:
                # A copy: with one slot, what is stored would be all of the state, and states are written in place.
                self._store(index, slot, copied(part))

    def _store(self, index: int, slot: int, rows: mx.array) -> None:
        part = self.cache[index]
        if part is None:
            part = mx.zeros((self._slots, *rows.shape[1:]), rows.dtype)
        # A history of the newest tokens grows with its sequence at first; before that lies nothing.
        part, rows = as_long(part, rows), as_long(rows, part)
        part[slot : slot + rows.shape[0]] = rows
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

    def regain(self, parts: Sequence[mx.array]) -> None:
        self.cache = list(parts)

    # What mlx-lm's models ask for.

    def open(self, launch: Launch) -> None:
        self._written = set()
        super().open(launch)

    def __getitem__(self, index: int) -> mx.array | None:
        launch, part = self.open_launch, self.cache[index]
        # Models know a sequence's beginning by the lack of a state, which need not be the same to them as zeros.
        if part is None or (not any(launch.starts) and index not in self._written):
            return None
        return part[launch.first : launch.last]

    def __setitem__(self, index: int, value: mx.array) -> None:
        launch = self.open_launch
        self._written.add(index)
        if launch.rows == self._slots:
            self.cache[index] = value
        else:
            self._store(index, launch.first, value)

    @property
    def lengths(self) -> mx.array | None:
        launch = self.open_launch
        return None if min(launch.valid) == launch.width else mx.array(launch.valid)

    def advance(self, count: int) -> None:
        """Lengths belong to the slots, which advance when the launch ends."""

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> Mask:
        lengths = self.lengths
        return None if lengths is None else mx.arange(width) < lengths[:, None]


class GroupState(LayerState):
    """Several states of one layer, as models with two mixers in a layer ask for."""

    def __init__(self, parts: list[LayerState]) -> None:
        super().__init__()
        self.caches = parts
        self.kind = "recurrent" if any(part.kind == "recurrent" for part in parts) else parts[0].kind

    @property
    def whole(self) -> Mixed | None:
        return self.caches[0].whole

    def open(self, launch: Launch) -> None:
        for part in self.caches:
            part.open(launch)

    def close(self) -> None:
        for part in self.caches:
            part.close()

    def __getitem__(self, index: int) -> LayerState:
        return self.caches[index]


def state_for(asked: Any, widest: int, margin: int = 0) -> LayerState:
    """Our live state for a cache that mlx-lm's `make_cache` asks for; KeyError where there is none.

    Windows are `margin` tokens wider than asked for.
    """
    return _FACTORIES[type(asked)](asked, widest, margin)


def _group(asked: Any, widest: int, margin: int) -> GroupState:
    return GroupState([state_for(part, widest, margin) for part in asked.caches])


_FACTORIES: dict[type, Callable[[Any, int, int], LayerState]] = {
    caches.KVCache: lambda asked, widest, margin: AppendState(),
    caches.ChunkedKVCache: lambda asked, widest, margin: AppendState(),
    caches.RotatingKVCache: lambda asked, widest, margin: WindowState(asked.max_size + margin, widest),
    caches.ArraysCache: lambda asked, widest, margin: RecurrentState(len(asked.cache)),
    caches.CacheList: _group,
}


def _write(arena: mx.array, update: mx.array, launch: Launch, begins: Sequence[int]) -> None:
    """Put each row's new tokens behind the ones it has. In place: the arena has no other owner."""
    width = update.shape[2]
    if len(set(begins)) == 1:
        arena[launch.first : launch.last, :, begins[0] : begins[0] + width] = update
    elif width == 1:
        places = launch.start_index if begins is launch.starts else mx.array(list(begins))
        arena[launch.row_index, :, places] = update[:, :, 0]
    else:
        for row, begin in enumerate(begins):
            arena[launch.first + row, :, begin : begin + width] = update[row]


def _visible(starts: Sequence[int], firsts: Sequence[int], width: int, end: int, window: int | None) -> mx.array:
    """[rows, 1, width, end]: True where a token may see a key. Key j of row i stands at position firsts[i] + j.

    Rows that see the same share one, as some models can only broadcast a mask without rows.
    """
    if len(set(zip(starts, firsts, strict=True))) == 1:
        starts, firsts = starts[:1], firsts[:1]
    token = (mx.array(list(starts))[:, None] + mx.arange(width))[:, None, :, None]
    key = (mx.array(list(firsts))[:, None] + mx.arange(end))[:, None, None, :]
    mask = key <= token
    return mask if window is None else mask & (key > token - window)
