"""What rank 0 tells the others: everything that happens to live states, and every forward pass, in one order.

Rank 0 alone decides. It tells results, not reasons: which pages a row has, not who held or freed them; so that those
who follow keep no books that could differ from its own. What happens between two passes travels with the second.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

Window = int | None
"""By which layers that forget alike are known: their window, or None where they keep every token."""


class Kind(IntEnum):
    """Of frames on the link."""

    SHARE = 1  # a follower has loaded its share, and says what it takes
    TOLD = 2  # a list of what happened, mostly with a pass at its end
    FAILED = 3  # a follower's last words
    END = 4  # rank 0 needs nobody any more
    ANSWER = 5  # a follower has read or written its part of a record, or cannot


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to live states."""


class Begun(Event, frozen=True, array_like=True, tag=1):
    """There are new, empty ones, with groups for these windows. What a group has pools for, raw pages and those in
    fewer bits, is known to everybody."""

    windows: list[Window]
    mixed: bool


class Resized(Event, frozen=True, array_like=True, tag=2):
    """So many slots for recurrent states."""

    slots: int


class Left(Event, frozen=True, array_like=True, tag=3):
    """The row of a slot is no more."""

    slot: int


class Taken(Event, frozen=True, array_like=True, tag=4):
    """A checkpoint of a slot's recurrent states."""

    number: int
    slot: int


class Resumed(Event, frozen=True, array_like=True, tag=5):
    """A slot has the states of a checkpoint."""

    number: int
    slot: int


class Dropped(Event, frozen=True, array_like=True, tag=6):
    """A checkpoint is nobody's any more."""

    number: int


class Rewound(Event, frozen=True, array_like=True, tag=7):
    """A row was taken back to this length."""

    slot: int
    length: int


class Trimmed(Event, frozen=True, array_like=True, tag=8):
    """Nothing runs. Of each pool, how many slabs are left, and the slots that nobody holds, as int32."""

    pools: list[tuple[int, bytes]]


class Laid(Event, frozen=True, array_like=True, tag=10):
    """Pages have other places than before. `slabs`: by pool that has other ones, pages of each. `copies`: by group,
    (source, target, tokens, whether the source is in fewer bits) of slots."""

    slabs: list[tuple[int, list[int]]]
    copies: list[tuple[int, list[tuple[int, int, int, bool]]]]


class Encoded(Event, frozen=True, array_like=True, tag=11):
    """What lies in some slots of a group, as int32, was put into fewer bits, into others."""

    group: int
    raw: bytes
    coded: bytes


class PieceEvent(Event, frozen=True, array_like=True):
    """Something that happened to states outside of pages, which are known by numbers."""


class Loosened(PieceEvent, frozen=True, array_like=True, tag=12):
    """A piece is what lies in some pages, in fewer bits where there is a codec for it. By group: tokens [begin, end),
    and where their pages are, as int32."""

    number: int
    extents: list[tuple[int, int, bytes]]


class Cut(PieceEvent, frozen=True, array_like=True, tag=13):
    """`made` is what a piece of a record that begins at `whole` has from token `begin` on, or before `end`."""

    number: int
    made: int
    begin: int | None
    end: int | None
    whole: int


class Released(PieceEvent, frozen=True, array_like=True, tag=14):
    """A piece is nobody's any more."""

    number: int


class Placed(PieceEvent, frozen=True, array_like=True, tag=15):
    """What a piece has in a group lies in pages, too: whole ones in fewer bits in these slots, as int32, and the tokens
    from `held` on where the runs say."""

    number: int
    group: int
    coded: bytes
    held: int
    runs: list[tuple[int, int, int, int]]


class FileRef(msgspec.Struct, frozen=True, array_like=True):
    """Which record's file is meant, whoever's part of it: that of `tokens` up to a digest of them, of an owner, by
    digests; and what its name ends with."""

    tenant: str
    salt: str
    path: str
    begin: int
    variant: str


class Filed(PieceEvent, frozen=True, array_like=True, tag=16):
    """A piece, and a checkpoint if there is one, is being written to a file. To be answered under `asked`, when it is.
    The rest is what the file's header says (`Header`)."""

    asked: int
    number: int
    checkpoint: int | None
    file: FileRef
    before: str
    oldest: list[int]
    tokens: list[int]
    landmark: bool


class Fetched(PieceEvent, frozen=True, array_like=True, tag=17):
    """A piece is to be read from a file, which has a checkpoint or not. To be answered under its number, when it is."""

    number: int
    file: FileRef
    checkpoint: bool


class Recalled(PieceEvent, frozen=True, array_like=True, tag=18):
    """A checkpoint is the one that was read with a piece."""

    number: int
    checkpoint: int


class Used(PieceEvent, frozen=True, array_like=True, tag=19):
    """Files' records were used just now."""

    files: list[FileRef]


class Forgotten(PieceEvent, frozen=True, array_like=True, tag=20):
    """All files of a tenant are to be removed, by its digest."""

    tenant: str


class RowPlan(msgspec.Struct, frozen=True, array_like=True):
    """A row of a pass: its length and its position before that. Of each group whose table has changed, by number: the
    table's first page, where all of its pages lie, as int32, and how many of the first it sees in fewer bits."""

    slot: int
    length: int
    position: int
    tables: list[tuple[int, int, bytes, int]]


class PartPlan(msgspec.Struct, frozen=True, array_like=True):
    """`stated` are the positions of its tokens, where they do not go on from the rows' own."""

    rows: list[RowPlan]
    width: int
    tentative: int
    stated: list[int] | None = None


class Pass(Event, frozen=True, array_like=True, tag=9):
    """A forward pass over so many tokens, which come by a collective. `earlier`: for how many of the last tokens
    recurrent layers give the states before them."""

    parts: list[PartPlan]
    tokens: int
    at: list[int] | None
    earlier: int


Events = list[
    Begun
    | Resized
    | Left
    | Taken
    | Resumed
    | Dropped
    | Rewound
    | Trimmed
    | Laid
    | Encoded
    | Loosened
    | Cut
    | Released
    | Placed
    | Filed
    | Fetched
    | Recalled
    | Used
    | Forgotten
    | Pass
]

encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(Events).decode


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Of a follower, to what it was asked under a number."""

    number: int
    good: bool


encode_answer: Final = msgspec.msgpack.Encoder().encode
decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode
