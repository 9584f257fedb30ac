"""What decode graphs read and write besides hidden states: pages, recurrent states, and adapters; and the data of a
step, whose sizes choose its graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ingot.cache.attention_state import AppendState
from ingot.cache.kv_storage import KernelStorage
from ingot.cache.layer_state import RecurrentState
from ingot.kernels.decode_graph.capture import ReplayStage
from ingot.kernels.decode_graph.kernels import store_addresses
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.lora import LoraMatrices
from ingot.kernels.moe.kernels import ExpertPlaces
from ingot.kernels.paged_attention.inputs import KernelRows, RowBounds, padded_count
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.rope import LatentRopeKernel, RopeKernel
from ingot.kernels.paged_attention.shapes import CodedPages, KVSplits
from ingot.kernels.recurrent.kernels import RecurrentSpans, locate_states
from ingot.models.layers.gpu_linear import JoinedLinear
from ingot.models.layers.rope import RopeAngles
from ingot.models.lora.layers import LoraMapping

LEAST_TABLE = 1024
"""Pages that a graph's block table has room for."""
LEAST_SPLITS = 8
"""KV splits that any graph has room for: those that a short row does not have cost next to nothing."""
LEAST_ADDRESSES = 256
"""Numbers that a graph's slab addresses have room for, four a slab."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphAttentionInputs:
    """What an attention layer of a graph reads and writes besides hidden states."""

    attention: PagedAttention
    rope: RopeKernel | LatentRopeKernel
    storage: KernelStorage
    rows: KernelRows
    slots: mx.array
    angles: mx.array
    addresses: mx.array
    """A buffer with the addresses of the storage's slabs."""
    coded: CodedPages | None
    token_scales: mx.array | None
    """What queries are multiplied by, a number for each token."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentInputs:
    """What a recurrent layer of a graph reads and writes besides hidden states."""

    spans: RecurrentSpans
    addresses: mx.array
    """A buffer with the addresses of its tails and states."""


MixerInputs = GraphAttentionInputs | RecurrentInputs


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What all parts of a layer may read besides hidden states."""

    mixer: MixerInputs | None
    slots: mx.array
    """For each token's keys in some layer: negative for tokens that are not there."""
    loras: mx.array | None
    """The adapter of each token, where some have one."""
    layers: mx.array | None
    """What each layer is given: [tokens, layers * size]."""
    has_fixed_experts: bool = False
    """Whether each token has the first expert alone, whichever its router chooses."""
    computes_prompts: bool = False
    """Whether graphs of many tokens have to give these the same bits."""
    places: ExpertPlaces | None = None
    """Where a mixture's experts lie that are read when they are needed."""


class SlabAddresses:
    """The buffers in which graphs find the addresses of a group's slabs. Slabs come and go; then the buffers are
    written anew."""

    def __init__(self, addresses_of: Callable[[KernelStorage], mx.array]) -> None:
        self._addresses_of, self._stored = addresses_of, mx.zeros(0)
        self.buffers: list[mx.array] = []

    def has_room(self, storages: Sequence[KernelStorage]) -> bool:
        return bool(self.buffers) and self._addresses_of(storages[0]).size <= self.buffers[0].size

    def make_room(self, storages: Sequence[KernelStorage]) -> None:
        """Graphs that read the smaller buffers must not be replayed any more."""
        size = max(LEAST_ADDRESSES, 1 << self._addresses_of(storages[0]).size.bit_length())
        self.buffers = [mx.zeros(size, mx.int32) for _ in storages]
        self._stored = mx.zeros(0)
        mx.eval(self.buffers)

    def store(self, run: Launcher, storages: Sequence[KernelStorage], after: mx.array) -> mx.array:
        """A token for a replay: `after`, or a later one. Storages of one group change their slabs at the same time."""
        addresses = self._addresses_of(storages[0])
        if addresses is not self._stored:
            for storage, buffer in zip(storages, self.buffers, strict=True):
                after = store_addresses(run, self._addresses_of(storage), buffer, after)
            self._stored = addresses
        return after


