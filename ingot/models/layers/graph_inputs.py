"""What decode graphs read and write besides hidden states: pages, recurrent states, and adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ingot.cache.kv_storage import KernelStorage
from ingot.cache.layer_state import RecurrentState
from ingot.kernels.decode_graph.capture import ReplayStage
from ingot.kernels.decode_graph.kernels import store_addresses
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.lora import LoraMatrices
from ingot.kernels.paged_attention.inputs import KernelRows, padded_count
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.rope import RopeKernel
from ingot.kernels.paged_attention.shapes import CodedPages
from ingot.kernels.recurrent.kernels import RecurrentSpans, locate_states
from ingot.models.layers.gpu_linear import JoinedLinear
from ingot.models.lora.layers import LoraMapping

LEAST_ADDRESSES = 256
"""Numbers that a graph's slab addresses have room for, four a slab."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphAttentionInputs:
    """What an attention layer of a graph reads and writes besides hidden states."""

    attention: PagedAttention
    rope: RopeKernel
    storage: KernelStorage
    rows: KernelRows
    slots: mx.array
    angles: mx.array
    addresses: mx.array
    """A buffer with the addresses of the storage's slabs."""
    coded: CodedPages | None


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
