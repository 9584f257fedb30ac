"""A conversation as the model gets it: tokens, and which message each of them came from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ingot.media.items import MediaItem
from ingot.text.chat_template.sandbox import TemplateHistory


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Tokens [begin, end): a message's, by its number in the client's list, or (None) what the template adds."""

    message: int | None
    role: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """Where in a conversation a token stands: `character` counts in the message's own text, without what the template
    puts around it; where it is the template's, in that; in a plain text, in all of it."""

    message: int | None
    role: str
    character: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """`spans` follow one another without gaps over all tokens; the last is the opening.

    `opening` is the text after the last message, with which the answer begins. The next turn may have another in its
    place, unless the answer is remembered together with it.
    """

    tokens: tuple[int, ...]
    text: str
    spans: tuple[MessageSpan, ...] = ()
    opening: str = ""
    history: TemplateHistory = "official"
    recalled: int = 0  # past answers that stand there in the tokens they were generated in
    adapted: tuple[str, ...] = ()  # what was done to the messages to make them fit, by name
    thread: bytes = b""  # names the conversation, for remembering its answer; nothing where that is not wanted
    call_ids: bool = False  # the ids of calls are part of the name
    begun: str = ""  # what of the answer's content the client wrote itself
    media: tuple[MediaItem, ...] = ()  # pictures and clips, in the order of their tokens
    said: tuple[tuple[str, ...], ...] = ()  # the texts of each message, by their numbers in the client's list

    @property
    def marks(self) -> tuple[int, ...]:
        """Numbers of tokens after which a message ends: the next turn can differ only after one of them."""
        return tuple(span.end for span in self.spans[:-1])

    def place(self, token: int, decode: Callable[[Sequence[int]], str]) -> PromptPlace:
        """Where the token of this number stands; one past the last is at the end."""
        if not self.spans:
            return PromptPlace(None, "", len(decode(self.tokens[:token])))
        begins = [span.begin for span in self.spans]
        span = self.spans[max(0, bisect_right(begins, token) - 1)]
        before = len(decode(self.tokens[span.begin : token]))
        if span.message is not None and span.message < len(self.said):
            before = _within(decode(self.tokens[span.begin : span.end]), before, self.said[span.message])
        return PromptPlace(span.message, span.role, before)


def _within(rendered: str, place: int, texts: Sequence[str]) -> int:
    """The place in the texts, one after another, that a place in what was made of them stands for."""
    passed, at, found_any = 0, 0, False
    for text in texts:
        bare = text.strip()
        found = rendered.find(bare, at)
        if found >= 0:
            found_any, at = True, found + len(bare)
            if place <= found:
                return passed
            if place < at:
                return passed + text.index(bare) + place - found
        passed += len(text)
    return passed if found_any else min(place, passed)
