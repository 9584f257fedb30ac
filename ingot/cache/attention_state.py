"""Live layer states as models see them: the caches that mlx-lm's code calls while a launch is open.

*Append* layers see every key and value, *window* layers the last few: what they hold lies in pages. *Recurrent* layers
keep a state that only moves forward, in a slot for each row. Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx

from ingot.cache.forward_batch import Launch, Mask, Masks, Mixed, Parted
from ingot.cache.kv_storage import KernelStorage, SlabStorage
from ingot.cache.layer_state import LayerKind, LayerState
from ingot.cache.masks import mutually_visible, visible
from ingot.cache.page_groups import PageGroup, Run, Storage
from ingot.cache.pages import PAGE, Table
from ingot.cache.pools import PageIndex
from ingot.cache.recurrent_state import RecurrentState
from ingot.cache.reserved import ReservedStorage
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.native import KernelChoice
from ingot.kernels.paged_attention.inputs import Rows as KernelRows
from ingot.kernels.paged_attention.shapes import Shape
from ingot.upstream import caches


class Choice(Protocol):
    """Which pages tokens see, where that is not all of them: see `PageChoice`."""

    @property
    def limits(self) -> KernelChoice:
        """What native attention chooses by."""

    def __call__(self, queries: mx.array, scale: float, start: int) -> mx.array | None: ...


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
        self.choice: Choice | None = None
        """Says which pages of its only row tokens see, by what some of them ask, while somebody reads so."""
        self.shown: mx.array | None = None
        """What it said of the launch that is being computed; None: they see all, or native attention chooses."""

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
        return KernelStorage(self.group, heads, sizes, dtype, kernel, self.kernels)

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
        return rows if self.shown is None else rows.narrowed(self.shown, PAGE)

    @contextmanager
    def choosing(self, queries: mx.array, scale: float, mixed: Mixed) -> Iterator[None]:
        """While this is open, the tokens of a launch of one row, some of which ask so, see what is chosen for them."""
        assert self.choice is not None
        [[start]] = [part.starts for part in mixed.parts]
        self.shown = self.choice(queries, scale, start)
        try:
            yield
        finally:
            self.shown = None

    def seen(self, table: Table, start: int) -> tuple[Sequence[int], int]:
        """The pages of a row that tokens from place `start` on see, their own among them, and the place that this one
        has there."""
        if self.shown is None:
            return table.numbers, start - table.first * PAGE
        chosen: list[int] = self.shown.tolist()  # type: ignore[assignment]
        own = start // PAGE
        return [*(table.numbers[page] for page in chosen), *table.numbers[own:]], len(chosen) * PAGE + start % PAGE

    def tables(self, launch: Launch) -> list[Table]:
        return [row.tables[self.group.number] for row in launch.rows]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values [rows, heads, tokens, size] that the open launch's rows hold, from each one's first page on,
        with zeros behind shorter ones."""
        launch = self.open_launch
        if self.shown is not None:
            return self._shown_keys_and_values(launch)
        seen = _gathering(launch, self.group)
        read = [self.stored.gathered(index) for index in seen.indexes]
        keys, values = (_stacked(list(parts)) for parts in zip(*read, strict=True))
        keys, values = keys[:, :, : seen.end], values[:, :, : seen.end]
        if seen.shown is not None:
            # What lies behind a row's end is another's, or nothing at all, and may be no number: it must not be met,
            # not even with a weight of zero.
            keys, values = (mx.where(seen.shown, part, mx.zeros((), part.dtype)) for part in (keys, values))
        return keys, values

    def _shown_keys_and_values(self, launch: Launch) -> tuple[mx.array, mx.array]:
        [table], [start] = self.tables(launch), launch.starts
        pages, place = self.seen(table, start)
        keys, values = self.stored.gathered(self.group.index(pages, 0))
        end = place + launch.width
        return keys[:, :, :end], values[:, :, :end]

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


def parts_of(layers: Iterable[LayerState]) -> list[LayerState]:
    """The states of all layers, those of one that has several among them."""
    return [part for layer in layers for part in (layer.caches if isinstance(layer, GroupState) else [layer])]


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
