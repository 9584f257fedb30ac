"""The control channel: the events that rank 0 sends to its followers, in order, and their answers.

Every change of live KV, and every forward pass. Rank 0 alone decides. It sends results, not reasons: which pages a row
has, not who holds them, so that followers have no bookkeeping that could differ from its own. Events between two passes
travel with the second. Only the engine thread may call `ControlChannel`.
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
"""Identifies a group of layers: its window, or None where layers attend to every token."""


class FrameKind(IntEnum):
    """Of frames on the link."""

    SHARE = 1  # a follower has loaded its share, and reports what that takes
    EVENTS = 2  # mostly with a forward pass at the end
    FAILED = 3  # why a follower ends
    END = 4  # followers are no longer needed
    ANSWER = 5  # a follower has read or written its part of a record, or failed to


class StateEvent(msgspec.Struct, frozen=True, array_like=True):
    """A change of live KV."""


class BatchStateCreated(StateEvent, frozen=True, array_like=True, tag=1):
    """A new, empty batch state, with groups for these windows. All ranks know which pools a group has, for raw and for
    quantised pages."""

    windows: list[Window]
    mixed: bool


class SlotsResized(StateEvent, frozen=True, array_like=True, tag=2):
    """There are so many slots for recurrent states."""

    slots: int


class RowRemoved(StateEvent, frozen=True, array_like=True, tag=3):
    """The row of a slot is gone."""

    slot: int


class CheckpointMade(StateEvent, frozen=True, array_like=True, tag=4):
    """A checkpoint of a slot's recurrent states."""

    number: int
    slot: int


class CheckpointResumed(StateEvent, frozen=True, array_like=True, tag=5):
    """A slot resumes from a checkpoint."""

    number: int
    slot: int


class CheckpointDropped(StateEvent, frozen=True, array_like=True, tag=6):
    """A checkpoint is no longer used."""

    number: int


class RowRewound(StateEvent, frozen=True, array_like=True, tag=7):
    """A row was rewound to this length."""

    slot: int
    length: int


class PoolsTrimmed(StateEvent, frozen=True, array_like=True, tag=8):
    """By pool, how many slabs are left, and the free slots, as int32."""

    pools: list[tuple[int, bytes]]


class PagesMoved(StateEvent, frozen=True, array_like=True, tag=10):
    """`slabs`: by pool that has changed, the pages of each. `copies`: by group, (source slot, target slot, tokens,
    whether the source is quantised)."""

    slabs: list[tuple[int, list[int]]]
    copies: list[tuple[int, list[tuple[int, int, int, bool]]]]


class PagesEncoded(StateEvent, frozen=True, array_like=True, tag=11):
    """Pages in some slots of a group, as int32, were quantised into others."""

    group: int
    raw: bytes
    coded: bytes


class PieceEvent(StateEvent, frozen=True, array_like=True):
    """A change of KV outside of pages, in pieces that are known by numbers."""


class PieceMade(PieceEvent, frozen=True, array_like=True, tag=12):
    """A piece is a copy of some pages, quantised where there is a codec. By group: tokens [begin, end), and the slots
    of their pages, as int32."""

    number: int
    extents: list[tuple[int, int, bytes]]


class PieceCut(PieceEvent, frozen=True, array_like=True, tag=13):
    """`made` is a slice from token `begin`, or up to `end`, of a piece of a record that begins at `whole`."""

    number: int
    made: int
    begin: int | None
    end: int | None
    whole: int


class PieceReleased(PieceEvent, frozen=True, array_like=True, tag=14):
    """A piece is no longer used."""

    number: int


class PiecePlaced(PieceEvent, frozen=True, array_like=True, tag=15):
    """A piece was copied into pages of a group: whole quantised pages into these slots, as int32, and the tokens from
    `held` on as the runs say."""

    number: int
    group: int
    coded: bytes
    held: int
    runs: list[tuple[int, int, int, int]]


