"""The parts of an answer that no grammar is needed for: forced text, thinking, and what comes around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ingot.text.grammar.ahead import LookingAhead
from ingot.text.grammar.matcher import Guide, GuideBroken, Mask
from ingot.text.grammar.vocabulary import SPACE, Lexicon, allow, allows, forbid

SPACES = tuple(bytes((byte,)) for byte in SPACE)
MOST_SPACES = 4
"""Tokens of white space that may come between thinking and what is held to a plan."""
SPARE_TOKENS = 3
"""By which a budget may be exceeded, to finish a character."""


class ForcedTokens(LookingAhead):
    """These tokens and no others."""

    free = False

    def __init__(self, lexicon: Lexicon, tokens: Sequence[int]) -> None:
        self._lexicon = lexicon
        self._tokens = tokens
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at == len(self._tokens)

    def mask(self) -> Mask | None:
        mask = self._lexicon.nothing()
        if not self.done:
            allow(mask, self._tokens[self._at])
        return mask

    def accept(self, token: int) -> None:
        if self.done or token != self._tokens[self._at]:
            raise GuideBroken("The answer did not go on with the text it was to go on with, and was given up.")
        self._at += 1

    def standing(self) -> int:
        return self._at

    def go_back(self, standing: int) -> None:
        self._at = standing


class ThinkingGuide(LookingAhead):
    """Anything up to `close`; after `budget` tokens, `closing` is forced.

    Where the rest of the answer is held to something (`before_plan`), the answer cannot end here, nor may a token that
    writes the end of `close` go on with more than white space.
    """

    def __init__(
        self, lexicon: Lexicon, close: bytes, closing: Sequence[int], budget: int | None, *, before_plan: bool
    ) -> None:
        self._lexicon, self._close = lexicon, close
        self._left = budget
        self._before_plan = before_plan
        self._written = b""  # its end: as much as may be the beginning of the tag, or half a character
        self._cut = ForcedTokens(lexicon, closing)
        self._cutting = budget is not None and budget <= 0
        self._closed = False

    @property
    def free(self) -> bool:
        if self._closed:
            return not self._before_plan
        return not (self._before_plan or self._cutting) and (self._left is None or self._left >= 2)

    @property
    def done(self) -> bool:
        return self._closed

    def mask(self) -> Mask | None:
        if self._closed or not (self._before_plan or self._cutting):
            return None
        return self._cut.mask() if self._cutting else self._without_ends()

    def accept(self, token: int) -> None:
        if self._closed:
            return
        if self._cutting:
            self._cut.accept(token)
            self._closed = self._cut.done
            return
        self._written += self._lexicon.tokens[token]
        self._closed = self._close in self._written
        self._written = self._written[-max(len(self._close) - 1, 4) :]
        if self._left is not None:
            self._left -= 1
            self._cutting = self._left <= 0 and (_whole(self._written) or self._left <= -SPARE_TOKENS)

    @property
    def narrow(self) -> bool:
        return self._cutting

    def standing(self) -> Any:
        return self._left, self._written, self._cutting, self._closed, self._cut.standing()

    def go_back(self, standing: Any) -> None:
        self._left, self._written, self._cutting, self._closed, cut = standing
        self._cut.go_back(cut)

    def _without_ends(self) -> Mask:
        mask = self._lexicon.unended.copy()
        for id in self._overshooting():
            forbid(mask, id)
        return mask

    def _overshooting(self) -> list[int]:
        """Tokens that would end the tag and go on with something else."""
        lexicon, close = self._lexicon, self._close
        sizes = [size for size in range(len(close)) if self._written.endswith(close[:size])]
        found = [
            id
            for size in sizes
            for id in lexicon.beginning(close[size:])
            if lexicon.tokens[id][len(close) - size :].strip(SPACE)
        ]
        return found + [id for id in lexicon.holding(close) if lexicon.tokens[id].partition(close)[2].strip(SPACE)]


class SpacedGuide(LookingAhead):
    """A guide before which some white space may come."""

    def __init__(self, lexicon: Lexicon, guide: Guide) -> None:
        self._lexicon, self._guide = lexicon, guide
        self._left = MOST_SPACES

    @property
    def free(self) -> bool:
        return self._left == 0 and self._guide.free

    @property
    def done(self) -> bool:
        return self._guide.done

    def mask(self) -> Mask | None:
        mask = self._guide.mask()
        return mask if mask is None or self._left == 0 else mask[: len(self._lexicon.spaces)] | self._lexicon.spaces

    def accept(self, token: int) -> None:
        if self._left and allows(self._lexicon.spaces, token) and not self._guide.admits(token):
            self._left -= 1
            return
        self._left = 0
        self._guide.accept(token)

    def admits(self, token: int) -> bool:
        return self._guide.admits(token) or (self._left > 0 and allows(self._lexicon.spaces, token))

    @property
    def narrow(self) -> bool:
        return self._left == 0 and self._guide.narrow

    def standing(self) -> Any:
        return self._left, self._guide.standing()

    def go_back(self, standing: Any) -> None:
        self._left, own = standing
        self._guide.go_back(own)


class OpeningGuide(LookingAhead):
    """The beginning of an answer that may open with `tag`: then it is `tagged`, else `untagged` or, without, free."""

    def __init__(self, lexicon: Lexicon, tag: bytes, tagged: Guide, untagged: Guide | None) -> None:
        self._lexicon, self._tag = lexicon, tag
        self._tagged, self._untagged = tagged, untagged
        self._held = untagged is not None
        self._written = b""
        self._chosen: Guide | None = None
        self._undecided = True

    @property
    def free(self) -> bool:
        if not self._undecided:
            return self._chosen is None or self._chosen.free
        return not self._held and self._tagged.mask() is None

    @property
    def done(self) -> bool:
        return not self._undecided and self._chosen is not None and self._chosen.done

    def mask(self) -> Mask | None:
        if not self._undecided:
            return None if self._chosen is None else self._chosen.mask()
        if not self._held:
            return None
        mask = self._lexicon.nothing()
        if self._untagged is not None and (own := self._untagged.mask()) is not None:
            mask |= own[: len(mask)]
        for id in self._lexicon.leading_to(self._tag[len(self._written) :]):
            allow(mask, id)
        return mask

    def accept(self, token: int) -> None:
        if not self._undecided:
            if self._chosen is not None:
                self._chosen.accept(token)
            return
        self._written += self._lexicon.tokens[token]
        if not self._tag.startswith(SPACES):
            self._written = self._written.lstrip(SPACE)
        if self._written.startswith(self._tag):
            self._decide(self._tagged)
            return
        begun = self._tag.startswith(self._written)
        if self._untagged is not None and not _follows(self._untagged, token):
            self._untagged = None
        if not begun and self._held and self._untagged is None:
            raise GuideBroken("The answer began as nothing it was to begin as, and was given up.")
        if not begun:
            self._decide(self._untagged)

    def admits(self, token: int) -> bool:
        if self._undecided or self._chosen is None:
            return super().admits(token)
        return self._chosen.admits(token)

    @property
    def narrow(self) -> bool:
        return self._held if self._undecided else self._chosen is not None and self._chosen.narrow

    def standing(self) -> Any:
        untagged = self._untagged
        chosen = self._undecided, self._chosen, self._written
        return chosen, untagged, untagged and untagged.standing(), self._tagged.standing()

    def go_back(self, standing: Any) -> None:
        chosen, self._untagged, untagged, tagged = standing
        self._undecided, self._chosen, self._written = chosen
        if self._untagged is not None:
            self._untagged.go_back(untagged)
        self._tagged.go_back(tagged)

    def _decide(self, chosen: Guide | None) -> None:
        self._undecided = False
        self._chosen = chosen


class AnyGuide(LookingAhead):
    """What any of several guides allows, for as long as it goes on to."""

    free = False

    def __init__(self, lexicon: Lexicon, guides: Sequence[Guide]) -> None:
        self._lexicon = lexicon
        self._guides = list(guides)

    @property
    def done(self) -> bool:
        return all(guide.done for guide in self._guides)

    def mask(self) -> Mask | None:
        masks = [guide.mask() for guide in self._guides]
        either = self._lexicon.nothing()
        for mask in masks:
            if mask is None:
                return None
            either |= mask[: len(either)]
        return either

    def accept(self, token: int) -> None:
        self._guides = [guide for guide in self._guides if _follows(guide, token)]
        if not self._guides:
            raise GuideBroken("The answer went on as nothing it was to go on as, and was given up.")

    def admits(self, token: int) -> bool:
        return any(guide.admits(token) for guide in self._guides)

    @property
    def narrow(self) -> bool:
        return all(guide.narrow for guide in self._guides)

    def standing(self) -> Any:
        return [(guide, guide.standing()) for guide in self._guides]

    def go_back(self, standing: Any) -> None:
        self._guides = [guide for guide, _ in standing]
        for guide, own in standing:
            guide.go_back(own)


class AllGuides(LookingAhead):
    """What all of several guides allow. None of them ends the answer."""

    done = False

    def __init__(self, guides: Sequence[Guide]) -> None:
        self._guides = guides

    @property
    def free(self) -> bool:
        return all(guide.free for guide in self._guides)

    def mask(self) -> Mask | None:
        masks = [mask for guide in self._guides if (mask := guide.mask()) is not None]
        size = min(map(len, masks), default=0)
        return np.bitwise_and.reduce([mask[:size] for mask in masks]) if masks else None

    def accept(self, token: int) -> None:
        for guide in self._guides:
            guide.accept(token)

    def admits(self, token: int) -> bool:
        return all(guide.admits(token) for guide in self._guides)

    @property
    def narrow(self) -> bool:
        return any(guide.narrow for guide in self._guides)

    def standing(self) -> Any:
        return [guide.standing() for guide in self._guides]

    def go_back(self, standing: Any) -> None:
        for guide, own in zip(self._guides, standing, strict=True):
            guide.go_back(own)


class GuideChain(LookingAhead):
    """Guides one after another: the next begins where one is done. Behind the last, unless it `ends`, all is free."""

    def __init__(self, guides: Sequence[Guide], *, ends: bool) -> None:
        self._guides = guides
        self._ends = ends
        self._at = 0
        self._advance()

    @property
    def free(self) -> bool:
        return self._at == len(self._guides) or self._guides[self._at].free

    @property
    def done(self) -> bool:
        return self._ends and self._at == len(self._guides) - 1 and self._guides[self._at].done

    def mask(self) -> Mask | None:
        return None if self._at == len(self._guides) else self._guides[self._at].mask()

    def accept(self, token: int) -> None:
        if self._at < len(self._guides):
            self._guides[self._at].accept(token)
            self._advance()

    def admits(self, token: int) -> bool:
        return self._at == len(self._guides) or self._guides[self._at].admits(token)

    @property
    def narrow(self) -> bool:
        return self._at < len(self._guides) and self._guides[self._at].narrow

    def standing(self) -> Any:
        return self._at, [guide.standing() for guide in self._guides]

    def go_back(self, standing: Any) -> None:
        self._at, each = standing
        for guide, own in zip(self._guides, each, strict=True):
            guide.go_back(own)

    def _advance(self) -> None:
        last = len(self._guides) - 1 if self._ends else len(self._guides)
        while self._at < last and self._guides[self._at].done:
            self._at += 1


def _follows(guide: Guide, token: int) -> bool:
    """Whether the token is for this guide, which then has accepted it."""
    if not guide.admits(token):
        return False
    guide.accept(token)
    return True


def _whole(written: bytes) -> bool:
    """Whether the text does not end within a character."""
    for size in range(1, min(4, len(written) + 1)):
        byte = written[-size]
        if byte < 0x80:
            return True
        if byte >= 0xC0:
            return size >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
