"""Live layer states as models see them: the caches that mlx-lm's code calls while a forward batch is open.

*Append* layers see every key and value, *window* layers the last few: what they hold lies in pages. `make_layer_state`
gives the state for each of mlx-lm's caches.

For long prompts, a layer's attention may see only some of the pages before it (`PageSelection`). A page is known by the
mean of its keys. It is worth the largest share of attention that any of the tokens that ask, in any head, would give to
that; the first page, which attention rests on, and the newest are always seen. Where attention is native, it chooses so
by itself (`native/src/choice.h`). Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx

from ingot.cache.forward_batch import (
    AttentionMask,
    BatchMasks,
    ForwardBatch,
    MixedBatch,
    PerBatch,
    Row,
    bidirectional_mask,
    causal_mask,
)
from ingot.cache.kv_storage import KernelStorage, ReservedStorage, SlabStorage
from ingot.cache.layer_state import LayerKind, LayerState, RecurrentState
from ingot.cache.page_groups import KVStorage, PageGroup, PageIndex, TokenRun
from ingot.cache.pages import PAGE, PageTable
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.cpu.native import PageChoiceLimits
from ingot.kernels.paged_attention.inputs import KernelRows
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.upstream import caches


class PageChooser(Protocol):
    """Which pages tokens see, where that is not all of them: see `PageChoice`."""

    @property
    def limits(self) -> PageChoiceLimits:
        """What native attention chooses by."""

    def __call__(self, queries: mx.array, scale: float, start: int) -> mx.array | None: ...


class AppendState(LayerState):
    """Keys and values in the pages of a group. They come from `storage`, which is made when the first are written."""

    kind: LayerKind = "append"
    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.group: PageGroup
        self.storage: KVStorage | None = None
        self.kept: mx.Dtype | None = None
        """What keys and values are rounded to; None: they stay as they are computed."""
        self.kernels: CheckedKernels | None = None
        """Of the GPU that it lives on."""
        self.query_observer: Callable[[Any], None] | None = None
        """Is told what tokens ask of the keys, by attention that is ours, while somebody looks on."""
        self.choice: PageChooser | None = None
        """Says which pages of its only row tokens see, by what some of them ask, while somebody reads so."""
        self.shown: mx.array | None = None
        """What it said of the launch that is being computed; None: they see all, or native attention chooses."""

    @property
    def stored(self) -> KVStorage:
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

    def provided(self, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> KVStorage:
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
    def _runs(self) -> list[TokenRun]:
        memo, key = self.opened.memo, ("runs", self.group.number)
        if key not in memo:
            memo[key] = token_runs(self.opened, self.group)
        runs: list[TokenRun] = memo[key]
        return runs

    def _made(self, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> SlabStorage:
        kernel = (
            None if self.kernels is None else self.kernels.attention(AttentionShape(heads, heads, *sizes, PAGE), dtype)
        )
        if self.kernels is None or kernel is None:
            return SlabStorage(self.group, heads, sizes, dtype)
        return KernelStorage(self.group, heads, sizes, dtype, kernel, self.kernels)

    def kernel_rows(self, storage: KernelStorage, mixed: MixedBatch, numbers: Sequence[int]) -> KernelRows:
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
    def selecting_pages(self, queries: mx.array, scale: float, mixed: MixedBatch) -> Iterator[None]:
        """While this is open, the tokens of a launch of one row, some of which ask so, see what is chosen for them."""
        assert self.choice is not None
        [[start]] = [part.starts for part in mixed.parts]
        self.shown = self.choice(queries, scale, start)
        try:
            yield
        finally:
            self.shown = None

    def seen(self, table: PageTable, start: int) -> tuple[Sequence[int], int]:
        """The pages of a row that tokens from place `start` on see, their own among them, and the place that this one
        has there."""
        if self.shown is None:
            return table.numbers, start - table.first * PAGE
        chosen: list[int] = self.shown.tolist()  # type: ignore[assignment]
        own = start // PAGE
        return [*(table.numbers[page] for page in chosen), *table.numbers[own:]], len(chosen) * PAGE + start % PAGE

    def tables(self, launch: ForwardBatch) -> list[PageTable]:
        return [row.tables[self.group.number] for row in launch.rows]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values [rows, heads, tokens, size] that the open launch's rows hold, from each one's first page on,
        with zeros behind shorter ones."""
        launch = self.open_batch
        if self.shown is not None:
            return self._shown_keys_and_values(launch)
        seen = _page_gathering(launch, self.group)
        read = [self.stored.gathered(index) for index in seen.indexes]
        keys, values = (_stack_rows(list(parts)) for parts in zip(*read, strict=True))
        keys, values = keys[:, :, : seen.end], values[:, :, : seen.end]
        if seen.shown is not None:
            # What lies behind a row's end is another's, or nothing at all, and may be no number: it must not be met,
            # not even with a weight of zero.
            keys, values = (mx.where(seen.shown, part, mx.zeros((), part.dtype)) for part in (keys, values))
        return keys, values

    def _shown_keys_and_values(self, launch: ForwardBatch) -> tuple[mx.array, mx.array]:
        [table], [start] = self.tables(launch), launch.starts
        pages, place = self.seen(table, start)
        keys, values = self.stored.gathered(self.group.index(pages, 0))
        end = place + launch.width
        return keys[:, :, :end], values[:, :, :end]

    def firsts(self, launch: ForwardBatch) -> list[int]:
        """The place of the first token that each row holds."""
        return [table.first * PAGE for table in self.tables(launch)]

    def bidirectional_mask(self, window: int | None) -> mx.array | None:
        """What the tokens of the open launch see, of one row, that all see each other."""
        launch = self.open_batch
        (first,), (start,) = self.firsts(launch), launch.starts
        return bidirectional_mask(start, first, launch.width, start + launch.width - first, window)

    def _masks(self, parts: tuple[AttentionMask, ...], window_size: int | None) -> PerBatch:
        assert self.whole is not None
        return BatchMasks(self.whole, parts, window_size)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> AttentionMask:
        launch = self.open_batch
        if not launch.ragged and window_size is None and not return_array:
            return None if width == 1 else "causal"
        return causal_mask(launch.starts, [0] * launch.count, width, max(launch.starts) + width, window_size)

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

    def _masks(self, parts: tuple[AttentionMask, ...], window_size: int | None) -> PerBatch:
        return super()._masks(parts, window_size or self.window)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> AttentionMask:
        launch = self.open_batch
        window = window_size or self.window
        self.asked = max(self.asked, window)
        firsts = self.firsts(launch)
        end = max(start - first for start, first in zip(launch.starts, firsts, strict=True)) + width
        if launch.count == 1 and end <= window and not return_array:
            return None if width == 1 else "causal"
        return causal_mask(launch.starts, firsts, width, end, window)


