"""A prompt's tokens, assembled from rendered text, cached answers and media placeholders.

A `Prompt` is a conversation as the model gets it: tokens, and which message each of them came from. A `PromptAssembler`
makes one of texts and tokens that follow one another; how the texts were cut cannot be seen in the tokens.

An `EncodingCache` keeps texts that were encoded before, so that in the next turn of a conversation only what is new is
encoded. A prompt is cut where a piece of it begins with a token that the encoder sets apart whatever stands before it,
so that its parts, encoded alone, give the tokens of the whole.

`MediaPlaceholders` turns what the template wrote for each image or video into what the model's own processor writes.
That is done in the text, where it meets its neighbours as one text with them, with one token for each run; runs are
made as long as they are only once the text is encoded.
"""

from __future__ import annotations

import re
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from ingot.errors import BadRequest, ContextOverflow, ModelError, Unsupported
from ingot.media.items import MediaItem, PlacedMedia, TokenSpan
from ingot.media.layout import ITEM_NUMBER
from ingot.text.cancellation import checkpoint
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.tokenizer.special_tokens import ControlTokenQuoting

if TYPE_CHECKING:
    from ingot.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Tokens [begin, end): a message's, by its number in the client's list, or (None) what the template adds."""

    message: int | None
    role: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PromptPosition:
    """Where in a conversation a token stands: `character` counts in the message's own text, without what the template
    puts around it; where it is the template's, in that; in a plain text, in all of it."""

    message: int | None
    role: str
    character: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """`spans` follow one another without gaps over all tokens; the last is the opening.

    `opening` is the text after the last message, with which the answer begins. The next turn may have another one
    there, unless the answer is cached together with it.
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
    continued_text: str = ""  # what of the answer's content the client wrote itself
    media: tuple[MediaItem, ...] = ()  # images and videos, in the order of their tokens
    message_texts: tuple[tuple[str, ...], ...] = ()  # the texts of each message, by their numbers in the client's list

    @property
    def marks(self) -> tuple[int, ...]:
        """Numbers of tokens after which a message ends: the next turn can differ only after one of them."""
        return tuple(span.end for span in self.spans[:-1])

    def place(self, token: int, decode: Callable[[Sequence[int]], str]) -> PromptPosition:
        """Where the token of this number stands; one past the last is at the end."""
        if not self.spans:
            return PromptPosition(None, "", len(decode(self.tokens[:token])))
        begins = [span.begin for span in self.spans]
        span = self.spans[max(0, bisect_right(begins, token) - 1)]
        before = len(decode(self.tokens[span.begin : token]))
        if span.message is not None and span.message < len(self.message_texts):
            rendered = decode(self.tokens[span.begin : span.end])
            before = _offset_in_texts(rendered, before, self.message_texts[span.message])
        return PromptPosition(span.message, span.role, before)


def _offset_in_texts(rendered: str, offset: int, texts: Sequence[str]) -> int:
    """The offset in the texts, one after another, that a offset in what was made of them stands for."""
    passed, at, found_any = 0, 0, False
    for text in texts:
        bare = text.strip()
        found = rendered.find(bare, at)
        if found >= 0:
            found_any, at = True, found + len(bare)
            if offset <= found:
                return passed
            if offset < at:
                return passed + text.index(bare) + offset - found
        passed += len(text)
    return passed if found_any else min(offset, passed)


@dataclass(frozen=True, slots=True)
class TokenOwner:
    """Whose the tokens are: a message of the client's, or the template's own."""

    message: int | None = None
    role: str = ""


@dataclass(frozen=True, slots=True)
class _PromptSegment:
    owner: TokenOwner
    text: str
    tokens: Sequence[int] | None = None  # None: the text is still to be encoded
    quoted: tuple[int, ...] = ()  # where it only seems that a control token begins


class PromptAssembler:
    """Texts that follow one another give the tokens of one text: how they were cut cannot be seen."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encodings: EncodingCache,
        salt: str,
        quoting: ControlTokenQuoting,
        placeholders: MediaPlaceholders | None = None,
    ) -> None:
        self._tokenizer, self._encodings, self._salt, self._quoting = tokenizer, encodings, salt, quoting
        self._placeholders = placeholders
        self._segments: list[_PromptSegment] = []

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self._segments)

    def add_text(self, owner: TokenOwner, text: str) -> None:
        if self._placeholders is not None:  # before quoted text becomes the text of a token again
            text = self._placeholders.write(text)
        meant, quoted = self._quoting.read(text)
        self._segments.append(_PromptSegment(owner, meant, None, quoted))

    def add_tokens(self, owner: TokenOwner, tokens: Sequence[int]) -> None:
        self._segments.append(_PromptSegment(owner, self._tokenizer.decode(tokens, skip_special=False), tokens))

    def check_length(self, most: int) -> None:
        """Raises ContextOverflow where there are more tokens than so many, whatever the texts are encoded to."""
        count = sum(len(segment.tokens) for segment in self._segments if segment.tokens is not None)
        count += 0 if self._placeholders is None else self._placeholders.further
        text = "".join(segment.text for segment in self._segments if segment.tokens is None)
        # No token is less than a byte, so that most texts need not be counted.
        least = count + (self._tokenizer.least_tokens(text) if count + 4 * len(text) > most else 0)
        if least > most:
            raise ContextOverflow(needed=least, limit=most, exactly=False)

    def assemble(self, *, add_special: bool) -> tuple[tuple[int, ...], tuple[MessageSpan, ...]]:
        """All tokens, and whose they are; the last span may be empty. `add_special` is for the very beginning."""
        tokens: list[int] = []
        spans: list[MessageSpan] = []
        for run in self._runs():
            checkpoint()
            ids, ends = self._encoded(run, add_special=add_special and not tokens)
            if self._placeholders is not None and run[0].tokens is None:  # cached tokens have no images
                ids, ends = self._placeholders.expand((ids, ends), len(tokens))
            for segment, end in zip(run, ends, strict=True):
                _extend_spans(spans, segment.owner, len(tokens) + end)
            tokens.extend(ids)
        return tuple(tokens), (*(span for span in spans[:-1] if span.end > span.begin), *spans[-1:])

    def _runs(self) -> Iterator[list[_PromptSegment]]:
        """Strands that have to be encoded together; those of tokens stand alone."""
        run: list[_PromptSegment] = []
        for segment in self._segments:
            set_apart = 0 not in segment.quoted and self._tokenizer.sets_apart(segment.text)
            if run and (segment.tokens is not None or set_apart):
                yield run
                run = []
            run.append(segment)
            if segment.tokens is not None:
                yield run
                run = []
        if run:
            yield run

    def _encoded(self, run: list[_PromptSegment], *, add_special: bool) -> EncodedText:
        if run[0].tokens is not None:
            return run[0].tokens, [len(run[0].tokens)]
        text = "".join(segment.text for segment in run)
        offsets = list(accumulate(len(segment.text) for segment in run))
        begins = zip(run, (0, *offsets), strict=False)
        in_run = tuple(begin + offset for segment, begin in begins for offset in segment.quoted)
        quoted = None if self._quoting.trusting else in_run
        encoded: EncodedText
        if add_special:
            encoded = self._tokenizer.encode_with_offsets(text, offsets, add_special=True, quoted=quoted)
        else:
            encoded = self._encodings.encode(self._tokenizer, text, offsets, salt=self._salt, quoted=quoted)
        ids, ends = encoded
        return ids, [*ends[:-1], len(ids)]


