"""Live states of attention layers: the caches that mlx-lm's code calls while a forward batch is open.

*Append* layers see every key and value, *window* layers the last few; both are stored in pages. `make_layer_states`
returns the states for a model's caches.

For long prompts, attention may be limited to some of the earlier pages (`PageSelection`). A page is represented by the
mean of its keys, and scored by the largest attention weight that any sampled query, in any head, gives to that mean.
The first page (the attention sink) and the newest ones are always selected. Native attention selects pages itself
(`native/src/choice.h`). Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from ingot.cache.arrays import concatenate
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
from ingot.cache.own_caches import OwnCacheState, RowCaches
from ingot.cache.page_groups import KVStorage, PageGroup, PageIndex, TokenRun
from ingot.cache.pages import PAGE, PageTable
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.cpu.native import PageChoiceLimits
from ingot.kernels.paged_attention.inputs import KernelRows
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.upstream import CACHE_MODULES

T = TypeVar("T")


class PageChooser(Protocol):
    """Selects the pages that tokens see: see `PageSelection`."""

    @property
    def limits(self) -> PageChoiceLimits:
        """For native attention, which selects pages itself."""

    def __call__(self, queries: mx.array, scale: float, start: int) -> mx.array | None: ...


@dataclass(frozen=True, slots=True)
class EqualHeads:
    """Stores keys and values as heads of one size, as the native kernels read them: values end in zeros. In latent
    attention a model writes latents and what is rotated; both together are stored as keys, and latents as values."""

    value_size: int
    latent: bool = False

    def pack(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.latent:
            keys, values = mx.concatenate([keys, values], axis=-1), keys
        missing = keys.shape[-1] - values.shape[-1]
        return keys, mx.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, missing)])

    def unpack(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.latent:
            return keys[..., : self.value_size], keys[..., self.value_size :]
        return keys, values[..., : self.value_size]


@dataclass(frozen=True, slots=True)
class SplitKeys:
    """Stores keys alone, which no attention reads: one half of each as a key, the other as a value."""

    def pack(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        one, other = mx.split(keys, 2, axis=-1)
        return one, other

    def unpack(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        whole = mx.concatenate([keys, values], axis=-1)
        return whole, whole


KVLayout = EqualHeads | SplitKeys


class AppendState(LayerState):
    """Keys and values in the pages of a group. `storage` is made when the first are written."""

    kind: LayerKind = "append"
    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.group: PageGroup
        self.storage: KVStorage | None = None
        self.kept: mx.Dtype | None = None
        """The dtype that keys and values are stored in; None: the one they are computed in."""
        self.layout: KVLayout | None = None
        """How keys and values are stored; None: as the model writes them."""
        self.kernels: CheckedKernels | None = None
        """The GPU's kernels."""
        self.query_observer: Callable[[Any], None] | None = None
        """Called with the queries of each batch by our attention."""
        self.choice: PageChooser | None = None
        """Selects the pages that the tokens of the only row see, where not all are."""
        self.shown: mx.array | None = None
        """The pages it selected for the batch being computed; None: all, or native attention selects."""

    @property
    def stored(self) -> KVStorage:
        assert self.storage is not None, "nothing was written yet"
        return self.storage

    def reserve(self, heads: int, size: int, dtype: mx.Dtype) -> ReservedStorage | None:
        """Storage for the native kernels; None where there is another kind already. Keys and values are computed in
        `dtype`."""
        if self.storage is None:
            layers = sum(isinstance(state, AppendState) for state in self.neighbours)
            self.storage = ReservedStorage(self.group, layers, heads, (size, size), self.kept or dtype)
        return self.storage if isinstance(self.storage, ReservedStorage) else None

    def pending(self) -> list[mx.array]:
        return [] if self.storage is None else self.storage.pending()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        flat = (part.swapaxes(1, 2).flatten(0, 1) for part in (keys, values))
        self.write(*flat)
        return self.keys_and_values()

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Store keys and values [tokens, heads, size] of all tokens of the open batch."""
        if self.layout is not None:
            keys, values = self.layout.pack(keys, values)
        storage = self.provided(keys.shape[1], (keys.shape[2], values.shape[2]), keys.dtype)
        if isinstance(storage, KernelStorage):
            storage.write_at(keys, values, self.places(storage))
        else:
            storage.write(keys, values, self._runs)

    def provided(self, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> KVStorage:
        """The layer's storage, made on first use for such keys and values."""
        if self.storage is None:
            self.storage = self._make_storage(heads, sizes, self.kept or dtype)
        return self.storage

    def places(self, storage: KernelStorage) -> mx.array:
        """Where the kernels write each token of the open batch."""
        return _memoised(self.opened.memo, ("places", self.group.number), lambda: storage.places(self._runs))

    @property
    def _runs(self) -> list[TokenRun]:
        opened = self.opened
        return _memoised(opened.memo, ("runs", self.group.number), lambda: token_runs(opened, self.group))

    def _make_storage(self, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> SlabStorage:
        kernel = (
            None if self.kernels is None else self.kernels.attention(AttentionShape(heads, heads, *sizes, PAGE), dtype)
        )
        if self.kernels is None or kernel is None:
            return SlabStorage(self.group, heads, sizes, dtype)
        return KernelStorage(self.group, heads, sizes, dtype, kernel, self.kernels)

    def kernel_rows(self, storage: KernelStorage, mixed: MixedBatch, numbers: Sequence[int]) -> KernelRows:
        """The rows of some parts of a mixed batch, as the kernels take them."""

        def make() -> KernelRows:
            parts = [mixed.parts[number] for number in numbers]
            tables = [table for part in parts for table in self.tables(part)]
            lengths = [start + part.width for part in parts for start in part.starts]
            counts = [part.width for part in parts for _ in part.rows]
            return storage.rows(tables, lengths, counts)

        rows = _memoised(mixed.memo, ("rows", self.group.number, tuple(numbers)), make)
        return rows if self.shown is None else rows.narrowed(self.shown, PAGE)

    @contextmanager
    def selecting_pages(self, queries: mx.array, scale: float, mixed: MixedBatch) -> Iterator[None]:
        """While this is open, the tokens of a batch of one row see only the pages selected for these sampled
        queries."""
        assert self.choice is not None
        [[start]] = [part.starts for part in mixed.parts]
        self.shown = self.choice(queries, scale, start)
        try:
            yield
        finally:
            self.shown = None

    def seen(self, table: PageTable, start: int) -> tuple[Sequence[int], int]:
        """The pages of a row that tokens from index `start` on see, including their own, and the index of the first of
        these tokens within those pages."""
        if self.shown is None:
            return table.numbers, start - table.first * PAGE
        selected: list[int] = self.shown.tolist()  # type: ignore[assignment]
        own = table.numbers[start // PAGE :]
        return [*(table.numbers[page] for page in selected), *own], len(selected) * PAGE + start % PAGE

    def tables(self, batch: ForwardBatch) -> list[PageTable]:
        return [row.tables[self.group.number] for row in batch.rows]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values [rows, heads, tokens, size] of the open batch's rows, from each one's first page on, with
        zeros behind shorter ones."""
        stored = self._gather_stored()
        return stored if self.layout is None else self.layout.unpack(*stored)

    def _gather_stored(self) -> tuple[mx.array, mx.array]:
        batch = self.open_batch
        if self.shown is not None:
            [table], [start] = self.tables(batch), batch.starts
            pages, first = self.seen(table, start)
            keys, values = self.stored.gathered(self.group.index(pages, 0))
            end = first + batch.width
            return keys[:, :, :end], values[:, :, :end]
        rows = _memoised(batch.memo, ("gathering", self.group.number), lambda: PageGathering(batch, self.group))
        read = [self.stored.gathered(index) for index in rows.indexes]
        keys, values = (concatenate(parts) for parts in zip(*read, strict=True))
        keys, values = keys[:, :, : rows.end], values[:, :, : rows.end]
        if rows.valid is not None:
            # Behind a row's end is another row's data, or uninitialised memory that may be NaN: it must not contribute,
            # not even with a weight of zero.
            keys, values = (mx.where(rows.valid, part, mx.zeros((), part.dtype)) for part in (keys, values))
        return keys, values

    def firsts(self, batch: ForwardBatch) -> list[int]:
        """The index of the first token that each row has stored."""
        return [table.first * PAGE for table in self.tables(batch)]

    def bidirectional_mask(self, window: int | None) -> mx.array | None:
        """The mask of the open batch, of one row, whose tokens all see each other."""
        batch = self.open_batch
        (first,), (start,) = self.firsts(batch), batch.starts
        return bidirectional_mask(start, first, batch.width, start + batch.width - first, window)

    def _masks(self, parts: tuple[AttentionMask, ...], window_size: int | None) -> PerBatch:
        assert self.whole is not None
        return BatchMasks(self.whole, parts, window_size)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> AttentionMask:
        batch = self.open_batch
        if not batch.ragged and window_size is None and not return_array:
            return None if width == 1 else "causal"
        return causal_mask(batch.starts, [0] * batch.count, width, max(batch.starts) + width, window_size)

    # Llama 4's chunked attention makes its own masks and asks its cache to trim its front, which is not needed here.

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
        """The widest window of the model's own masks."""

    def _masks(self, parts: tuple[AttentionMask, ...], window_size: int | None) -> PerBatch:
        return super()._masks(parts, window_size or self.window)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> AttentionMask:
        batch = self.open_batch
        window = window_size or self.window
        self.asked = max(self.asked, window)
        firsts = self.firsts(batch)
        end = max(start - first for start, first in zip(batch.starts, firsts, strict=True)) + width
        if batch.count == 1 and end <= window and not return_array:
            return None if width == 1 else "causal"
        return causal_mask(batch.starts, firsts, width, end, window)


class PageGathering:
    """The pages of a batch's rows in a group, padded to the length of the longest."""

    def __init__(self, batch: ForwardBatch, group: PageGroup) -> None:
        tables = [row.tables[group.number] for row in batch.rows]
        ends = [start + batch.width - table.first * PAGE for start, table in zip(batch.starts, tables, strict=True)]
        self.end, pages = max(ends), max(len(table.numbers) for table in tables)
        self.indexes: list[PageIndex] = [
            group.index([*table.numbers, *[table.numbers[-1]] * (pages - len(table.numbers))], table.coded)
            for table in tables
        ]
        ragged = (mx.arange(self.end) < mx.array(ends)[:, None])[:, None, :, None] if len(set(ends)) > 1 else None
        self.valid: mx.array | None = ragged
        """Where shorter rows have tokens."""


def _memoised(memo: dict[object, Any], key: object, make: Callable[[], T]) -> T:
    """What is made once for all layers of a batch."""
    if key not in memo:
        memo[key] = make()
    value: T = memo[key]
    return value


def token_runs(opened: ForwardBatch | MixedBatch, group: PageGroup) -> list[TokenRun]:
    """Where the tokens of a batch are written."""
    parts = opened.parts if isinstance(opened, MixedBatch) else (opened,)
    runs: list[TokenRun] = []
    token = 0
    for part in parts:
        for row, start in zip(part.rows, part.starts, strict=True):
            runs += group.runs(row.tables[group.number], start, start + part.width, token)
            token += part.width
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

    def open(self, batch: ForwardBatch) -> None:
        for part in self.caches:
            part.open(batch)

    def close(self) -> None:
        for part in self.caches:
            part.close()

    def __getitem__(self, index: int) -> LayerState:
        return self.caches[index]


def flatten_states(layers: Iterable[LayerState]) -> list[LayerState]:
    """The states of all layers, those of one that has several among them."""
    return [part for layer in layers for part in (layer.caches if isinstance(layer, CompositeState) else [layer])]


def make_layer_states(made: Callable[[], Sequence[Any]], margin: int = 0) -> list[LayerState]:
    """Our live states for the caches that a model makes; where there is none for one of them, each row has the model's
    own. Windows are `margin` tokens wider."""
    own = made()
    try:
        return [_make_layer_state(cache, margin) for cache in own]
    except KeyError:
        rows = RowCaches(made)
        return [OwnCacheState(rows, layer) for layer in range(len(own))]


def _make_layer_state(cache: Any, margin: int) -> LayerState:
    kind = type(cache)
    return _STATE_FACTORIES[kind.__name__ if kind.__module__ in CACHE_MODULES else ""](cache, margin)


_STATE_FACTORIES: dict[str, Callable[[Any, int], LayerState]] = {
    "KVCache": lambda cache, margin: AppendState(),
    "ChunkedKVCache": lambda cache, margin: AppendState(),
    "RotatingKVCache": lambda cache, margin: WindowState(cache.max_size + margin),
    "ArraysCache": lambda cache, margin: RecurrentState(len(cache.cache)),
    "CacheList": lambda cache, margin: CompositeState([_make_layer_state(part, margin) for part in cache.caches]),
}
"""By the names of caches that mlx-lm and mlx-vlm have alike."""


SPARSE_FROM_TOKENS = 16384
"""Tokens behind which pages are selected."""
SEEN_PAGES = 8192 // PAGE
"""Pages that are selected."""
NEWEST_PAGES = 2048 // PAGE
"""The newest ones among them."""
QUERY_STRIDE = 64
"""One query of so many is sampled to select pages."""


class PageSelection:
    """The pages that tokens of one row see in one layer."""

    def __init__(self, state: AppendState, row: Row) -> None:
        self._state, self._table = state, row.tables[state.group.number]
        self._means: mx.array | None = None  # [heads, pages, size]

    def narrows(self, start: int) -> bool:
        """Whether tokens from index `start` on do not see all pages."""
        return start > SPARSE_FROM_TOKENS and start // PAGE > SEEN_PAGES and not self._table.coded

    @property
    def limits(self) -> PageChoiceLimits:
        return SEEN_PAGES, NEWEST_PAGES, QUERY_STRIDE

    def __call__(self, queries: mx.array, scale: float, start: int) -> mx.array | None:
        """The selected ones of the pages that are full at index `start`, by sampled queries [tokens, heads, size]:
        int32 indices in the row's table, in order. None: all of them."""
        full = start // PAGE
        if not self.narrows(start):
            return None
        means = self._page_means(full)
        heads, _, size = means.shape
        by_head = queries.astype(mx.float32).swapaxes(0, 1).reshape(heads, -1, size)
        scores = mx.softmax(scale * (by_head @ means.swapaxes(-1, -2)), axis=-1).max(axis=(0, 1))
        pages = mx.arange(full)
        scores = mx.where((pages == 0) | (pages >= full - NEWEST_PAGES), 2.0, scores)
        return mx.sort(mx.argpartition(-scores, SEEN_PAGES)[:SEEN_PAGES]).astype(mx.int32)

    def _page_means(self, full: int) -> mx.array:
        """The means of so many pages; only new ones are read."""
        done = 0 if self._means is None else self._means.shape[1]
        if done < full:
            index = self._state.group.index(self._table.numbers[done:full], 0)
            keys, _ = self._state.stored.gathered(index)
            new = keys[0].reshape(keys.shape[1], full - done, PAGE, -1).astype(mx.float32).mean(axis=2)
            self._means = new if self._means is None else mx.concatenate([self._means, new], axis=1)
        assert self._means is not None
        return self._means[:, :full]
