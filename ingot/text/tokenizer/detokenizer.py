"""From generated tokens to text: incremental detokenization, and stop strings.

Nothing is emitted that a later token would change. Everything pushed and flushed, put together, is what decoding all
the ids at once (special tokens skipped) gives. Special tokens that are to be shown appear by their names, between the
texts around them.

Stop strings are found however the text is cut into pieces. An Aho-Corasick automaton reads each character once, so the
cost is linear in the text whatever the strings are. Its state is the longest suffix of the text that could still become
a stop string: exactly what must be buffered.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ingot.errors import BadRequest
from ingot.text.tokenizer.length_bounds import BYTE_ALPHABET
from ingot.text.tokenizer.vocabulary import Vocabulary


class ByteDetokenizer:
    """For vocabularies whose tokens are runs of bytes: the text is their UTF-8 reading."""

    def __init__(self, token_bytes: Callable[[int], bytes], hidden_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._hidden_ids = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is now certain; empty while a character is incomplete."""
        if token in self._hidden_ids:
            return ""
        return self._utf8.decode(self._token_bytes(token))

    def flush(self) -> str:
        """The sequence has ended: the remaining text, with U+FFFD for what was never completed."""
        return self._utf8.decode(b"", final=True)


class PieceDetokenizer:
    """For every other vocabulary: has the library decode a few tokens at a time.

    Such decoders treat a text's first token specially (a leading space is dropped) and a run of byte tokens as one. So
    nothing is decided inside a run of byte tokens, and once there is text, later tokens are decoded after an anchor, a
    plain token whose own text is removed again.
    """

    # A Python tokenizer may leave a character open without a byte token; no character takes more tokens than this.
    _LONGEST_CHARACTER = 8

    def __init__(self, vocabulary: Vocabulary, anchor: int, shown_ids: frozenset[int] = frozenset()) -> None:
        self._vocabulary = vocabulary
        self._shown_ids = shown_ids
        self._anchor = anchor
        self._anchor_size = len(vocabulary.decode([anchor], skip_special=True))
        self._waiting: list[int] = []
        self._started = False

    def push(self, token: int) -> str:
        piece = self._vocabulary.piece(token)
        if piece and token in self._shown_ids:
            before = self.flush()
            self._started = True
            return before + piece
        if not piece or token in self._vocabulary.special_ids:
            return ""
        self._waiting.append(token)
        if fallback_byte(piece) is not None:
            return ""
        text = self._decoded()
        if text.endswith("�") and not piece.endswith("�") and len(self._waiting) < self._LONGEST_CHARACTER:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decoded()) if self._waiting else ""

    def _decoded(self) -> str:
        if not self._started:
            return self._vocabulary.decode(self._waiting, skip_special=True)
        behind = self._vocabulary.decode([self._anchor, *self._waiting], skip_special=True)
        return behind[self._anchor_size :]

    def _emit(self, text: str) -> str:
        # Until there is text, the rule for its start has not been spent.
        self._started = self._started or text != ""
        if self._started:
            self._waiting.clear()
        return text


Detokenizer = ByteDetokenizer | PieceDetokenizer
"""One sequence's. Belongs to one thread at a time."""


@dataclass(frozen=True, slots=True)
class ReleasedText:
    """Text that is safe to send, and the stop string that ended the stream, if one did."""

    text: str
    stopped_by: str | None


@dataclass(slots=True)
class _StopNode:
    depth: int
    next: dict[str, int]
    fallback: int = 0  # the node of the longest proper suffix that is in the trie
    found: str | None = None  # the longest stop string that ends here


@lru_cache(maxsize=32)
def _stop_automaton(strings: tuple[str, ...]) -> tuple[_StopNode, ...]:
    nodes = [_StopNode(0, {})]
    for string in strings:
        at = 0
        for char in string:
            if char not in nodes[at].next:
                nodes[at].next[char] = len(nodes)
                nodes.append(_StopNode(nodes[at].depth + 1, {}))
            at = nodes[at].next[char]
        nodes[at].found = string
    _link_fallbacks(nodes)
    return tuple(nodes)