def _extend_spans(spans: list[MessageSpan], owner: TokenOwner, end: int) -> None:
    """The strand that ends here continues its owner's span or begins a new one."""
    last = spans[-1] if spans else None
    if last is not None and (last.message, last.role) == (owner.message, owner.role):
        spans[-1] = MessageSpan(owner.message, owner.role, last.begin, end)
    else:
        spans.append(MessageSpan(owner.message, owner.role, last.end if last is not None else 0, end))


MOST_ENCODING_BYTES: Final = 32 << 20
_ENCODING_OVERHEAD: Final = 200

EncodedText = tuple[Sequence[int], Sequence[int]]
_EncodingKey = tuple[str, str, tuple[int, ...], tuple[int, ...] | None]


class EncodingCache:
    """Of one tokenizer. Bounded; evicts the least recently used. Any thread may use it."""

    def __init__(self, most_bytes: int = MOST_ENCODING_BYTES) -> None:
        self._most = most_bytes
        self._entries: OrderedDict[_EncodingKey, tuple[array[int], tuple[int, ...]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def encode(
        self,
        tokenizer: Tokenizer,
        text: str,
        offsets: Sequence[int],
        *,
        salt: str,
        quoted: tuple[int, ...] | None = None,
    ) -> EncodedText:
        """The ids of a text, and how many of them end at or before each of the offsets; `quoted` as for a tokenizer.

        Texts of different salts do not share entries: timing must not reveal what others have sent.
        """
        key = (salt, text, tuple(offsets), quoted)
        with self._lock:
            if (found := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                return found
        ids: Sequence[int]
        if list(offsets) == [len(text)]:  # no offset within it is needed, which takes less time
            ids = tokenizer.encode(text, add_special=False, quoted=quoted)
            ends = [len(ids)]
        else:
            ids, ends = tokenizer.encode_with_offsets(text, offsets, add_special=False, quoted=quoted)
        encoded = (array("I", ids), tuple(ends))
        with self._lock:
            if key not in self._entries:
                self._entries[key] = encoded
                self._bytes += _encoding_cost(key, encoded)
                while self._bytes > self._most:
                    self._bytes -= _encoding_cost(*self._entries.popitem(last=False))
        return encoded


def _encoding_cost(key: _EncodingKey, encoded: tuple[array[int], tuple[int, ...]]) -> int:
    # A character takes one to four bytes.
    return 2 * len(key[1]) + len(encoded[0]) * encoded[0].itemsize + _ENCODING_OVERHEAD


MISPLACED_PLACEHOLDERS = (
    "The messages contain the text of tokens that stand for images, which only the server may write. Remove it."
)


class MediaPlaceholders:
    """Of one prompt. Its texts are written in their order, then encoded in the same."""

    def __init__(self, shown: Sequence[PlacedMedia], tokenizer: Tokenizer) -> None:
        self._shown = shown
        self._waiting = deque(enumerate(shown))
        self._tokens = {each.layout.token: _placeholder_id(each.layout.token, tokenizer) for each in shown}
        self._sought = re.compile(
            "|".join(sorted({re.escape(each.placeholder.sought) for each in shown}, key=len)[::-1])
        )
        self._runs: deque[tuple[int, int]] = deque()  # whose each run is, and how long, as they were written
        self._found: list[list[TokenSpan]] = [[] for _ in shown]

    @property
    def further(self) -> int:
        """Tokens that runs are longer by than they were written."""
        return sum(each.layout.features - len(each.layout.runs) for each in self._shown)

    def write(self, text: str) -> str:
        """The next text, with what stands for each of the media that the template shows in it."""
        return self._sought.sub(self._written, text)

    def expand(self, encoded: EncodedText, begin: int) -> EncodedText:
        """The tokens of what was written next, `begin` of the prompt's before them, with runs at their length."""
        ids, ends = encoded
        expanded: list[int] = []
        moved: list[int] = []
        count = set(self._tokens.values())
        for at, token in enumerate(ids):
            while len(moved) < len(ends) and ends[len(moved)] <= at:
                moved.append(len(expanded))
            if token not in count:
                expanded.append(token)
                continue
            if not self._runs:
                raise BadRequest(MISPLACED_PLACEHOLDERS, param="messages")
            number, length = self._runs.popleft()
            self._found[number].append((begin + len(expanded), begin + len(expanded) + length))
            expanded += [token] * length
        return expanded, [*moved, *[len(expanded)] * (len(ends) - len(moved))]

    def items(self) -> tuple[MediaItem, ...]:
        """Raises Unsupported where the template has not shown all of them."""
        if self._waiting:
            shown = len(self._shown) - len(self._waiting)
            raise Unsupported(
                f"The served model's chat template shows {shown} of the {len(self._shown)} images and videos in the "
                "messages. Send them in messages of the user's.",
                param="messages",
            )
        if self._runs:
            raise BadRequest(MISPLACED_PLACEHOLDERS, param="messages")
        return tuple(
            MediaItem(each.kind, each.digest, tuple(runs), each.layout, each.source)
            for each, runs in zip(self._shown, self._found, strict=True)
        )

    def _written(self, found: re.Match[str]) -> str:
        if not self._waiting or self._waiting[0][1].placeholder.sought != found[0]:
            raise BadRequest(MISPLACED_PLACEHOLDERS, param="messages")
        number, shown = self._waiting.popleft()
        self._runs.extend((number, length) for length in shown.layout.runs)
        return shown.layout.written.replace(ITEM_NUMBER, str(number))


def _placeholder_id(token: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.encode(token, add_special=False)
    if len(ids) != 1:
        raise ModelError(f"The model's tokenizer has no token {token}, which stands for images.")
    return ids[0]
