"""A turn of a conversation: its events are watched, so that the answer can be put into the next turn as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ingot.engine.request import CallArguments, CallBegan, Event, SequenceEnded, TextDelta, ThinkingDelta
from ingot.protocol.served import Served
from ingot.text.prompt.canonical import thread_with_answer
from ingot.text.prompt.prompt import Prompt


@dataclass(slots=True)
class _Said:
    """What the client was told of one answer."""

    content: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)


class Turn:
    """Given every event of a request's stream, it keeps each answer once that has ended. Belongs to one thread.

    What is kept is bound to what the client was told: only a client that sends the same back gets it.
    """

    def __init__(self, served: Served, prompt: Prompt) -> None:
        self._served, self._prompt = served, prompt
        self._said: dict[int, _Said] = {}

    def take(self, event: Event) -> None:
        if not self._prompt.thread:
            return
        match event:
            case TextDelta():
                self._of(event.index).content.append(event.text)
            case ThinkingDelta():
                self._of(event.index).thought.append(event.text)
            case CallBegan():
                self._of(event.index).calls.append((event.id, event.name, []))
            case CallArguments():
                self._of(event.index).calls[event.call][2].append(event.fragment)
            case SequenceEnded():
                self._keep(self._said.pop(event.index, _Said()), event)

    def _of(self, index: int) -> _Said:
        return self._said.setdefault(index, _Said())

    def _keep(self, said: _Said, end: SequenceEnded) -> None:
        text = "".join(said.content)
        tokens = self._own_tokens(end, text)
        if not tokens:
            return
        calls = [(id, name, "".join(arguments)) for id, name, arguments in said.calls]
        thread = thread_with_answer(self._prompt.thread, self._prompt.begun + text, calls, ids=self._prompt.call_ids)
        self._served.answers.keep(thread, self._prompt.opening, tokens, "".join(said.thought), end.missing)

    def _own_tokens(self, end: SequenceEnded, said: str) -> Sequence[int]:
        """The answer's tokens without what ended it, which the client was not told of.

        None where that cannot be told apart: a stop string may begin within a token.
        """
        if isinstance(end.stopped_by, int):
            return end.tokens[:-1]
        if end.stopped_by is None or said.endswith(end.stopped_by):
            return end.tokens
        text = self._decoded(end.tokens)
        kept = text[: text.rfind(end.stopped_by)]
        for count in range(len(end.tokens), -1, -1):
            before = self._decoded(end.tokens[:count])
            if len(before) <= len(kept):
                return end.tokens[:count] if before == kept else ()
        return ()

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._served.tokenizer.decode(tokens, skip_special=False)
