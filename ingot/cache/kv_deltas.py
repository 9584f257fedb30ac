"""Keys and values outside of pages, and reading and writing them from and to pages.

A delta is the keys and values of some tokens in one layer, as arrays, raw or encoded, which can be cut by tokens. A
coded delta has full pages in the same encoding as live pages. A checkpoint is a copy of recurrent states, from which a
sequence can resume. Extents say where tokens are in pages, placements where they are written: all that another rank has
to be told. `DeltaCodec` encodes a record's keys and values. Only the engine thread may call what takes or returns
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import mlx.core as mx

from ingot.cache.arrays import copy_array
from ingot.cache.attention_state import AppendState
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_pages import CodedPageLayout, join_pages
from ingot.cache.layer_state import LayerState
from ingot.cache.page_groups import PageGroup, TokenRun
from ingot.cache.pages import PAGE, pages_for_tokens

TOKEN_AXIS = 2
"""The axis of tokens. Its length is 1 where all tokens share an array."""


@dataclass(frozen=True, slots=True)
class KVDelta:
    """The keys and values [1, heads, tokens, size] of tokens [begin, end) in one layer, or what they were encoded to;
    no arrays where there are no tokens."""

    begin: int
    end: int
    arrays: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def coded(self) -> int:
        """How many of the first pages are coded."""
        return 0

    @property
    def raw(self) -> KVDelta:
        """The tokens behind the coded pages."""
        return self

    def with_coded(self, pages: int) -> KVDelta:
        """The same with at most so many coded pages."""
        return self

    def behind(self, begin: int, whole: int) -> KVDelta:
        """The part behind token `begin`, of a record that begins at `whole`. One that reaches back further still
        does."""
        if self.begin < whole or self.begin >= begin:
            return self
        return KVDelta(begin, self.end, tuple(_cut_tokens(array, begin - self.begin, None) for array in self.arrays))

    def before(self, end: int, whole: int) -> KVDelta:
        """The part before token `end`, of a record that begins at `whole`. One that reaches back serves only the
        record's end, and becomes empty."""
        if self.begin < whole or self.begin >= end:
            return KVDelta(end, end, ())
        return KVDelta(
            self.begin, min(self.end, end), tuple(_cut_tokens(array, 0, end - self.begin) for array in self.arrays)
        )

    def copied(self) -> KVDelta:
        """A copy in memory of its own, so that what it was cut from can be freed."""
        return KVDelta(self.begin, self.end, tuple(copy_array(array) for array in self.arrays))


class LayerDeltas(tuple[KVDelta | None, ...]):
    """One for each layer's state, None for recurrent ones."""

    __slots__ = ()

    def arrays(self) -> list[mx.array]:
        return [array for delta in self if delta is not None for array in delta.arrays]

    @property
    def nbytes(self) -> int:
        return sum(delta.nbytes for delta in self if delta is not None)

    def behind(self, begin: int, whole: int) -> LayerDeltas:
        """The part behind token `begin`, of a record that begins at `whole`."""
        return LayerDeltas(None if delta is None else delta.behind(begin, whole) for delta in self)

    def before(self, end: int, whole: int) -> LayerDeltas:
        """The part before token `end`, of a record that begins at `whole`."""
        return LayerDeltas(None if delta is None else delta.before(end, whole) for delta in self)

    def copied(self) -> LayerDeltas:
        """A copy in memory of its own."""
        return LayerDeltas(None if delta is None else delta.copied() for delta in self)

    def split(self, at: int, whole: int) -> tuple[LayerDeltas, LayerDeltas]:
        """Both parts, each in memory of its own."""
        first, second = self.before(at, whole).copied(), self.behind(at, whole).copied()
        mx.eval(first.arrays(), second.arrays())
        return first, second


def _cut_tokens(array: mx.array, begin: int, end: int | None) -> mx.array:
    return array if array.shape[TOKEN_AXIS] == 1 else array[:, :, begin:end]


