"""The control channel: what rank 0 tells the others, in one order, and what it hears from them.

Everything that happens to live states, and every forward pass. Rank 0 alone decides. It tells results, not reasons:
which pages a row has, not who held or freed them; so that those who follow keep no accounts that could differ from its
own. What happens between two passes travels with the second. Only the engine thread may call `ControlChannel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from itertools import count
from typing import Final

import msgspec

from ingot.distributed.wire import Link, LinkFrame, LinkLate, LinkLost, broadcast_frame
from ingot.errors import Unavailable

Window = int | None
"""By which layers that forget alike are known: their window, or None where they keep every token."""


class FrameKind(IntEnum):
    """Of frames on the link."""

    SHARE = 1  # a follower has loaded its share, and says what it takes
    TOLD = 2  # a list of what happened, mostly with a pass at its end
    FAILED = 3  # a follower's last words
    END = 4  # rank 0 needs nobody any more
    ANSWER = 5  # a follower has read or written its part of a record, or cannot


class StateEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to live states."""


class StatesBegun(StateEvent, frozen=True, array_like=True, tag=1):
    """There are new, empty ones, with groups for these windows. What a group has pools for, raw pages and those in
    fewer bits, is known to everybody."""

    windows: list[Window]
    mixed: bool


class SlotsResized(StateEvent, frozen=True, array_like=True, tag=2):
    """So many slots for recurrent states."""

    slots: int


class RowLeft(StateEvent, frozen=True, array_like=True, tag=3):
    """The row of a slot is no more."""

    slot: int


class CheckpointTaken(StateEvent, frozen=True, array_like=True, tag=4):
    """A checkpoint of a slot's recurrent states."""

    number: int
    slot: int


class CheckpointResumed(StateEvent, frozen=True, array_like=True, tag=5):
    """A slot has the states of a checkpoint."""

    number: int
    slot: int


class CheckpointDropped(StateEvent, frozen=True, array_like=True, tag=6):
    """A checkpoint is nobody's any more."""

    number: int


class RowRewound(StateEvent, frozen=True, array_like=True, tag=7):
    """A row was taken back to this length."""

    slot: int
    length: int


class PoolsTrimmed(StateEvent, frozen=True, array_like=True, tag=8):
    """Nothing runs. Of each pool, how many slabs are left, and the slots that nobody holds, as int32."""

    pools: list[tuple[int, bytes]]


class PagesMoved(StateEvent, frozen=True, array_like=True, tag=10):
    """Pages have other places than before. `slabs`: by pool that has other ones, pages of each. `copies`: by group,
    (source, target, tokens, whether the source is in fewer bits) of slots."""

    slabs: list[tuple[int, list[int]]]
    copies: list[tuple[int, list[tuple[int, int, int, bool]]]]


class PagesEncoded(StateEvent, frozen=True, array_like=True, tag=11):
    """What lies in some slots of a group, as int32, was put into fewer bits, into others."""

    group: int
    raw: bytes
    coded: bytes


class PieceEvent(StateEvent, frozen=True, array_like=True):
    """Something that happened to states outside of pages, which are known by numbers."""


class PieceMade(PieceEvent, frozen=True, array_like=True, tag=12):
    """A piece is what lies in some pages, in fewer bits where there is a codec for it. By group: tokens [begin, end),
    and where their pages are, as int32."""

    number: int
    extents: list[tuple[int, int, bytes]]


class PieceCut(PieceEvent, frozen=True, array_like=True, tag=13):
    """`made` is what a piece of a record that begins at `whole` has from token `begin` on, or before `end`."""

    number: int
    made: int
    begin: int | None
    end: int | None
    whole: int


class PieceReleased(PieceEvent, frozen=True, array_like=True, tag=14):
    """A piece is nobody's any more."""

    number: int


class PiecePlaced(PieceEvent, frozen=True, array_like=True, tag=15):
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


class PieceFiled(PieceEvent, frozen=True, array_like=True, tag=16):
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


class PieceFetched(PieceEvent, frozen=True, array_like=True, tag=17):
    """A piece is to be read from a file, which has a checkpoint or not. To be answered under its number, when it is."""

    number: int
    file: FileRef
    checkpoint: bool


class CheckpointRecalled(PieceEvent, frozen=True, array_like=True, tag=18):
    """A checkpoint is the one that was read with a piece."""

    number: int
    checkpoint: int


class FilesUsed(PieceEvent, frozen=True, array_like=True, tag=19):
    """Files' records were used just now."""

    files: list[FileRef]


class TenantForgotten(PieceEvent, frozen=True, array_like=True, tag=20):
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


class ForwardPass(StateEvent, frozen=True, array_like=True, tag=9):
    """A forward pass over so many tokens, which come by a collective. `earlier`: for how many of the last tokens
    recurrent layers give the states before them."""

    parts: list[PartPlan]
    tokens: int
    at: list[int] | None
    earlier: int


