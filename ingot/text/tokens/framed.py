"""Encoding where a control token is one only in some of the places where its text stands.

The libraries find tokens by their text alone. So here, in a copy that shares the model and all else, control tokens
are spelled in a way that nobody can guess, and where one is meant, that is what is encoded.
"""

from __future__ import annotations

import json
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Library

from ingot.text.characters import whole_characters
from ingot.text.tokenizer.special_tokens import finder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizer


class Framed(Protocol):
    always: bool  # the plain encoder may find control tokens where their text does not stand

    def encode(self, text: str, places: Sequence[int], quoted: Collection[int]) -> tuple[list[int], list[int]]:
        """The ids, and how many of them end before or at each of the places.

        A control token whose text begins at a place that is `quoted` is encoded as text.
        """


class FramedLibrary:
    def __init__(self, library: Library, controls: Collection[str]) -> None:
        added = {id: token for id, token in library.get_added_tokens_decoder().items() if token.content}
        secret = secrets.token_hex(8)
        self._controls = frozenset(controls)
        self._spelled = {
            token: f"\ue000{secret}:{at}{'.' * len(token)}\ue001" for at, token in enumerate(sorted(controls))
        }
        self._cut = f"\ue000{secret}:cut\ue001"
        self._library = _sharing(library)
        self._library.add_tokens([self._respelled(token) for _, token in sorted(added.items())])
        self._library.add_tokens([AddedToken(self._cut, normalized=False)])
        self._ids = {self._id(self._spelled.get(token.content, token.content)): id for id, token in added.items()}
        self._dropped = self._id(self._cut)
        self.always = _normalizes(library) and any(t.normalized for t in added.values() if t.content in self._spelled)
        # A model may know the text of a control token as a piece of its own, and find it in a text.
        known = {library.token_to_id(token) for token in controls}
        found = {id for token in controls for id in self._encoded(token).ids}
        self._cuts = bool(known & {self._ids.get(id, id) for id in found})

    def encode(self, text: str, places: Sequence[int], quoted: Collection[int]) -> tuple[list[int], list[int]]:
        spelled, moved = self._spell(text, quoted)
        encoding = self._encoded(spelled)
        ends = [end for _, end in encoding.offsets]
        counts = [bisect_right(ends, moved(place)) for place in places]
        ids = [self._ids.get(id, id) for id in encoding.ids]
        if not self._cuts:
            return ids, counts
        kept = [at for at, id in enumerate(encoding.ids) if id != self._dropped]
        return [ids[at] for at in kept], [bisect_left(kept, count) for count in counts]

    def _encoded(self, text: str) -> Encoding:
        with whole_characters():
            [encoding] = self._library.encode_batch([text], add_special_tokens=False)
        return encoding

    def _spell(self, text: str, quoted: Collection[int]) -> tuple[str, Callable[[int], int]]:
        """The text with its control tokens in their secret spelling, and where each place in it is then."""
        pieces: list[str] = []
        begins, shifts, since, shift = [0], [0], 0, 0
        for begin, end in self._changes(text, quoted):
            written = self._spelled[text[begin:end]] if end > begin else self._cut
            pieces += [text[since:begin], written]
            since, shift = end, shift + len(written) - (end - begin)
            begins.append(end)
            shifts.append(shift)
        moved = "".join((*pieces, text[since:]))
        return moved, lambda place: place + shifts[bisect_right(begins, place) - 1]

    def _changes(self, text: str, quoted: Collection[int]) -> Iterator[tuple[int, int]]:
        """Where control tokens stand that are meant, and where those that are not are to be cut, if need be."""
        for begin, end, meant in meanings(text, self._controls, quoted):
            if meant:
                yield begin, end
            elif self._cuts:
                yield begin + 1, begin + 1

    def _respelled(self, token: AddedToken) -> AddedToken:
        spelled = self._spelled.get(token.content)
        if spelled is None:
            return token
        return AddedToken(spelled, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=token.special)

    def _id(self, content: str) -> int:
        id = self._library.token_to_id(content)
        assert id is not None, "it was just added"
        return id


class FramedSlow:
    """For tokenizers that run in Python: what lies between control tokens is encoded by itself."""

    always = False

    def __init__(self, slow: PreTrainedTokenizer, controls: Collection[str]) -> None:
        self._slow, self._controls = slow, frozenset(controls)

    def encode(self, text: str, places: Sequence[int], quoted: Collection[int]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        ends: list[int] = []
        since = 0
        for begin, end, meant in (*meanings(text, self._controls, quoted), (len(text), len(text), True)):
            if not meant:
                continue
            between = self._plain(text[since:begin])
            ids += between
            ends += [begin] * len(between)
            if end > begin:
                ids.append(cast(int, self._slow.convert_tokens_to_ids(text[begin:end])))
                ends.append(end)
            since = end
        return ids, [bisect_right(ends, place) for place in places]

    def _plain(self, text: str) -> list[int]:
        options: Any = {"add_special_tokens": False, "split_special_tokens": True}
        return self._slow.encode(text, **options) if text else []


def meanings(text: str, controls: frozenset[str], quoted: Collection[int]) -> Iterator[tuple[int, int, bool]]:
    """Where control tokens stand in a text, one after another, and whether each is meant."""
    pattern, at, unmeant = finder(controls).pattern, 0, frozenset(quoted)
    while pattern is not None and (found := pattern.search(text, at)) is not None:
        meant = found.start() not in unmeant
        yield *found.span(), meant
        at = found.end() if meant else found.start() + 1


def _sharing(library: Library) -> Library:
    """A library with the same model and the same steps, and no added tokens yet."""
    made = Library(library.model)
    if library.normalizer is not None:
        made.normalizer = library.normalizer
    if library.pre_tokenizer is not None:
        made.pre_tokenizer = library.pre_tokenizer
    return made


def _normalizes(library: Library) -> bool:
    if library.normalizer is None:
        return False
    state = json.loads(library.normalizer.__getstate__())
    return state["type"] != "Sequence" or bool(state["normalizers"])