class StateCheckpoint(tuple[tuple[mx.array | None, ...], ...]):
    """The parts of each layer's state; empty for layers that are not recurrent."""

    __slots__ = ()

    def arrays(self) -> list[mx.array]:
        return [array for layer in self for array in layer if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


@dataclass(frozen=True, slots=True)
class CodedDelta(KVDelta):
    """`arrays` are the first pages' bytes [pages, heads, head_bytes] and, where there are tokens behind those, their
    keys and values. The first page is whole, though it may begin before token `begin`; all of them end before `end`."""

    form: CodedPageLayout

    @property
    def coded(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def raw(self) -> KVDelta:
        return KVDelta((self._first + self.coded) * PAGE, self.end, self.arrays[1:])

    @property
    def _first(self) -> int:
        return self.begin // PAGE

    @property
    def has_valid_pages(self) -> bool:
        """Whether its pages have the right shape and number."""
        pages, raw = self.arrays[0], self.raw
        valid = (self.form.heads, self.form.head_bytes) == tuple(pages.shape[1:]) and pages.dtype == mx.uint8
        return valid and (raw.begin < raw.end if raw.arrays else raw.begin == raw.end)

    def behind(self, begin: int, whole: int) -> KVDelta:
        if self.begin >= begin:
            return self
        gone = begin // PAGE - self._first
        if gone >= self.coded:
            return self.raw.behind(begin, whole)
        return replace(self, begin=begin, arrays=(self.arrays[0][gone:], *self.arrays[1:]))

    def before(self, end: int, whole: int) -> KVDelta:
        if self.begin >= end:
            return KVDelta(end, end, ())
        pages = pages_for_tokens(end) - self._first
        if pages > self.coded:
            return replace(self, end=min(self.end, end), arrays=(self.arrays[0], *self.raw.before(end, whole).arrays))
        full = replace(self, end=(self._first + pages) * PAGE, arrays=(self.arrays[0][:pages],))
        cut = full.with_coded(end // PAGE - self._first)
        surplus = cut.end - end
        if not surplus:
            return cut
        *coded, keys, values = cut.arrays
        return replace(cut, end=end, arrays=(*coded, keys[:, :, :-surplus], values[:, :, :-surplus]))

    def with_coded(self, pages: int) -> KVDelta:
        if pages >= self.coded:
            return self
        keys, values = map(join_pages, self.form.decode(self.arrays[0][pages:]))
        if self.arrays[1:]:
            both = zip((keys, values), self.arrays[1:], strict=True)
            keys, values = (mx.concatenate([own, behind], axis=2) for own, behind in both)
        if pages:
            return replace(self, arrays=(self.arrays[0][:pages], keys, values))
        before = self.begin % PAGE
        return KVDelta(self.begin, self.end, (keys[:, :, before:], values[:, :, before:]))

    def copied(self) -> KVDelta:
        return replace(self, arrays=KVDelta.copied(self).arrays)


@dataclass(frozen=True, slots=True)
class KVExtent:
    """Tokens [begin, end) of a sequence in a group, and the slots of their pages (`PageGroup.places`)."""

    begin: int
    end: int
    places: Sequence[int]


@dataclass(frozen=True, slots=True)
class KVPlacement:
    """Where keys and values of a group are written: full coded pages to these slots, and the tokens behind them, from
    `held` on, to the runs."""

    coded: Sequence[int]
    held: int
    runs: Sequence[TokenRun]


ReadDelta = Callable[[AppendState, KVExtent], KVDelta]


def read_deltas(states: Sequence[LayerState], extents: Sequence[KVExtent], delta: ReadDelta) -> LayerDeltas:
    """The deltas of these extents, by group, in every layer, by `read_raw_delta` or `read_stored_delta`."""
    return LayerDeltas(
        delta(state, extents[state.group.number]) if isinstance(state, AppendState) else None for state in states
    )


def read_raw_delta(state: AppendState, extent: KVExtent) -> KVDelta:
    """With coded pages decoded."""
    if extent.begin >= extent.end:
        return KVDelta(extent.begin, extent.end, ())
    return KVDelta(extent.begin, extent.end, _read_tokens(state, extent, extent.begin))


def read_stored_delta(state: AppendState, extent: KVExtent) -> KVDelta:
    """With full coded pages as they are."""
    first = extent.begin // PAGE
    slots = [~slot for slot in takewhile(lambda slot: slot < 0, extent.places[: extent.end // PAGE - first])]
    if not slots:
        return read_raw_delta(state, extent)
    coded, raw = state.stored.coded, (first + len(slots)) * PAGE
    assert coded is not None
    tail = _read_tokens(state, extent, raw) if raw < extent.end else ()
    return CodedDelta(extent.begin, extent.end, (coded.read(slots), *tail), coded.form)


def _read_tokens(state: AppendState, extent: KVExtent, begin: int) -> tuple[mx.array, ...]:
    """The keys and values of tokens from `begin` on."""
    first = begin // PAGE
    whole = state.stored.gathered(state.group.placed(extent.places[first - extent.begin // PAGE :]))
    return tuple(array[:, :, begin - first * PAGE : extent.end - first * PAGE] for array in whole)


def deltas_of_group(
    states: Sequence[LayerState], group: PageGroup, deltas: LayerDeltas
) -> list[tuple[KVDelta, AppendState]]:
    """The deltas of a group's layers, with their states."""
    return [
        (delta, state)
        for delta, state in zip(deltas, states, strict=True)
        if delta is not None and isinstance(state, AppendState) and state.group is group
    ]


def layers_of_group(states: Sequence[LayerState], group: PageGroup) -> set[int]:
    return {number for number, state in enumerate(states) if isinstance(state, AppendState) and state.group is group}


def write_deltas(states: Sequence[LayerState], group: PageGroup, deltas: LayerDeltas, placement: KVPlacement) -> None:
    """Write the deltas of a group's layers to its pages. The caller evaluates what is pending."""
    for delta, state in deltas_of_group(states, group, deltas):
        if placement.coded:
            assert state.stored.coded is not None
            state.stored.coded.put(placement.coded, delta.arrays[0])
            mx.eval(state.stored.coded.pending())
        if delta.raw.arrays:
            # Missing tokens at the page's beginning are never seen, but plain operations read them: zeros, not NaN.
            keys, values = (_token_major(array, delta.raw.begin - placement.held) for array in delta.raw.arrays)
            state.stored.write(keys, values, placement.runs)


def _token_major(array: mx.array, blank: int) -> mx.array:
    """[tokens, heads, size], with `blank` tokens of zeros in front."""
    tokens = array[0].swapaxes(0, 1)
    return tokens if not blank else mx.concatenate([mx.zeros((blank, *tokens.shape[1:]), tokens.dtype), tokens])


EncodedSize = tuple[int, int]
"""A fixed number of bytes, and those of each token."""


class DeltaCodec:
    def __init__(self, codec: PairCodec, sample: LayerDeltas) -> None:
        """`sample` has raw keys and values of some tokens."""
        self._codec = codec
        self._forms = tuple(None if delta is None else CodedPageLayout.of(codec, *delta.arrays) for delta in sample)

    @property
    def is_idle(self) -> bool:
        """No layer has keys and values."""
        return not any(self._forms)

    @property
    def problem(self) -> str | None:
        """Why some layer's keys and values cannot be encoded, if so."""
        found = (form.problem() for form in self._forms if form is not None)
        return next((problem for problem in found if problem is not None), None)

    def sizes(self, states: Sequence[LayerState]) -> dict[int | None, EncodedSize]:
        """By window, the size of all layers that have it."""
        found: dict[int | None, EncodedSize] = {}
        for form, state in zip(self._forms, states, strict=True):
            if form is not None and isinstance(state, AppendState):
                none, one = (self._codec.nbytes(count, form.heads, form.sizes, form.dtype) for count in (0, 1))
                fixed, each = found.get(state.window, (0, 0))
                found[state.window] = fixed + none, each + one - none
        return found

    def encode(self, deltas: LayerDeltas) -> LayerDeltas:
        return LayerDeltas(
            delta if delta is None or not delta.arrays else replace(delta, arrays=self._codec.encode(*delta.arrays))
            for delta in deltas
        )

    def decode(self, deltas: LayerDeltas, layers: Container[int]) -> LayerDeltas:
        """The deltas of some layers, by number; None for the others."""
        numbered = enumerate(zip(deltas, self._forms, strict=True))
        return LayerDeltas(
            None
            if delta is None or form is None or number not in layers
            else replace(delta, arrays=self._codec.decode(delta.arrays, form.dtype))
            for number, (delta, form) in numbered
        )