class StateAddresses:
    """The buffers in which graphs find the states of recurrent layers."""

    def __init__(self, layers: int) -> None:
        self.buffers = [mx.zeros(8, mx.int32) for _ in range(layers)]
        self._versions: list[int | None] = [None] * layers
        mx.eval(self.buffers)

    def store(
        self,
        run: Launcher,
        states: Sequence[RecurrentState],
        arrays_of: Sequence[Callable[[RecurrentState], list[mx.array]]],
        after: mx.array,
    ) -> mx.array:
        """A token for a replay: `after`, or a later one."""
        for number, (state, find) in enumerate(zip(states, arrays_of, strict=True)):
            arrays = find(state)
            if self._versions[number] != state.version:
                after = store_addresses(run, locate_states(run, arrays), self.buffers[number], after)
                self._versions[number] = state.version
        return after


def slab_addresses_of(storage: KernelStorage) -> mx.array:
    return storage.addresses


def kernel_storage_of(state: AppendState, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> KernelStorage | None:
    """The storage of a layer's KV, if a graph can address it."""
    storage = state.provided(heads, sizes, dtype)
    if not isinstance(storage, KernelStorage) or not storage.by_address or storage.dtype != dtype:
        return None
    return storage


def coded_addresses_of(storage: KernelStorage) -> mx.array:
    return storage.coded_pages.addresses


def lora_matrices_of(product: JoinedLinear) -> LoraMatrices | None:
    return None if product.added is None else product.added.matrices


class LoraGraphs:
    """The adapters of a model whose layers multiply by these products."""

    def __init__(self, products: Sequence[JoinedLinear], stage: ReplayStage) -> None:
        self._products, self._stage = products, stage
        self.mapping: LoraMapping | None = None
        """Which adapters passes go through, where there are some."""
        self.refusal: str | None = None
        """Why such steps are not graphs."""
        self.compared_version = 0
        """The adapters whose graph was compared with the layers' own modules."""
        self.captured_version = 0
        """The adapters that there are graphs of."""
        self._arrays: list[mx.array] = []  # which those graphs read

    @property
    def version(self) -> int:
        """Which adapters the open pass has; 0: none."""
        return 0 if self.mapping is None or self.mapping.opened is None else self.mapping.version

    @property
    def are_possible(self) -> bool:
        return self.refusal is None and all(each.is_covered for each in self._matrices())

    def covers(self, dtype: mx.Dtype) -> bool:
        """Whether the open pass, in that number format, can be a graph."""
        if not self.version:
            return True
        return self.are_possible and all(each.into.dtype == dtype for each in self._matrices())

    def token_loras(self, tokens: int) -> mx.array | None:
        """The number of each token's adapter, and 0 for as many more as a graph has room for."""
        if self.mapping is None or self.mapping.opened is None:
            return None
        numbers = self.mapping.opened.numbers_in(self.mapping.order).view(mx.int32)
        return mx.pad(numbers, (0, padded_count(tokens) - tokens))

    def take_version(self, version: int) -> None:
        """Capture graphs of these adapters from now on; graphs of others are not replayed any more."""
        self._stage.forget(self._arrays)
        self._arrays = [array for each in self._matrices() for array in (each.into, each.out)]
        self.captured_version = version

    def _matrices(self) -> list[LoraMatrices]:
        found = map(lora_matrices_of, self._products)
        return [each for each in found if each is not None]


class AttentionKind(NamedTuple):
    """Attention of layers whose pages are the same and are split alike."""

    group: int  # its number among the page groups of the context
    splits: KVSplits
    window: int

    def bounded(self, splits: int, most: int) -> int:
        """KV splits enough for `most` queries of a row that has so many without a window: how the window happens to lie
        in them is data of a step."""
        spanned = -(-(self.window + most - 2) // self.splits.size) + 1
        return min(splits, 1 << (spanned - 1).bit_length()) if self.window else splits


class AttentionContext(NamedTuple):
    """An attention layer at all steps over the same KV states."""

    storage: KernelStorage
    attention: PagedAttention
    rope: RopeKernel | LatentRopeKernel
    kind: int  # the numbers of its kind of attention and of its angles
    angles: int


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """What all steps over the same KV states have in common."""

    first: weakref.ref[AppendState]
    windows: tuple[int | None, ...]
    dtype: mx.Dtype
    layers: Mapping[int, AttentionContext]  # those with attention, by their numbers
    groups: Sequence[tuple[int, ...]]  # the layers of each group of pages
    kinds: Sequence[AttentionKind]
    angles: Sequence[RopeAngles]
    kernel_ids: tuple[int, ...]  # of attention and ropes

    def storages(self, group: int) -> list[KernelStorage]:
        return [self.layers[number].storage for number in self.groups[group]]


@dataclass(frozen=True, slots=True, eq=False)
class GraphStep:
    """The data of a step."""

    context: StepContext
    tokens: int
    rows: Sequence[KernelRows]  # of each group of pages
    slots: Sequence[mx.array]  # likewise
    angles: Sequence[mx.array]  # and behind them what queries are multiplied by, if they are
    layer_inputs: mx.array | None  # what each layer is given, where they are given something
    spans: mx.array | None  # of the rows of recurrent layers, if there are any
    span_bounds: tuple[int, int]  # how many of these there are, with padding, and tokens of the longest
    token_loras: mx.array | None  # each token's adapter, where some have one
    lora_version: int
    has_fixed_experts: bool = False  # each token has the first one alone, whichever its router chooses
    begin: int = 0  # its first token in the pass

    @property
    def inputs(self) -> list[mx.array]:
        """What its graph reads besides hidden states."""
        data = [*self.angles] if self.layer_inputs is None else [self.layer_inputs, *self.angles]
        return [*data, *self.words]

    @property
    def words(self) -> list[mx.array]:
        """Those that are integers."""
        data = list[mx.array]()
        for slots, rows in zip(self.slots, self.rows, strict=True):
            data += [slots, rows.table, rows.rows]
        if self.spans is not None:
            data.append(self.spans)
        return data if self.token_loras is None else [*data, self.token_loras]

    @property
    def key(self) -> GraphKey:
        tokens, kinds = padded_count(self.tokens), self.context.kinds
        return GraphKey(
            tokens,
            tuple(
                RowBounds(
                    padded_count(len(rows.spans)),
                    rows.most,
                    kind.bounded(max(LEAST_SPLITS, rows.splits(kind.splits, 0)), rows.most),
                )
                for kind in kinds
                for rows in (self.rows[kind.group],)
            ),
            tuple(max(LEAST_TABLE, rows.table.size) for rows in self.rows),
            tuple((tokens, each.shape[1]) if each.ndim == 2 else each.shape for each in self.angles),
            tuple(rows.coded for rows in self.rows),
            0 if self.layer_inputs is None else self.layer_inputs.shape[1],
            self.span_bounds,
            self.lora_version,
            self.has_fixed_experts,
        )


class LayerCall(NamedTuple):
    """What a layer was called with besides hidden states."""

    given: Mapping[str, Any]
    shared: str | None = None  # the argument with an earlier layer's state

    @property
    def mask(self) -> Any:
        return self.given.get("mask")

    @property
    def cache(self) -> Any:
        return self.given.get("cache")

    @property
    def state(self) -> Any:
        """Its own KV state, or the earlier layer's whose KV it reads."""
        return self.given.get(self.shared) if self.cache is None and self.shared is not None else self.cache


class GraphKey(NamedTuple):
    """All that a graph depends on, apart from data: sizes that a step must fit in."""

    tokens: int
    rows: tuple[RowBounds, ...]  # for each kind of attention
    tables: tuple[int, ...]  # of each group of pages
    angles: tuple[tuple[int, ...], ...]
    coded: tuple[bool, ...]  # whether some pages of a group are in fewer bits
    layer_inputs: int  # numbers that the layers of a token are given besides hidden states
    span_bounds: tuple[int, int]  # rows of recurrent layers, and tokens of the longest
    lora_version: int = 0  # of the adapters; 0: no token has one
    has_fixed_experts: bool = False

    def resized(self, tokens: int, rows: tuple[RowBounds, ...]) -> GraphKey:
        angles = tuple((tokens, *shape[1:]) if len(shape) == 2 else shape for shape in self.angles)
        spans = (rows[0].rows, rows[0].most) if any(self.span_bounds) else self.span_bounds
        return self._replace(tokens=tokens, rows=rows, angles=angles, span_bounds=spans)
