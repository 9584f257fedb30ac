"""Keys and values outside of pages, and the ways between the two.

A delta is what some tokens have in one layer, as arrays, raw or encoded, which can be cut by tokens; of a coded one
whole pages are in fewer bits, as they lie where live pages are. A checkpoint is a copy of recurrent states, from which
a sequence can be resumed. Extents say where tokens lie in pages, placements where they are put: all that a rank that
keeps no accounts of its own has to be told. `DeltaCodec` puts a record's keys and values into fewer bits. Only the
engine thread may call what takes or gives arrays.
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
"""The axis of tokens. It has a length of 1 where an array is what all of them share."""


@dataclass(frozen=True, slots=True)
class KVDelta:
    """What tokens [begin, end) have in one layer: keys and values [1, heads, tokens, size], or what they were encoded
    to; no arrays when there are no tokens."""

    begin: int
    end: int
    arrays: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def coded(self) -> int:
        """Pages that are in fewer bits, from the first on."""
        return 0

    @property
    def raw(self) -> KVDelta:
        """The tokens behind those."""
        return self

    def with_coded(self, pages: int) -> KVDelta:
        """The same with no more pages in fewer bits than so many."""
        return self

    def behind(self, begin: int, whole: int) -> KVDelta:
        """What lies behind a token, of a record that begins at `whole`. What reaches back before that does so still."""
        if self.begin < whole or self.begin >= begin:
            return self
        return KVDelta(begin, self.end, tuple(_cut_tokens(array, begin - self.begin, None) for array in self.arrays))

    def before(self, end: int, whole: int) -> KVDelta:
        """What lies before a token, of a record that begins at `whole`. What reaches back is about the record's end."""
        if self.begin < whole or self.begin >= end:
            return KVDelta(end, end, ())
        return KVDelta(
            self.begin, min(self.end, end), tuple(_cut_tokens(array, 0, end - self.begin) for array in self.arrays)
        )

    def copied(self) -> KVDelta:
        """The same in memory of its own, so that what it was cut from can go."""
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
        """What lies behind a token, of a record that begins at `whole`."""
        return LayerDeltas(None if delta is None else delta.behind(begin, whole) for delta in self)

    def before(self, end: int, whole: int) -> LayerDeltas:
        """What lies before it."""
        return LayerDeltas(None if delta is None else delta.before(end, whole) for delta in self)

    def copied(self) -> LayerDeltas:
        """The same in memory of its own."""
        return LayerDeltas(None if delta is None else delta.copied() for delta in self)

    def split(self, at: int, whole: int) -> tuple[LayerDeltas, LayerDeltas]:
        """Both, each in memory of its own."""
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
    def is_sound(self) -> bool:
        """Whether it is what it should be, as far as its pages are concerned."""
        pages, raw = self.arrays[0], self.raw
        whole = (self.form.heads, self.form.head_bytes) == tuple(pages.shape[1:]) and pages.dtype == mx.uint8
        return whole and (raw.begin < raw.end if raw.arrays else raw.begin == raw.end)

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
        seen = pages_for_tokens(end) - self._first
        if seen > self.coded:
            return replace(self, end=min(self.end, end), arrays=(self.arrays[0], *self.raw.before(end, whole).arrays))
        some = replace(self, end=(self._first + seen) * PAGE, arrays=(self.arrays[0][:seen],))
        cut = some.with_coded(end // PAGE - self._first)
        surplus = cut.end - end
        if not surplus:
            return cut
        *pages, keys, values = cut.arrays
        return replace(cut, end=end, arrays=(*pages, keys[:, :, :-surplus], values[:, :, :-surplus]))

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
    """Tokens [begin, end) of a sequence in a group, and where the pages are that they lie in (`PageGroup.places`)."""

    begin: int
    end: int
    places: Sequence[int]


@dataclass(frozen=True, slots=True)
class KVPlacement:
    """Where keys and values of a group are put: whole pages in fewer bits into these slots, and the tokens behind them,
    from `held` on, where the runs say."""

    coded: Sequence[int]
    held: int
    runs: Sequence[TokenRun]


ReadDelta = Callable[[AppendState, KVExtent], KVDelta]


def read_deltas(states: Sequence[LayerState], extents: Sequence[KVExtent], delta: ReadDelta) -> LayerDeltas:
    """What lies in these pages, by group, in every layer: `read_raw_delta` or `read_stored_delta`."""
    return LayerDeltas(
        delta(state, extents[state.group.number]) if isinstance(state, AppendState) else None for state in states
    )


def read_raw_delta(state: AppendState, extent: KVExtent) -> KVDelta:
    """Unpacked, whatever it lies in."""
    if extent.begin >= extent.end:
        return KVDelta(extent.begin, extent.end, ())
    return KVDelta(extent.begin, extent.end, _read_tokens(state, extent, extent.begin))


def read_stored_delta(state: AppendState, extent: KVExtent) -> KVDelta:
    """Whole pages in fewer bits as they lie, where they are."""
    first = extent.begin // PAGE
    slots = [~place for place in takewhile(lambda place: place < 0, extent.places[: extent.end // PAGE - first])]
    if not slots:
        return read_raw_delta(state, extent)
    coded, raw = state.stored.coded, (first + len(slots)) * PAGE
    assert coded is not None
    rest = _read_tokens(state, extent, raw) if raw < extent.end else ()
    return CodedDelta(extent.begin, extent.end, (coded.read(slots), *rest), coded.form)


def _read_tokens(state: AppendState, extent: KVExtent, begin: int) -> tuple[mx.array, ...]:
    """The keys and values of tokens from `begin` on."""
    first = begin // PAGE
    whole = state.stored.gathered(state.group.placed(extent.places[first - extent.begin // PAGE :]))
    return tuple(array[:, :, begin - first * PAGE : extent.end - first * PAGE] for array in whole)


def deltas_of_group(
    states: Sequence[LayerState], group: PageGroup, deltas: LayerDeltas
) -> list[tuple[KVDelta, AppendState]]:
    """The layers of a group, and what is to be put there."""
    return [
        (delta, state)
        for delta, state in zip(deltas, states, strict=True)
        if delta is not None and isinstance(state, AppendState) and state.group is group
    ]


def layers_of_group(states: Sequence[LayerState], group: PageGroup) -> set[int]:
    """Their numbers."""
    return {number for number, state in enumerate(states) if isinstance(state, AppendState) and state.group is group}


def write_deltas(states: Sequence[LayerState], group: PageGroup, deltas: LayerDeltas, placement: KVPlacement) -> None:
    """Put what the layers of a group have into its pages; the caller has what is pending computed."""
    for delta, state in deltas_of_group(states, group, deltas):
        if placement.coded:
            assert state.stored.coded is not None
            state.stored.coded.put(placement.coded, delta.arrays[0])
            mx.eval(state.stored.coded.pending())
        if delta.raw.arrays:
            # What nobody has of the page before it will not be seen, but is read by plain operations.
            keys, values = (_token_major(array, delta.raw.begin - placement.held) for array in delta.raw.arrays)
            state.stored.write(keys, values, placement.runs)


def _token_major(array: mx.array, blank: int) -> mx.array:
    """[tokens, heads, size], with so many tokens of zeros in front."""
    own = array[0].swapaxes(0, 1)
    return own if not blank else mx.concatenate([mx.zeros((blank, *own.shape[1:]), own.dtype), own])


EncodedSize = tuple[int, int]
"""Bytes of any tokens, and of each more."""


class DeltaCodec:
    def __init__(self, codec: PairCodec, sample: LayerDeltas) -> None:
        """`sample` is what some tokens have, raw."""
        self._codec = codec
        self._forms = tuple(None if delta is None else CodedPageLayout.of(codec, *delta.arrays) for delta in sample)

    @property
    def is_idle(self) -> bool:
        """No layer keeps keys and values."""
        return not any(self._forms)

    @property
    def problem(self) -> str | None:
        """Why some layer's keys and values cannot be encoded, if so."""
        found = (form.problem() for form in self._forms if form is not None)
        return next((problem for problem in found if problem is not None), None)

    def sizes(self, states: Sequence[LayerState]) -> dict[int | None, EncodedSize]:
        """By window, what the layers take that forget alike."""
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
        """Of some layers, by number; None of the others."""
        numbered = enumerate(zip(deltas, self._forms, strict=True))
        return LayerDeltas(
            None
            if delta is None or form is None or number not in layers
            else replace(delta, arrays=self._codec.decode(delta.arrays, form.dtype))
            for number, (delta, form) in numbered
        )