class PageGathering:
    """The pages that the rows of a launch hold in a group: as many for each as the longest has."""

    def __init__(self, launch: ForwardBatch, group: PageGroup) -> None:
        tables = [row.tables[group.number] for row in launch.rows]
        ends = [start + launch.width - table.first * PAGE for start, table in zip(launch.starts, tables, strict=True)]
        self.end, pages = max(ends), max(len(table.numbers) for table in tables)
        self.indexes: list[PageIndex] = [
            group.index([*table.numbers, *[table.numbers[-1]] * (pages - len(table.numbers))], table.coded)
            for table in tables
        ]
        self.shown = None if len(set(ends)) == 1 else _valid_places(ends, self.end)


def _stack_rows(rows: list[mx.array]) -> mx.array:
    return rows[0] if len(rows) == 1 else mx.concatenate(rows)


def _valid_places(ends: list[int], end: int) -> mx.array:
    return (mx.arange(end) < mx.array(ends)[:, None])[:, None, :, None]


def _page_gathering(launch: ForwardBatch, group: PageGroup) -> PageGathering:
    key = ("gathering", group.number)
    if key not in launch.memo:
        launch.memo[key] = PageGathering(launch, group)
    gathering: PageGathering = launch.memo[key]
    return gathering


def token_runs(opened: ForwardBatch | MixedBatch, group: PageGroup) -> list[TokenRun]:
    """Where the tokens of a launch are written."""
    parts = opened.parts if isinstance(opened, MixedBatch) else (opened,)
    runs: list[TokenRun] = []
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


