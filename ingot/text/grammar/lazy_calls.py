"""Lazy grammars for calls: a call follows its schema once it has begun, while all text around it is free.

A call has begun for certain after the family's marker, or without one where a tool of the request is named as the
parser expects it. From there on it follows the grammar of its form and its tool's schema. The only token that is
constrained before that is the one that ends a marker: it may not go on as no call does.

A grammar that fails here leaves the rest of the answer free, as it would be without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

from ingot.errors import IngotError
from ingot.text.grammar.compiled import LlguidanceGrammar, LlguidanceMatcher
from ingot.text.grammar.matcher import GrammarMatcher, TokenMask
from ingot.text.grammar.vocabulary import GrammarVocabulary, forbid_token
from ingot.text.parser.parser import ThinkingStart, TriggerPosition, triggers_of
from ingot.text.parser.prose import CodeFences
from ingot.text.parser.reader import Markers, make_markers
from ingot.text.tool_formats.format import Arguments, CallId, Format, Gap, JsonCall, Maybe, Name, Part, TagEnd

LONGEST_BEGINNING: Final = 1024  # characters within which a call without a marker names its tool
_SPACE: Final = " \t\r\n"
_ID: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"

CallBeginning = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _CallSign:
    """What a marker means at a position: a call begins ("hold"), may begin if one of its `beginnings` follows
    ("watch"), thinking opens or closes, a message's header begins or ends, or nothing ("pass")."""

    marker: str
    position: TriggerPosition | Literal["header"]
    action: Literal["hold", "watch", "open", "close", "header", "body", "pass"]
    beginnings: tuple[CallBeginning, ...] = ()