Events = list[
    StatesBegun
    | SlotsResized
    | RowLeft
    | CheckpointTaken
    | CheckpointResumed
    | CheckpointDropped
    | RowRewound
    | PoolsTrimmed
    | PagesMoved
    | PagesEncoded
    | PieceMade
    | PieceCut
    | PieceReleased
    | PiecePlaced
    | PieceFiled
    | PieceFetched
    | CheckpointRecalled
    | FilesUsed
    | TenantForgotten
    | ForwardPass
]

encode_events: Final = msgspec.msgpack.Encoder().encode
decode_events: Final = msgspec.msgpack.Decoder(Events).decode


class FollowerAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Of a follower, to what it was asked under a number."""

    number: int
    good: bool


encode_answer: Final = msgspec.msgpack.Encoder().encode
decode_answer: Final = msgspec.msgpack.Decoder(FollowerAnswer).decode


GROUP_LOST = "The ranks of this model lost each other; they are started again"


class FollowerQuestion:
    """What everybody is to answer, each once."""

    __slots__ = ("good", "left")

    def __init__(self, left: int) -> None:
        self.left, self.good = left, True

    def hear(self, *, good: bool) -> None:
        self.left, self.good = self.left - 1, self.good and good

    @property
    def settled(self) -> bool:
        """All have answered, or one has that it cannot be."""
        return self.left == 0 or not self.good


class ControlChannel:
    """Tells the followers, in order. Only the engine thread may call it."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._events: list[StateEvent] = []
        self._numbers = count()
        self._questions: dict[int, FollowerQuestion] = {}
        self.note_pages: Callable[[], None] = lambda: None
        """Have noted what is not yet of where pages lie: whatever is told of them comes then."""
        self.step = 0  # passes told
        self.trouble = ""  # why nothing can be told any more

    def number(self) -> int:
        """One that no checkpoint, piece or question had before."""
        return next(self._numbers)

    def ask(self, number: int) -> FollowerQuestion:
        """Expect an answer of everybody to what is told under a number."""
        question = self._questions[number] = FollowerQuestion(len(self._links))
        return question

    def forget_question(self, number: int) -> None:
        self._questions.pop(number, None)

    def listen(self, within: float = 0.0) -> None:
        """Hear what has been answered; where nothing has, wait for so long. Raises Unavailable where somebody is
        gone."""
        heard = [self._hear(link, 0.0) for link in self._links]
        if within and not any(heard):
            self._hear(self._links[0], within)

    def _hear(self, link: Link, within: float) -> bool:
        """Whether there was something."""
        heard = False
        with suppress(LinkLate):
            while True:
                try:
                    self._take(link.receive(0.0 if heard else within))
                except LinkLost as error:
                    self.trouble = self.trouble or str(error)
                    raise
                heard = True
        return heard

    def _take(self, frame: LinkFrame) -> None:
        if frame.kind == FrameKind.FAILED:
            self.trouble = self.trouble or frame.body.decode(errors="replace")
            raise Unavailable(f"{GROUP_LOST}: {self.trouble}", retry_after=1)
        answer = decode_answer(frame.body)
        question = self._questions.get(answer.number)
        if question is not None:
            question.hear(good=answer.good)
            if question.settled:
                del self._questions[answer.number]

    def note(self, event: StateEvent) -> None:
        """Have it told with the next pass."""
        self._events.append(event)

    def tell(self, event: StateEvent) -> None:
        """Have it told now, and what was noted before it. Raises Unavailable where somebody is gone."""
        self._events.append(event)
        self._refuse_if_failed()
        self.step += isinstance(event, ForwardPass)
        events, self._events = self._events, []
        try:
            broadcast_frame(self._links, FrameKind.TOLD, encode_events(events), self.step)
        except (LinkLost, LinkLate) as error:
            reason = self._reason() or error
            self.trouble = str(reason)
            raise reason from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What fails here after it was told leaves the others waiting for it: there is no going on."""
        self._refuse_if_failed()
        try:
            yield
        except BaseException as error:
            self.trouble = self.trouble or f"{GROUP_LOST}: {type(error).__name__}"
            raise

    def end(self) -> None:
        """Nobody is needed any more."""
        for link in self._links:
            with suppress(LinkLost, LinkLate):
                link.send(FrameKind.END)
            link.close()

    def _refuse_if_failed(self) -> None:
        if self.trouble:
            raise Unavailable(GROUP_LOST, retry_after=1)

    def _reason(self) -> Unavailable | None:
        """The last words of whoever is gone."""
        for link in self._links:
            frame = _last_frame(link)
            if frame is not None and frame.kind == FrameKind.FAILED:
                return Unavailable(f"{GROUP_LOST}: {frame.body.decode(errors='replace')}", retry_after=1)
        return None


def _last_frame(link: Link) -> LinkFrame | None:
    """The last frame that came, if one did."""
    frame = None
    with suppress(LinkLost, LinkLate):
        while True:
            frame = link.receive(0.0)
    return frame
