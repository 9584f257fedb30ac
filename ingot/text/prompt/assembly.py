"""Texts and remembered tokens put one after another, and where each of them lies in the tokens that come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from ingot.errors import ContextOverflow
from ingot.text.cancellation import checkpoint
from ingot.text.prompt.encoded import EncodedText, EncodedTexts
from ingot.text.prompt.placeholders import Placeholders
from ingot.text.prompt.prompt import MessageSpan
from ingot.text.tokenizer.special_tokens import Quoting

if TYPE_CHECKING:
    from ingot.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenOwner:
    """Whose the tokens are: a message of the client's, or the template's own."""

    message: int | None = None
    role: str = ""


@dataclass(frozen=True, slots=True)
class _Strand:
    owner: TokenOwner
    text: str
    tokens: Sequence[int] | None = None  # None: the text is still to be encoded
    quoted: tuple[int, ...] = ()  # where it only looks as if a control token began


class Weaver:
    """Texts that follow one another give the tokens of one text: how they were cut cannot be seen."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encodings: EncodedTexts,
        salt: str,
        quoting: Quoting,
        placeholders: Placeholders | None = None,
    ) -> None:
        self._tokenizer, self._encodings, self._salt, self._quoting = tokenizer, encodings, salt, quoting
        self._placeholders = placeholders
        self._strands: list[_Strand] = []

    @property
    def text(self) -> str:
        return "".join(strand.text for strand in self._strands)

    def add_text(self, owner: TokenOwner, text: str) -> None:
        if self._placeholders is not None:  # before quoted text looks like a token again
            text = self._placeholders.write(text)
        meant, quoted = self._quoting.read(text)
        self._strands.append(_Strand(owner, meant, None, quoted))

    def add_tokens(self, owner: TokenOwner, tokens: Sequence[int]) -> None:
        self._strands.append(_Strand(owner, self._tokenizer.decode(tokens, skip_special=False), tokens))

    def check_length(self, most: int) -> None:
        """Raises ContextOverflow where there are more tokens than so many, whatever the texts are encoded to."""
        known = sum(len(strand.tokens) for strand in self._strands if strand.tokens is not None)
        known += 0 if self._placeholders is None else self._placeholders.further
        text = "".join(strand.text for strand in self._strands if strand.tokens is None)
        # No token is less than a byte, so that most texts need not be looked at.
        least = known + (self._tokenizer.least_tokens(text) if known + 4 * len(text) > most else 0)
        if least > most:
            raise ContextOverflow(needed=least, limit=most, counted=False)

    def woven(self, *, add_special: bool) -> tuple[tuple[int, ...], tuple[MessageSpan, ...]]:
        """All tokens, and whose they are; the last span may be empty. `add_special` is for the very beginning."""
        tokens: list[int] = []
        spans: list[MessageSpan] = []
        for run in self._runs():
            checkpoint()
            encoded = self._encoded(run, add_special=add_special and not tokens)
            ids, ends = self._expanded(encoded, run, len(tokens))
            for strand, end in zip(run, ends, strict=True):
                _extend(spans, strand.owner, len(tokens) + end)
            tokens.extend(ids)
        return tuple(tokens), (*(span for span in spans[:-1] if span.end > span.begin), *spans[-1:])

    def _runs(self) -> Iterator[list[_Strand]]:
        """Strands that have to be encoded together; those of tokens stand alone."""
        run: list[_Strand] = []
        for strand in self._strands:
            if run and (strand.tokens is not None or self._set_apart(strand)):
                yield run
                run = []
            run.append(strand)
            if strand.tokens is not None:
                yield run
                run = []
        if run:
            yield run

    def _set_apart(self, strand: _Strand) -> bool:
        return 0 not in strand.quoted and self._tokenizer.sets_apart(strand.text)

    def _encoded(self, run: list[_Strand], *, add_special: bool) -> EncodedText:
        if run[0].tokens is not None:
            return run[0].tokens, [len(run[0].tokens)]
        text = "".join(strand.text for strand in run)
        places = list(accumulate(len(strand.text) for strand in run))
        quoted = None if self._quoting.trusting else tuple(_moved(run, places))
        made: EncodedText
        if add_special:
            made = self._tokenizer.encode_with_places(text, places, add_special=True, quoted=quoted)
        else:
            made = self._encodings.encode(self._tokenizer, text, places, salt=self._salt, quoted=quoted)
        ids, ends = made
        return ids, [*ends[:-1], len(ids)]

    def _expanded(self, encoded: EncodedText, run: list[_Strand], begin: int) -> EncodedText:
        """Remembered tokens hold no pictures, whatever the model wrote."""
        if self._placeholders is None or run[0].tokens is not None:
            return encoded
        return self._placeholders.expand(encoded, begin)


def _moved(run: list[_Strand], ends: list[int]) -> Iterator[int]:
    """The places that are quoted in each strand, counted from the beginning of the run."""
    for strand, end in zip(run, ends, strict=True):
        yield from (end - len(strand.text) + place for place in strand.quoted)


def _extend(spans: list[MessageSpan], owner: TokenOwner, end: int) -> None:
    """The strand that ends here continues its owner's span or begins a new one."""
    last = spans[-1] if spans else None
    if last is not None and (last.message, last.role) == (owner.message, owner.role):
        spans[-1] = MessageSpan(owner.message, owner.role, last.begin, end)
    else:
        spans.append(MessageSpan(owner.message, owner.role, last.end if last is not None else 0, end))
