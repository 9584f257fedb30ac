"""What rank 0 says to those that follow, in order, and what it hears when they are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

from ingot.distributed import control_channel
from ingot.distributed.control_channel import Kind
from ingot.distributed.wire import Frame, Link, LinkLate, LinkLost, broadcast
from ingot.errors import Unavailable

LOST = "The ranks of this model lost each other; they are started again"


class Question:
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


class Voice:
    """Tells the followers, in order. Only the engine thread may call it."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._events: list[control_channel.Event] = []
        self._numbers = count()
        self._questions: dict[int, Question] = {}
        self.note_pages: Callable[[], None] = lambda: None
        """Have noted what is not yet of where pages lie: whatever is told of them comes then."""
        self.step = 0  # passes told
        self.trouble = ""  # why nothing can be told any more

    def number(self) -> int:
        """One that no checkpoint, piece or question had before."""
        return next(self._numbers)

    def ask(self, number: int) -> Question:
        """Expect an answer of everybody to what is told under a number."""
        question = self._questions[number] = Question(len(self._links))
        return question

    def expect_no_more(self, number: int) -> None:
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

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.FAILED:
            self.trouble = self.trouble or frame.body.decode(errors="replace")
            raise Unavailable(f"{LOST}: {self.trouble}", retry_after=1)
        answer = control_channel.decode_answer(frame.body)
        question = self._questions.get(answer.number)
        if question is not None:
            question.hear(good=answer.good)
            if question.settled:
                del self._questions[answer.number]

    def note(self, event: control_channel.Event) -> None:
        """Have it told with the next pass."""
        self._events.append(event)

    def tell(self, event: control_channel.Event) -> None:
        """Have it told now, and what was noted before it. Raises Unavailable where somebody is gone."""
        self._events.append(event)
        self._refuse_if_troubled()
        self.step += isinstance(event, control_channel.Pass)
        events, self._events = self._events, []
        try:
            broadcast(self._links, Kind.TOLD, control_channel.encode(events), self.step)
        except (LinkLost, LinkLate) as error:
            reason = self._reason() or error
            self.trouble = str(reason)
            raise reason from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What fails here after it was told leaves the others waiting for it: there is no going on."""
        self._refuse_if_troubled()
        try:
            yield
        except BaseException as error:
            self.trouble = self.trouble or f"{LOST}: {type(error).__name__}"
            raise

    def end(self) -> None:
        """Nobody is needed any more."""
        for link in self._links:
            with suppress(LinkLost, LinkLate):
                link.send(Kind.END)
            link.close()

    def _refuse_if_troubled(self) -> None:
        if self.trouble:
            raise Unavailable(LOST, retry_after=1)

    def _reason(self) -> Unavailable | None:
        """The last words of whoever is gone."""
        for link in self._links:
            frame = _last(link)
            if frame is not None and frame.kind == Kind.FAILED:
                return Unavailable(f"{LOST}: {frame.body.decode(errors='replace')}", retry_after=1)
        return None


def _last(link: Link) -> Frame | None:
    """The last frame that came, if one did."""
    frame = None
    with suppress(LinkLost, LinkLate):
        while True:
            frame = link.receive(0.0)
    return frame
