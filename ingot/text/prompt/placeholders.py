"""Pictures and clips in a prompt: what the template wrote for each becomes what the model's own processor writes.

That is done in the text, where it meets its neighbours as one text with them, with one token for each run; runs are
made as long as they are only once the text is encoded.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ingot.errors import BadRequest, ModelError, Unsupported
from ingot.media.items import MediaItem, Shown, Span
from ingot.text.prompt.encoded import EncodedText

if TYPE_CHECKING:
    from ingot.text.tokenizer.tokenizer import Tokenizer

AMISS = "The messages hold the text of tokens that stand for pictures, which only the server may write. Leave it out."


class Placeholders:
    """Of one prompt. Its texts are written in their order, then encoded in the same."""

    def __init__(self, shown: Sequence[Shown], tokenizer: Tokenizer) -> None:
        self._shown = shown
        self._waiting = deque(enumerate(shown))
        self._tokens = {each.layout.token: _id(each.layout.token, tokenizer) for each in shown}
        self._sought = re.compile(
            "|".join(sorted({re.escape(each.placeholder.sought) for each in shown}, key=len)[::-1])
        )
        self._runs: deque[tuple[int, int]] = deque()  # whose each run is, and how long, as they were written
        self._found: list[list[Span]] = [[] for _ in shown]

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
        made: list[int] = []
        moved: list[int] = []
        known = set(self._tokens.values())
        for at, token in enumerate(ids):
            while len(moved) < len(ends) and ends[len(moved)] <= at:
                moved.append(len(made))
            if token not in known:
                made.append(token)
                continue
            if not self._runs:
                raise BadRequest(AMISS, param="messages")
            number, length = self._runs.popleft()
            self._found[number].append((begin + len(made), begin + len(made) + length))
            made += [token] * length
        return made, [*moved, *[len(made)] * (len(ends) - len(moved))]

    def items(self) -> tuple[MediaItem, ...]:
        """Raises Unsupported where the template has not shown all of them."""
        if self._waiting:
            shown = len(self._shown) - len(self._waiting)
            raise Unsupported(
                f"The served model's chat template shows {shown} of the {len(self._shown)} pictures and clips in the "
                "messages. Send them in messages of the user's.",
                param="messages",
            )
        if self._runs:
            raise BadRequest(AMISS, param="messages")
        return tuple(
            MediaItem(each.kind, each.digest, tuple(runs), each.layout, each.source)
            for each, runs in zip(self._shown, self._found, strict=True)
        )

    def _written(self, found: re.Match[str]) -> str:
        if not self._waiting or self._waiting[0][1].placeholder.sought != found[0]:
            raise BadRequest(AMISS, param="messages")
        number, shown = self._waiting.popleft()
        self._runs.extend((number, length) for length in shown.layout.runs)
        return shown.layout.written


def _id(token: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.encode(token, add_special=False)
    if len(ids) != 1:
        raise ModelError(f"The model's tokenizer has no token {token}, which stands for pictures.")
    return ids[0]