class CompositeState(LayerState):
    """Several states of one layer, as models with two mixers in a layer ask for."""

    def __init__(self, parts: list[LayerState]) -> None:
        super().__init__()
        self.caches = parts
        self.kind = "recurrent" if any(part.kind == "recurrent" for part in parts) else parts[0].kind

    @property
    def whole(self) -> MixedBatch | None:
        return self.caches[0].whole

    def open(self, launch: ForwardBatch) -> None:
        for part in self.caches:
            part.open(launch)

    def close(self) -> None:
        for part in self.caches:
            part.close()

    def __getitem__(self, index: int) -> LayerState:
        return self.caches[index]


def flatten_states(layers: Iterable[LayerState]) -> list[LayerState]:
    """The states of all layers, those of one that has several among them."""
    return [part for layer in layers for part in (layer.caches if isinstance(layer, CompositeState) else [layer])]


def make_layer_state(asked: Any, margin: int = 0) -> LayerState:
    """Our live state for a cache that mlx-lm's `make_cache` asks for; KeyError where there is none.

    Windows are `margin` tokens wider than asked for.
    """
    return _STATE_FACTORIES[type(asked)](asked, margin)


def _make_composite(asked: Any, margin: int) -> CompositeState:
    return CompositeState([make_layer_state(part, margin) for part in asked.caches])


_STATE_FACTORIES: dict[type, Callable[[Any, int], LayerState]] = {
    caches.KVCache: lambda asked, margin: AppendState(),
    caches.ChunkedKVCache: lambda asked, margin: AppendState(),
    caches.RotatingKVCache: lambda asked, margin: WindowState(asked.max_size + margin),
    caches.ArraysCache: lambda asked, margin: RecurrentState(len(asked.cache)),
    caches.CacheList: _make_composite,
}


SPARSE_FROM_TOKENS = 16384
"""Tokens behind which not all of them are seen any more."""
SEEN_PAGES = 8192 // PAGE
"""Pages that are seen instead."""
NEWEST_PAGES = 2048 // PAGE
"""Of them, those right before the tokens that ask."""
QUERY_STRIDE = 64
"""Of so many tokens that do not see all pages, one asks which of them it is to be."""


class PageSelection:
    """One layer's, of a row that is being read."""

    def __init__(self, state: AppendState, row: Row) -> None:
        self._state, self._table = state, row.tables[state.group.number]
        self._means: mx.array | None = None  # [heads, pages, size]

    def narrows(self, start: int) -> bool:
        """Whether tokens from place `start` on do not see all."""
        return start > SPARSE_FROM_TOKENS and start // PAGE > SEEN_PAGES and not self._table.coded

    @property
    def limits(self) -> PageChoiceLimits:
        return SEEN_PAGES, NEWEST_PAGES, QUERY_STRIDE

    def __call__(self, queries: mx.array, scale: float, start: int) -> mx.array | None:
        """The pages among those that are full at place `start` which tokens that ask [tokens, heads, size] see: int32
        places in the row's table, in order. None: all of them."""
        full = start // PAGE
        if not self.narrows(start):
            return None
        means = self._known(full)
        heads, _, size = means.shape
        asked = queries.astype(mx.float32).swapaxes(0, 1).reshape(heads, -1, size)
        worth = mx.softmax(scale * (asked @ means.swapaxes(-1, -2)), axis=-1).max(axis=(0, 1))
        places = mx.arange(full)
        worth = mx.where((places == 0) | (places >= full - NEWEST_PAGES), 2.0, worth)
        return mx.sort(mx.argpartition(-worth, SEEN_PAGES)[:SEEN_PAGES]).astype(mx.int32)

    def _known(self, full: int) -> mx.array:
        """The means of so many pages, of which those that are new are read."""
        known = 0 if self._means is None else self._means.shape[1]
        if known < full:
            index = self._state.group.index(self._table.numbers[known:full], 0)
            keys, _ = self._state.stored.gathered(index)
            new = keys[0].reshape(keys.shape[1], full - known, PAGE, -1).astype(mx.float32).mean(axis=2)
            self._means = new if self._means is None else mx.concatenate([self._means, new], axis=1)
        assert self._means is not None
        return self._means[:, :full]