@dataclass(frozen=True)  # without slots: what follows from it is found once
class LazyCallGrammar:
    """Text is read by its bytes, each as a character, since a token may end within one."""

    vocabulary: GrammarVocabulary
    call_grammar: LlguidanceGrammar
    format: Format
    tools: tuple[str, ...]
    start: ThinkingStart
    hidden_ids: frozenset[int] = frozenset()  # special tokens that the parser is not shown

    def begin(self) -> GrammarMatcher:
        return LazyCallMatcher(self)

    def prepare(self) -> LazyCallGrammar:
        """Compute now what matchers need: they run on the engine's time."""
        assert self.overshooting is not None and self.watched is not None and self.signs is not None
        return self

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(map(_as_byte_text, self.tools))

    @cached_property
    def signs(self) -> tuple[Mapping[str, list[_CallSign]], Markers]:
        found: dict[str, list[_CallSign]] = {}
        for sign in _call_signs(self.format):
            found.setdefault(sign.marker, []).append(sign)
        return found, make_markers(*sorted(found))

    @cached_property
    def closing(self) -> Markers:
        assert self.format.thinking is not None
        return make_markers(_as_byte_text(self.format.thinking.close))

    @cached_property
    def opening_in_prompt(self) -> tuple[CallBeginning, ...]:
        """Of calls whose marker the prompt may end with."""
        forms = (form for form in self.format.forms if form.opening_in_prompt)
        return tuple(_call_beginning((*form.opening[1:], *form.call)) for form in forms)

    @cached_property
    def marker_tokens(self) -> dict[str, tuple[int, ...]]:
        """The markers after which calls are constrained, and the tokens that write them."""
        found = {
            sign.marker: sign.marker.encode("latin-1") for sign in _call_signs(self.format) if sign.action == "hold"
        }
        return {marker: tuple(self.vocabulary.encode(text.decode())) for marker, text in found.items()}

    @cached_property
    def overshooting(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """After so many characters of a marker: the tokens that end it and go on as no call does."""
        found = {}
        for marker, ids in self.marker_tokens.items():
            text = marker.encode("latin-1")
            matcher = self.call_grammar.begin()
            if not matcher.follow(ids):
                continue
            for size in range(1, len(text)):
                if bad := [
                    id for id in self.vocabulary.overshooting(text, size) if not self._goes_on(matcher, text, size, id)
                ]:
                    found[marker, size] = tuple(bad)
        return found

    @cached_property
    def watched(self) -> dict[str, frozenset[int]]:
        """How much of a marker is written where the next token may end it, or lead to one that is forbidden."""
        return {marker: self.vocabulary.leading_up_to(marker.encode("latin-1")) for marker in self.marker_tokens}

    def _goes_on(self, matcher: LlguidanceMatcher, text: bytes, size: int, id: int) -> bool:
        return matcher.could_follow(self.ids(self.vocabulary.tokens[id][len(text) - size :]))

    def ids(self, text: bytes) -> list[int]:
        return self.vocabulary.library.tokenize_bytes(text) if text else []


@dataclass(slots=True)
class _AnswerPosition:
    """How far an answer was read, and what matters of the text before."""

    thinking: bool = False
    header: bool = True  # of a message
    unread: str = ""  # may be the beginning of a marker, or of a call without one
    tokens: tuple[int, ...] = ()  # that it came in
    passed: int = 0  # characters of the first of them that are read
    blank: bool = True  # nothing but white space since the beginning or the last marker
    at_line_start: bool = True
    last: str = ""  # the last character of the text since then
    called: bool = False
    has_thought: bool = False  # a part of thinking was closed
    beginnings: tuple[CallBeginning, ...] = ()  # of a call that may begin here,
    in_prompt: bool = False  # in the prompt
    fences: CodeFences = field(default_factory=CodeFences)
    call_matcher: LlguidanceMatcher | None = None


class LazyCallMatcher(GrammarMatcher):
    def __init__(self, grammar: LazyCallGrammar) -> None:
        self._grammar = grammar
        opened = grammar.start is ThinkingStart.OPENED and grammar.format.thinking is not None
        begins = () if opened else grammar.opening_in_prompt
        self._position = _AnswerPosition(thinking=opened, beginnings=begins, in_prompt=bool(begins))

    @property
    def done(self) -> bool:
        return False

    @property
    def free(self) -> bool:
        position = self._position
        if position.call_matcher is not None or position.beginnings:
            return False
        return position.thinking or not any(
            position.unread.endswith(marker[:size]) for marker, sizes in self._grammar.watched.items() for size in sizes
        )

    def mask(self) -> TokenMask | None:
        if self._position.call_matcher is None:
            return self._without_overshooting()
        try:
            return self._position.call_matcher.mask()
        except IngotError:  # which is logged
            self._restart()
            return None

    def accept(self, token: int) -> None:
        call_matcher = self._position.call_matcher
        if call_matcher is None:
            self._follow(token)
            return
        try:
            call_matcher.accept(token)
            ended = call_matcher.done
        except IngotError:
            ended = True
        if ended:
            self._restart()

    def admits(self, token: int) -> bool:
        call_matcher = self._position.call_matcher
        try:
            return super().admits(token) if call_matcher is None else call_matcher.admits(token)
        except IngotError:
            self._restart()
            return True

    @property
    def narrow(self) -> bool:
        return self._position.call_matcher is not None and self._position.call_matcher.narrow

    def snapshot(self) -> Any:
        position = self._position
        copied = replace(position, fences=copy(position.fences))
        return copied, position.call_matcher and position.call_matcher.snapshot()

    def rollback(self, snapshot: Any) -> None:
        self._position, own = snapshot
        if self._position.call_matcher is not None:
            self._position.call_matcher.rollback(own)

    def _without_overshooting(self) -> TokenMask | None:
        position, overshooting = self._position, self._grammar.overshooting
        if position.thinking or not position.unread or not overshooting:
            return None
        found = [ids for (marker, size), ids in overshooting.items() if position.unread.endswith(marker[:size])]
        if not found:
            return None
        mask = self._grammar.vocabulary.everything()
        for id in (id for ids in found for id in ids):
            forbid_token(mask, id)
        return mask

    # Free text is read as the parser reads it.

    def _follow(self, token: int) -> None:
        if token in self._grammar.hidden_ids or not (text := self._grammar.vocabulary.tokens[token]):
            return
        position = self._position
        position.unread += text.decode("latin-1")
        position.tokens = (*position.tokens, token)
        while self._position.unread and self._reads_on():
            pass

    def _reads_on(self) -> bool:
        """Reads what is certain. Whether there may be more that is."""
        position = self._position
        if position.beginnings:
            return self._watch()
        if position.thinking:
            return self._think()
        signs, found = self._grammar.signs
        at, marker = found.find(position.unread, 0, ended=False)
        self._write(at)
        if marker is None:
            return False
        sign = next((sign for sign in signs[marker] if self._is_at(sign.position)), None)
        if sign is None:
            self._write(1)
        else:
            self._act(sign)
        return True

    def _think(self) -> bool:
        at, marker = self._grammar.closing.find(self._position.unread, 0, ended=False)
        self._pass(at + len(marker or ""))
        if marker is not None:
            self._position.thinking, self._position.has_thought = False, True
            self._refresh()
        return marker is not None

    def _watch(self) -> bool:
        position = self._position
        begins = [_begins_call(beginning, position.unread, self._grammar.names) for beginning in position.beginnings]
        if True in begins and self._hold(self._unread_tokens()):
            return False
        if True not in begins and None in begins and len(position.unread) < LONGEST_BEGINNING:
            return False
        position.beginnings = ()
        self._write(0 if position.in_prompt else 1)
        position.in_prompt = False
        return True

    def _is_at(self, where: str) -> bool:
        position = self._position
        match where:
            case "fresh":
                return position.blank
            case "line":
                return position.at_line_start or self._is_attached()
            case "unfenced line":
                return position.at_line_start and not position.fences.open
            case "after a call":
                return position.blank and position.called
            case "after thinking":
                return position.has_thought and position.at_line_start
            case "header":
                return position.header
        return True

    def _is_attached(self) -> bool:
        """Whether what comes next stands right behind a word or a sentence."""
        last = self._position.last
        return not self._position.fences.open and (last.isalnum() or last in tuple(".!?:;") or last > "\x7f")

    def _act(self, sign: _CallSign) -> None:
        position = self._position
        match sign.action:
            case "hold":
                behind = position.unread[len(sign.marker) :].encode("latin-1")
                if not self._hold([*self._grammar.marker_tokens[sign.marker], *self._grammar.ids(behind)]):
                    self._write(len(sign.marker))
            case "watch":
                position.beginnings = sign.beginnings
            case "pass":
                self._pass(len(sign.marker))
            case "open" | "close":
                self._pass(len(sign.marker))
                self._refresh()
                position.called, position.thinking = False, sign.action == "open"
            case "header" | "body":
                self._write(len(sign.marker))
                position.header = sign.action == "header"

    def _hold(self, tokens: Sequence[int]) -> bool:
        """Constrain the call that these tokens begin. Whether they begin one."""
        try:
            matcher = self._grammar.call_grammar.begin()
            if not matcher.follow(tokens):
                return False
        except IngotError:
            return False
        before = self._position
        self._position = _AnswerPosition(
            called=True, has_thought=before.has_thought, fences=before.fences, call_matcher=matcher
        )
        if matcher.done:
            self._restart()
        return True

    def _restart(self) -> None:
        """A call has ended."""
        self._position.call_matcher, self._position.header = None, False
        self._refresh()

    def _refresh(self) -> None:
        """A marker stands here, with no text behind it yet."""
        self._position.fences.end_line()
        self._position.blank = self._position.at_line_start = True
        self._position.last = ""

    def _unread_tokens(self) -> list[int]:
        """The tokens of what is unread."""
        position = self._position
        if not position.passed:
            return list(position.tokens)
        return [
            *self._grammar.ids(self._grammar.vocabulary.tokens[position.tokens[0]][position.passed :]),
            *position.tokens[1:],
        ]

    def _write(self, size: int) -> None:
        """So much of what is unread is text."""
        position = self._position
        text = position.unread[:size]
        position.fences.write(text)
        position.blank = position.blank and not text.strip(_SPACE)
        position.last = text[-1:] or position.last
        line = text[text.rfind("\n") + 1 :]
        position.at_line_start = not line.strip(_SPACE) and (position.at_line_start or "\n" in text)
        self._pass(size)

    def _pass(self, size: int) -> None:
        position, tokens = self._position, self._grammar.vocabulary.tokens
        position.unread = position.unread[size:]
        position.passed += size
        while position.tokens and position.passed >= (length := len(tokens[position.tokens[0]])):
            position.passed -= length
            position.tokens = position.tokens[1:]


def _call_signs(format: Format) -> Iterator[_CallSign]:
    if (channels := format.channels) is not None:
        yield _CallSign(_as_byte_text(channels.recipient), "header", "hold")
        yield from (_CallSign(_as_byte_text(text), "anywhere", "header") for text in (channels.start, *channels.begins))
        yield from (_CallSign(_as_byte_text(text), "anywhere", "body") for text in (*channels.bodies, *channels.ends))
        return
    triggers = triggers_of(format, True)[0]
    for trigger in (one for several in triggers.values() for one in several):
        marker, forms = _as_byte_text(trigger.marker), trigger.forms
        longer = any(text != trigger.marker and text.startswith(trigger.marker) for text in triggers)
        match trigger.action:
            case "open" if not (longer or any(form.bare for form in forms)):
                yield _CallSign(marker, trigger.position, "hold")
            case "open":
                beginnings = (_call_beginning((*form.opening, *form.call)) for form in forms)
                yield _CallSign(marker, trigger.position, "watch", tuple(dict.fromkeys(beginnings)))
            case "call":
                beginnings = (_call_beginning(form.call) for form in forms)
                yield _CallSign(marker, trigger.position, "watch", tuple(dict.fromkeys(beginnings)))
            case "think":
                opens = format.thinking is not None and trigger.marker == format.thinking.open
                yield _CallSign(marker, trigger.position, "open" if opens else "close")
            case "strip":
                yield _CallSign(marker, trigger.position, "pass")
    joints = {form.joint.strip() for form in format.forms if form.joint and not form.closing} - {""}
    yield from (_CallSign(_as_byte_text(joint), "after a call", "pass") for joint in sorted(joints))


def _call_beginning(parts: Iterable[Part]) -> CallBeginning:
    """The parts of a call up to where its tool is named for certain."""
    found: list[Part] = []
    for part in parts:
        match part:
            case JsonCall():
                key = ("{", Gap(), f'"{part.name_key}"', Gap(), ":", Gap(), '"', Name(), '"')
                return (*found, *key)
            case Name(numbered=True):
                return (*found, Maybe("functions."), Name(), ":")
            case Arguments():
                return (*found, _as_byte_text(part.notation.opens))
            case TagEnd() | str():
                found.append(_as_byte_text(part.text if isinstance(part, TagEnd) else part))
                if any(isinstance(each, Name) for each in found):
                    return tuple(found)
            case Name() | Gap() | CallId():
                found.append(part)
            case Maybe():
                found.append(Maybe(_as_byte_text(part.text)))
            case _:
                break
    while isinstance(found[-1], Gap | Maybe):  # these decide nothing
        found.pop()
    return tuple(found)


def _begins_call(beginning: CallBeginning, text: str, names: Sequence[str]) -> bool | None:
    """Whether the text begins so; None where it may yet."""
    for index, part in enumerate(beginning):
        match part:
            case Gap():
                text = text.lstrip(_SPACE)
            case CallId():
                text = text.lstrip(_ID)
            case Maybe():
                if part.text.startswith(text):
                    return None
                text = text.removeprefix(part.text)
            case Name():
                behind = beginning[index + 1 :]
                results = [_begins_call(behind, text[len(name) :], names) for name in names if text.startswith(name)]
                if True in results:
                    return True
                return None if None in results or any(name.startswith(text) for name in names) else False
            case str():
                if not text.startswith(part):
                    return None if part.startswith(text) else False
                text = text[len(part) :]
    return True


def _as_byte_text(text: str) -> str:
    return text.encode().decode("latin-1")