def _link_fallbacks(nodes: list[_StopNode]) -> None:
    """Breadth first, so that a node's fallback, being shallower, is complete before the node needs it."""
    queue = deque(nodes[0].next.values())
    while queue:
        node = nodes[queue.popleft()]
        for char, child in node.next.items():
            queue.append(child)
            nodes[child].fallback = _next_node(nodes, node.fallback, char)
            if nodes[child].found is None:
                nodes[child].found = nodes[nodes[child].fallback].found


def _next_node(nodes: list[_StopNode] | tuple[_StopNode, ...], at: int, char: str) -> int:
    while at and char not in nodes[at].next:
        at = nodes[at].fallback
    return nodes[at].next.get(char, 0)


class StopMatcher:
    """Ends a stream of text at the first stop string that is complete in it.

    The match that ends earliest wins, as a reader of the stream would see it; of several that end at the same
    character, the longest. With `keep` the matched string stays in the text, else the text ends before it. All pushes
    together give the same text however it was cut. Nothing follows a stop.
    """

    def __init__(self, strings: tuple[str, ...], keep: bool) -> None:
        if "" in strings:
            raise BadRequest("A stop string must not be empty.", param="stop")
        self._nodes = _stop_automaton(strings)
        self._keep = keep
        self._at = 0
        self._buffer: deque[str] = deque()
        self._buffered = 0
        self._stopped_by: str | None = None

    def push(self, text: str) -> ReleasedText:
        if self._stopped_by is not None or not text:
            return ReleasedText("", self._stopped_by)
        before = self._buffered
        self._buffer.append(text)
        self._buffered += len(text)
        read = self._read(text)
        if self._stopped_by is None:
            # With `keep`, text is sent whether or not it becomes a match, so there is nothing to wait for.
            waiting = 0 if self._keep else self._nodes[self._at].depth
            return ReleasedText(self._take(self._buffered - waiting), None)
        end = before + read
        released = self._take(end if self._keep else end - len(self._stopped_by))
        self._buffer.clear()
        self._buffered = 0
        return ReleasedText(released, self._stopped_by)

    def flush(self) -> str:
        """The text has ended: what was buffered for a match that never came."""
        return self._take(self._buffered)

    def _read(self, text: str) -> int:
        """Advance over `text`, up to the end of a match if there is one; the number of characters read."""
        nodes, at = self._nodes, self._at
        if len(nodes) == 1:
            return len(text)
        for index, char in enumerate(text):
            at = _next_node(nodes, at, char)
            if nodes[at].found is not None:
                self._stopped_by = nodes[at].found
                return index + 1
        self._at = at
        return len(text)

    def _take(self, size: int) -> str:
        """The first `size` buffered characters. Pieces, not one string: text is never copied again and again."""
        pieces = []
        self._buffered -= size
        while size > 0:
            piece = self._buffer.popleft()
            if len(piece) > size:
                self._buffer.appendleft(piece[size:])
                piece = piece[:size]
            pieces.append(piece)
            size -= len(piece)
        return "".join(pieces)


def spell_token_bytes(vocabulary: Vocabulary, token: int) -> bytes:
    """The token's own bytes, which may be part of a character. A special token's are its name's."""
    piece = vocabulary.piece(token)
    if piece is None:
        return b""
    if token in vocabulary.special_ids or vocabulary.spelling == "plain":
        return piece.encode()
    if vocabulary.spelling == "bytes":
        return _from_byte_alphabet(piece)
    byte = fallback_byte(piece)
    return piece.replace("▁", " ").encode() if byte is None else bytes([byte])


def _from_byte_alphabet(piece: str) -> bytes:
    try:
        return bytes(map(BYTE_ALPHABET.__getitem__, piece))
    except KeyError:  # an added token, written as plain text
        return piece.encode()


def fallback_byte(piece: str) -> int | None:
    """The byte that a fallback piece such as `<0x0A>` stands for."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None
