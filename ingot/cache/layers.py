"""Live layer states as models see them: the caches that mlx-lm's code calls while a launch is open.

*Append* layers see every key and value, *window* layers the last few: what they hold lies in pages. *Recurrent* layers
keep a state that only moves forward, in a slot for each row. Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import mlx.core as mx

from ingot.cache.arrays import as_long, copied, with_rows
from ingot.cache.groups import PageGroup, Run, Storage
from ingot.cache.launch import Launch, LaunchSpan, Mask, Masks, Mixed, Parted
from ingot.cache.masks import mutually_visible, visible
from ingot.cache.pages import PAGE, Table
from ingot.cache.pools import PageIndex
from ingot.cache.positions import Offset
from ingot.cache.reserved import ReservedStorage
from ingot.cache.slabs import KernelStorage, SlabStorage
from ingot.kernels.paged.checked import CheckedKernels
from ingot.kernels.paged.kernels import Rows as KernelRows
from ingot.kernels.paged.shapes import Shape
from ingot.upstream import ArraysCache, caches

LayerKind = Literal["append", "window", "recurrent"]


class LayerState:
    """What the three kinds share: the launch that they are the caches of."""

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

    @property
    def opened(self) -> Launch | Mixed:
        return self.open_launch if self.whole is None else self.whole

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
        return self.opened.offset

    @property
    def pieces(self) -> Sequence[LaunchSpan]:
        """The sequences that are being computed."""
        return self.opened.pieces

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

    def pending(self) -> list[mx.array]:
        """What was written to since the last time."""
        raise NotImplementedError


class AppendState(LayerState):
    """Keys and values in the pages of a group. They come from `storage`, which is made when the first are written."""

    kind: LayerKind = "append"
    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.group: PageGroup
        self.storage: Storage | None = None
        self.kept: mx.Dtype | None = None
        """What keys and values are rounded to; None: they stay as they are computed."""
        self.kernels: CheckedKernels | None = None
        """Of the GPU that it lives on."""
        self.onlooker: Callable[[Any], None] | None = None
        """Is told what tokens ask of the keys, by attention that is ours, while somebody looks on."""

    @property
    def stored(self) -> Storage:
        assert self.storage is not None, "nothing was written yet"
        return self.storage

    def reserve(self, heads: int, size: int, dtype: mx.Dtype) -> ReservedStorage | None:
        """Storage for the native kernels; None where there is another already. `dtype` is what keys and values are
        computed in."""
        if self.storage is None:
            layers = sum(isinstance(state, AppendState) for state in self.neighbours)
            self.storage = ReservedStorage(self.group, layers, heads, (size, size), self.kept or dtype)
        return self.storage if isinstance(self.storage, ReservedStorage) else None

    def pending(self) -> list[mx.array]:
        return [] if self.storage is None else self.storage.pending()

    # What models ask for.

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        flat = (part.swapaxes(1, 2).flatten(0, 1) for part in (keys, values))
        self.write(*flat)
        return self.keys_and_values()

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Store keys and values [tokens, heads, size] of all tokens of what is open."""
        storage = self.provided(keys.shape[1], (keys.shape[2], values.shape[2]), keys.dtype)
        if isinstance(storage, KernelStorage):
            storage.write_at(keys, values, self.places(storage))
        else:
            storage.write(keys, values, self._runs)

    def provided(self, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> Storage:
        """What is there, or is made for keys and values like these."""
        if self.storage is None:
            self.storage = self._made(heads, sizes, self.kept or dtype)
        return self.storage

    def places(self, storage: KernelStorage) -> mx.array:
        """Where the kernels write each token of what is open."""
        memo, key = self.opened.memo, ("places", self.group.number)
        if key not in memo:
            memo[key] = storage.places(self._runs)
        places: mx.array = memo[key]
        return places

    @property
    def _runs(self) -> list[Run]:
        memo, key = self.opened.memo, ("runs", self.group.number)
        if key not in memo:
            memo[key] = runs_of(self.opened, self.group)
        runs: list[Run] = memo[key]
        return runs

    def _made(self, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> SlabStorage:
        kernel = None if self.kernels is None else self.kernels.attention(Shape(heads, heads, *sizes, PAGE), dtype)
        if self.kernels is None or kernel is None:
            return SlabStorage(self.group, heads, sizes, dtype)
        return KernelStorage(self.group, heads, sizes, dtype, kernel, self.kernels.reads)

    def kernel_rows(self, storage: KernelStorage, mixed: Mixed, numbers: Sequence[int]) -> KernelRows:
        """The rows of some launches of a mixed one, as the kernels take them."""
        key = ("rows", self.group.number, tuple(numbers))
        if key not in mixed.memo:
            parts = [mixed.parts[number] for number in numbers]
            tables = [table for part in parts for table in self.tables(part)]
            lengths = [start + part.width for part in parts for start in part.starts]
            counts = [part.width for part in parts for _ in part.rows]
            mixed.memo[key] = storage.rows(tables, lengths, counts)
        rows: KernelRows = mixed.memo[key]
        return rows

    def tables(self, launch: Launch) -> list[Table]:
        return [row.tables[self.group.number] for row in launch.rows]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values [rows, heads, tokens, size] that the open launch's rows hold, from each one's first page on,
        with zeros behind shorter ones."""
        launch = self.open_launch
        seen = _gathering(launch, self.group)
        read = [self.stored.gathered(index) for index in seen.indexes]
        keys, values = (_stacked(list(parts)) for parts in zip(*read, strict=True))
        keys, values = keys[:, :, : seen.end], values[:, :, : seen.end]
        if seen.shown is not None:
            # What lies behind a row's end is another's, or nothing at all, and may be no number: it must not be met,
            # not even with a weight of zero.
            keys, values = (mx.where(seen.shown, part, mx.zeros((), part.dtype)) for part in (keys, values))
        return keys, values

    def firsts(self, launch: Launch) -> list[int]:
        """The place of the first token that each row holds."""
        return [table.first * PAGE for table in self.tables(launch)]

    def mutual_mask(self, window: int | None) -> mx.array | None:
        """What the tokens of the open launch see, of one row, that all see each other."""
        launch = self.open_launch
        (first,), (start,) = self.firsts(launch), launch.starts
        return mutually_visible(start, first, launch.width, start + launch.width - first, window)

    def _masks(self, parts: tuple[Mask, ...], window_size: int | None) -> Parted:
        assert self.whole is not None
        return Masks(self.whole, parts, window_size)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> Mask:
        launch = self.open_launch
        if not launch.ragged and window_size is None and not return_array:
            return None if width == 1 else "causal"
        return visible(launch.starts, [0] * launch.count, width, max(launch.starts) + width, window_size)

    # DeepSeek 3.2 and MiniMax M3 tie the keys of their index to others, to have them evaluated; ours are `pending`.

    @property
    def keys(self) -> mx.array:
        return mx.zeros(0)

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        pass

    @property
    def values(self) -> mx.array:
        return mx.zeros(0)

    @values.setter
    def values(self, tied: mx.array) -> None:
        pass

    # Llama 4's chunked attention masks for itself and asks its cache to forget; this one need not.

    start_position = 0

    def maybe_trim_front(self) -> None:
        pass


class WindowState(AppendState):
    """Keeps the pages that a row's last `window` tokens lie in."""

    kind: LayerKind = "window"

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window: int = window
        self.asked = window
        """The widest window that the model's masks have shown it."""

    def _masks(self, parts: tuple[Mask, ...], window_size: int | None) -> Parted:
        return super()._masks(parts, window_size or self.window)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> Mask:
        launch = self.open_launch
        window = window_size or self.window
        self.asked = max(self.asked, window)
        firsts = self.firsts(launch)
        end = max(start - first for start, first in zip(launch.starts, firsts, strict=True)) + width
        if launch.count == 1 and end <= window and not return_array:
            return None if width == 1 else "causal"
        return visible(launch.starts, firsts, width, end, window)


class Gathering:
    """The pages that the rows of a launch hold in a group: as many for each as the longest has."""

    def __init__(self, launch: Launch, group: PageGroup) -> None:
        tables = [row.tables[group.number] for row in launch.rows]
        ends = [start + launch.width - table.first * PAGE for start, table in zip(launch.starts, tables, strict=True)]
        self.end, pages = max(ends), max(len(table.numbers) for table in tables)
        self.indexes: list[PageIndex] = [
            group.index([*table.numbers, *[table.numbers[-1]] * (pages - len(table.numbers))], table.coded)
            for table in tables
        ]
        self.shown = None if len(set(ends)) == 1 else _before(ends, self.end)


def _stacked(rows: list[mx.array]) -> mx.array:
    return rows[0] if len(rows) == 1 else mx.concatenate(rows)


def _before(ends: list[int], end: int) -> mx.array:
    return (mx.arange(end) < mx.array(ends)[:, None])[:, None, :, None]


def _gathering(launch: Launch, group: PageGroup) -> Gathering:
    key = ("gathering", group.number)
    if key not in launch.memo:
        launch.memo[key] = Gathering(launch, group)
    gathering: Gathering = launch.memo[key]
    return gathering


def runs_of(opened: Launch | Mixed, group: PageGroup) -> list[Run]:
    """Where the tokens of a launch are written."""
    parts = opened.parts if isinstance(opened, Mixed) else (opened,)
    runs: list[Run] = []
    token = 0
    for part in parts:
        for row, start in zip(part.rows, part.starts, strict=True):
            table, place, end = row.tables[group.number], start, start + part.width
            while place < end:
                count = min(PAGE - place % PAGE, end - place)
                slot = group.slot_of(table.numbers[place // PAGE - table.first])
                runs.append((token, count, slot, place % PAGE))
                token, place = token + count, place + count
    return runs


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
        self.goes_back = False
        """Whether who computes it natively gives earlier states, too."""
        self.wanted = 0  # of these, for how many of a launch's last tokens
        self._earlier: tuple[Sequence[mx.array], list[int]] = ((), [])  # and the slots that they are of

    # What rows ask for.

    def resize(self, slots: int) -> None:
        self._slots = slots
        self.cache = [None if part is None else with_rows(part, slots) for part in self.cache]
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        return [part for part in self.cache if part is not None]

    def pending(self) -> list[mx.array]:
        return self.arrays()

    def row(self, slot: int) -> list[mx.array | None]:
        """Copies of the row's state, in memory of their own; None where the model keeps nothing."""
        return [None if part is None else copied(part[slot : slot + 1]) for part in self.cache]

    def put(self, slot: int, parts: Sequence[mx.array | None]) -> None:
        """Give a row a state that `row` gave, which stays as it is."""
        for index, part in enumerate(parts):
            if part is not None:
                # A copy: with one slot, what is stored would be all of the state, and states are written in place.
                self._store(index, slice(slot, slot + 1), copied(part))

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
        part, rows = as_long(part, rows), as_long(rows, part)
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

    def regain(self, parts: Sequence[mx.array]) -> None:
        """The parts, and behind them the earlier ones, as many as `wanted`."""
        self.cache, earlier = list(parts[: len(self.cache)]), parts[len(self.cache) :]
        self._earlier = (earlier, [slot for _, _, slot, _ in self.pieces] if earlier else [])

    # What mlx-lm's models ask for.

    def open(self, launch: Launch) -> None:
        self._written = set()
        super().open(launch)

    def __getitem__(self, index: int) -> mx.array | None:
        launch, part = self.open_launch, self.cache[index]
        # Models know a sequence's beginning by the lack of a state, which need not be the same to them as zeros.
        if part is None or (not any(launch.starts) and index not in self._written):
            return None
        return part[_slots_of(launch)]

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._written.add(index)
        self._store(index, _slots_of(self.open_launch), value)

    def advance(self, count: int) -> None:
        """Lengths belong to the rows, which are longer when the launch ends."""

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> Mask:
        return None


def _slots_of(launch: Launch) -> slice | mx.array:
    """Where its rows' states lie: as they lie, where that is one behind another."""
    slots = [row.slot for row in launch.rows]
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return launch.slots


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


def state_for(asked: Any, margin: int = 0) -> LayerState:
    """Our live state for a cache that mlx-lm's `make_cache` asks for; KeyError where there is none.

    Windows are `margin` tokens wider than asked for.
    """
    return _FACTORIES[type(asked)](asked, margin)


def _group(asked: Any, margin: int) -> GroupState:
    return GroupState([state_for(part, margin) for part in asked.caches])


_FACTORIES: dict[type, Callable[[Any, int], LayerState]] = {
    caches.KVCache: lambda asked, margin: AppendState(),
    caches.ChunkedKVCache: lambda asked, margin: AppendState(),
    caches.RotatingKVCache: lambda asked, margin: WindowState(asked.max_size + margin),
    caches.ArraysCache: lambda asked, margin: RecurrentState(len(asked.cache)),
    caches.CacheList: _group,
}
