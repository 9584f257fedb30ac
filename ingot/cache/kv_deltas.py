"""Tokens that lie in pages, and keys and values read from there or written to it, in all layers of a group: what a rank
that keeps no books of its own has to be told. Only the engine thread may call what takes or gives arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import mlx.core as mx

from ingot.cache.attention_state import AppendState
from ingot.cache.coded_deltas import CodedDelta
from ingot.cache.deltas import Deltas, KVDelta
from ingot.cache.layer_state import LayerState
from ingot.cache.page_groups import PageGroup, Run
from ingot.cache.pages import PAGE


@dataclass(frozen=True, slots=True)
class Extent:
    """Tokens [begin, end) of a sequence in a group, and where the pages are that they lie in (`PageGroup.places`)."""

    begin: int
    end: int
    places: Sequence[int]


@dataclass(frozen=True, slots=True)
class Berth:
    """Where keys and values of a group are put: whole pages in fewer bits into these slots, and the tokens behind them,
    from `held` on, where the runs say."""

    coded: Sequence[int]
    held: int
    runs: Sequence[Run]


ReadDelta = Callable[[AppendState, Extent], KVDelta]


def read(states: Sequence[LayerState], extents: Sequence[Extent], delta: ReadDelta) -> Deltas:
    """What lies in these pages, by group, in every layer: `raw_delta` or `stored_delta`."""
    return Deltas(
        delta(state, extents[state.group.number]) if isinstance(state, AppendState) else None for state in states
    )


def raw_delta(state: AppendState, extent: Extent) -> KVDelta:
    """Unpacked, whatever it lies in."""
    if extent.begin >= extent.end:
        return KVDelta(extent.begin, extent.end, ())
    return KVDelta(extent.begin, extent.end, _tokens(state, extent, extent.begin))


def stored_delta(state: AppendState, extent: Extent) -> KVDelta:
    """Whole pages in fewer bits as they lie, where they are."""
    first = extent.begin // PAGE
    slots = [~place for place in takewhile(lambda place: place < 0, extent.places[: extent.end // PAGE - first])]
    if not slots:
        return raw_delta(state, extent)
    coded, raw = state.stored.coded, (first + len(slots)) * PAGE
    assert coded is not None
    rest = _tokens(state, extent, raw) if raw < extent.end else ()
    return CodedDelta(extent.begin, extent.end, (coded.read(slots), *rest), coded.form)


def _tokens(state: AppendState, extent: Extent, begin: int) -> tuple[mx.array, ...]:
    """The keys and values of tokens from `begin` on."""
    first = begin // PAGE
    whole = state.stored.gathered(state.group.placed(extent.places[first - extent.begin // PAGE :]))
    return tuple(array[:, :, begin - first * PAGE : extent.end - first * PAGE] for array in whole)


def of_group(states: Sequence[LayerState], group: PageGroup, deltas: Deltas) -> list[tuple[KVDelta, AppendState]]:
    """The layers of a group, and what is to be put there."""
    return [
        (delta, state)
        for delta, state in zip(deltas, states, strict=True)
        if delta is not None and isinstance(state, AppendState) and state.group is group
    ]


def layers_of(states: Sequence[LayerState], group: PageGroup) -> set[int]:
    """Their numbers."""
    return {number for number, state in enumerate(states) if isinstance(state, AppendState) and state.group is group}


def write(states: Sequence[LayerState], group: PageGroup, deltas: Deltas, berth: Berth) -> None:
    """Put what the layers of a group have into its pages; the caller has what is pending computed."""
    for delta, state in of_group(states, group, deltas):
        if berth.coded:
            assert state.stored.coded is not None
            state.stored.coded.put(berth.coded, delta.arrays[0])
            mx.eval(state.stored.coded.pending())
        if delta.raw.arrays:
            # What nobody has of the page before it will not be seen, but is read by plain operations.
            keys, values = (_by_token(array, delta.raw.begin - berth.held) for array in delta.raw.arrays)
            state.stored.write(keys, values, berth.runs)


def _by_token(array: mx.array, blank: int) -> mx.array:
    """[tokens, heads, size], with so many tokens of zeros in front."""
    own = array[0].swapaxes(0, 1)
    return own if not blank else mx.concatenate([mx.zeros((blank, *own.shape[1:]), own.dtype), own])
