"""What a rank found out about its share of a model, and what all of them come to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ingot.cache.delta_codec import Size
from ingot.cache.footprint import Footprint, Gathered
from ingot.models.adapter import Adapter


class Share(msgspec.Struct, frozen=True):
    """Bytes, as in `Footprint`; `spare` are those that its weights leave, `encoded` what kept records take in fewer
    bits (`DeltaCodec.sizes`), where they are put into some."""

    groups: list[tuple[int | None, int]]
    recurrent: int
    activation: int
    score: int
    logits: int
    scratch: int
    tile: int | None
    gathered: tuple[int, int, int, int]
    coded: int
    ragged: bool
    mixed: bool
    vocab: int
    spare: int
    encoded: list[tuple[int | None, int, int]]

    @classmethod
    def of(cls, adapter: Adapter, total: int, encoded: Mapping[int | None, Size]) -> Share:
        shape = adapter.footprint
        return cls(
            list(shape.groups),
            shape.recurrent,
            shape.activation,
            shape.score,
            shape.logits,
            shape.scratch,
            shape.tile,
            shape.gathered,
            shape.coded,
            adapter.ragged,
            adapter.mixed,
            adapter.vocab,
            total - adapter.weight_bytes,
            [(window, *size) for window, size in encoded.items()],
        )


@dataclass(frozen=True, slots=True)
class Whole:
    """What holds for all ranks: whatever fits into it fits on each of them."""

    footprint: Footprint
    ragged: bool
    mixed: bool
    spare: int
    rewinds: bool
    """Whether rank 0 sees how far a row goes back: it has recurrent layers if any rank has."""
    forgets: bool
    """Whether rank 0 has layers of every window that any rank has: it knows then what all have of a record."""
    encoded: Mapping[int | None, Size]
    heavier: float
    """How many times as much as on rank 0 a record takes where it takes most."""

    @classmethod
    def of(cls, shares: Sequence[Share]) -> Whole:
        return cls(
            Footprint(
                groups=_groups(shares),
                recurrent=max(share.recurrent for share in shares),
                activation=max(share.activation for share in shares),
                score=max(share.score for share in shares),
                logits=max(share.logits for share in shares),
                scratch=max(share.scratch for share in shares),
                tile=_widest(share.tile for share in shares),
                gathered=Gathered(*map(max, *(share.gathered for share in shares))),
                coded=max(share.coded for share in shares),
            ),
            all(share.ragged for share in shares),
            all(share.mixed for share in shares),
            min(share.spare for share in shares),
            shares[0].recurrent > 0 or not any(share.recurrent for share in shares),
            {window for window, _ in shares[0].groups} == {window for share in shares for window, _ in share.groups},
            _encoded(shares),
            max(1.0, sum(size for _, size in _groups(shares)) / max(1, sum(size for _, size in shares[0].groups))),
        )


def _groups(shares: Iterable[Share]) -> tuple[tuple[int | None, int], ...]:
    sizes: dict[int | None, int] = {}
    for share in shares:
        for window, size in share.groups:
            sizes[window] = max(sizes.get(window, 0), size)
    return tuple(sizes.items())


def _encoded(shares: Iterable[Share]) -> dict[int | None, Size]:
    sizes: dict[int | None, Size] = {}
    for share in shares:
        for window, any_tokens, each in share.encoded:
            most = sizes.get(window, (0, 0))
            sizes[window] = max(most[0], any_tokens), max(most[1], each)
    return sizes


def _widest(tiles: Iterable[int | None]) -> int | None:
    """None is all tokens at once."""
    known = list(tiles)
    return None if None in known else max(tile for tile in known if tile is not None)