class FileRef(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a record's file on any rank: its owner and the path of its tokens, by digests, where it begins, and
    what its name ends with."""

    tenant: str
    salt: str
    path: str
    begin: int
    variant: str


class PieceOffloaded(PieceEvent, frozen=True, array_like=True, tag=16):
    """A piece, and a checkpoint if there is one, is being written to a file; answered under `question`. The other
    fields are those of the file's header (`RecordHeader`)."""

    question: int
    number: int
    checkpoint: int | None
    file: FileRef
    before: str
    oldest: list[int]
    tokens: list[int]
    landmark: bool


class PieceOnloaded(PieceEvent, frozen=True, array_like=True, tag=17):
    """A piece is being read from a file, which may have a checkpoint; answered under its number."""

    number: int
    file: FileRef
    checkpoint: bool


class CheckpointOnloaded(PieceEvent, frozen=True, array_like=True, tag=18):
    """A checkpoint is that which was read with a piece."""

    number: int
    checkpoint: int


class FilesUsed(PieceEvent, frozen=True, array_like=True, tag=19):
    """The records of these files were used just now."""

    files: list[FileRef]


class TenantForgotten(PieceEvent, frozen=True, array_like=True, tag=20):
    """All files of a tenant, by its digest, are to be removed."""

    tenant: str


class RowPlan(msgspec.Struct, frozen=True, array_like=True):
    """A row of a pass: its length and position before the pass. Of each group whose table has changed, by number: the
    table's first page, the slots of all its pages, as int32, and how many of the first are quantised."""

    slot: int
    length: int
    position: int
    tables: list[tuple[int, int, bytes, int]]


class PartPlan(msgspec.Struct, frozen=True, array_like=True):
    """`stated` are the positions of its tokens, where they do not continue those of the rows."""

    rows: list[RowPlan]
    width: int
    tentative: int
    stated: list[int] | None = None


class ForwardPass(StateEvent, frozen=True, array_like=True, tag=9):
    """A forward pass over so many tokens, which come by a collective. `earlier`: for how many of the last tokens
    recurrent layers return the states before them."""

    parts: list[PartPlan]
    tokens: int
    at: list[int] | None
    earlier: int


Events = list[
    BatchStateCreated
    | SlotsResized
    | RowRemoved
    | CheckpointMade
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
    | PieceOffloaded
    | PieceOnloaded
    | CheckpointOnloaded
    | FilesUsed
    | TenantForgotten
    | ForwardPass
]


class FollowerAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A follower's answer to the question of a number."""

    number: int
    good: bool


encode_events: Final = msgspec.msgpack.Encoder().encode
encode_answer: Final = encode_events
decode_events: Final = msgspec.msgpack.Decoder(Events).decode
decode_answer: Final = msgspec.msgpack.Decoder(FollowerAnswer).decode


GROUP_LOST = "The ranks of this model lost each other; they are started again"


class FollowerQuestion:
    """What each follower is to answer once."""

    __slots__ = ("good", "left")

    def __init__(self, left: int) -> None:
        self.left, self.good = left, True

    def add_answer(self, *, good: bool) -> None:
        self.left, self.good = self.left - 1, self.good and good

    @property
    def settled(self) -> bool:
        """All have answered, or one has failed."""
        return self.left == 0 or not self.good


class ControlChannel:
    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._events: list[StateEvent] = []
        self._numbers = count()
        self._questions: dict[int, FollowerQuestion] = {}
        self.note_pages: Callable[[], None] = lambda: None
        """Queues where pages are now; to be called before any event about them."""
        self.step = 0  # forward passes sent
        self.trouble = ""  # why nothing can be sent any more

    def number(self) -> int:
        """A number that no checkpoint, piece or question had before."""
        return next(self._numbers)

    def ask(self, number: int) -> FollowerQuestion:
        """Expect an answer of each follower to the event of a number."""
        question = self._questions[number] = FollowerQuestion(len(self._links))
        return question

    def forget_question(self, number: int) -> None:
        self._questions.pop(number, None)

    def receive_answers(self, within: float = 0.0) -> None:
        """Take the answers that have come; where none has, wait for so long. Raises Unavailable where a follower is
        gone."""
        received = [self._receive(link, 0.0) for link in self._links]
        if within and not any(received):
            self._receive(self._links[0], within)

    def _receive(self, link: Link, within: float) -> bool:
        """Whether there was an answer."""
        received = False
        with suppress(LinkLate):
            while True:
                try:
                    self._take(link.receive(0.0 if received else within))
                except LinkLost as error:
                    self.trouble = self.trouble or str(error)
                    raise
                received = True
        return received

    def _take(self, frame: LinkFrame) -> None:
        if frame.kind == FrameKind.FAILED:
            self.trouble = self.trouble or frame.body.decode(errors="replace")
            raise Unavailable(f"{GROUP_LOST}: {self.trouble}", retry_after=1)
        answer = decode_answer(frame.body)
        question = self._questions.get(answer.number)
        if question is not None:
            question.add_answer(good=answer.good)
            if question.settled:
                del self._questions[answer.number]

    def queue(self, event: StateEvent) -> None:
        """Send it with the next event that is sent."""
        self._events.append(event)

    def send(self, event: StateEvent) -> None:
        """Send it after those in the queue. Raises Unavailable where a follower is gone."""
        self._events.append(event)
        self._refuse_if_failed()
        self.step += isinstance(event, ForwardPass)
        events, self._events = self._events, []
        try:
            broadcast_frame(self._links, FrameKind.EVENTS, encode_events(events), self.step)
        except (LinkLost, LinkLate) as error:
            reason = self._reason() or error
            self.trouble = str(reason)
            raise reason from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A pass that fails here after it was sent leaves the followers waiting: the group cannot go on."""
        self._refuse_if_failed()
        try:
            yield
        except BaseException as error:
            self.trouble = self.trouble or f"{GROUP_LOST}: {type(error).__name__}"
            raise

    def end(self) -> None:
        """Followers are no longer needed."""
        for link in self._links:
            with suppress(LinkLost, LinkLate):
                link.send(FrameKind.END)
            link.close()

    def _refuse_if_failed(self) -> None:
        if self.trouble:
            raise Unavailable(GROUP_LOST, retry_after=1)

    def _reason(self) -> Unavailable | None:
        """Why a follower ended, if one said so."""
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
