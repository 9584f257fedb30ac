"""Lazy grammars for calls: held to their schema once they have begun, while all text around them is free.

A call has begun for certain where the family's marker stands, or without one where a given tool is named in the way
that the parser takes for a call. Then the rest of it is held to the grammar of its form and its tool's schema. Only one
token before that is looked at: of those that end a marker, none may go on as no call does.

What cannot be held is not: a grammar that fails here leaves the rest of the answer free, as it would be without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

from ingot.errors import IngotError
from ingot.text.grammar.compiled import LlguidanceGrammar, LlguidanceMatcher, RollbackMatcher
from ingot.text.grammar.matcher import GrammarMatcher, TokenMask
from ingot.text.grammar.vocabulary import GrammarVocabulary, forbid_token
from ingot.text.parser.parser import ThinkingStart, TriggerPlace, triggers_of
from ingot.text.parser.prose import CodeFences
from ingot.text.parser.reader import Markers, make_markers
from ingot.text.tool_formats.format import Arguments, CallId, Format, Gap, JsonCall, Maybe, Name, Part, TagEnd

LONGEST_BEGINNING: Final = 1024
"""Characters within which a call without a marker names its tool."""
_SPACE: Final = " \t\r\n"
_ID: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"

CallBeginning = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _CallSign:
    """What a marker means in its place: a call is `held` from there on, `watched` until its `beginnings` tell, a part
    of thinking opens or closes, a message's header begins or ends, or it is to be passed over."""

    marker: str
    place: TriggerPlace | Literal["header"]
    action: Literal["hold", "watch", "open", "close", "header", "body", "pass"]
    beginnings: tuple[CallBeginning, ...] = ()


@dataclass(frozen=True)  # without slots: what follows from it is found once
class LazyCallGrammar:
    """A plan. Text is read by its bytes, each as a character, since a token may end within one."""

    vocabulary: GrammarVocabulary
    grammar: LlguidanceGrammar
    format: Format
    tools: tuple[str, ...]
    start: ThinkingStart
    unseen: frozenset[int] = frozenset()  # special tokens that the parser is not shown

    def begin(self) -> GrammarMatcher:
        return LazyCallMatcher(self)

    def prepare(self) -> LazyCallGrammar:
        """Find out now what guides will ask: they are asked on the engine's time."""
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
    def held(self) -> dict[str, tuple[int, ...]]:
        """The markers from which on calls are held, and the tokens that write them."""
        found = {
            sign.marker: sign.marker.encode("latin-1") for sign in _call_signs(self.format) if sign.action == "hold"
        }
        return {marker: tuple(self.vocabulary.encode(text.decode())) for marker, text in found.items()}

    @cached_property
    def overshooting(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Behind so many characters of a marker: tokens that end it and go on as no call does."""
        found = {}
        for marker, ids in self.held.items():
            text = marker.encode("latin-1")
            guide = self.grammar.begin()
            if not guide.follow(ids):
                continue
            for size in range(1, len(text)):
                if bad := [
                    id for id in self.vocabulary.overshooting(text, size) if not self._goes_on(guide, text, size, id)
                ]:
                    found[marker, size] = tuple(bad)
        return found

    @cached_property
    def watched(self) -> dict[str, frozenset[int]]:
        """How much of a marker is written where the next token may end it, or lead to where some are forbidden."""
        return {marker: self.vocabulary.leading_up_to(marker.encode("latin-1")) for marker in self.held}

    def _goes_on(self, guide: LlguidanceMatcher, text: bytes, size: int, id: int) -> bool:
        return guide.could_follow(self.ids(self.vocabulary.tokens[id][len(text) - size :]))

    def ids(self, text: bytes) -> list[int]:
        return self.vocabulary.library.tokenize_bytes(text) if text else []


@dataclass(slots=True)
class _AnswerPlace:
    """Where an answer stands."""

    thinking: bool = False
    header: bool = True  # of a message
    unread: str = ""  # may be the beginning of a marker, or of a call without one
    tokens: tuple[int, ...] = ()  # that it came in
    passed: int = 0  # characters of the first of them that are read
    blank: bool = True  # nothing but white space since the beginning or the last marker
    at_line_start: bool = True
    last: str = ""  # the last character of the text since then
    called: bool = False
    thought: bool = False  # a part of thinking was closed
    beginnings: tuple[CallBeginning, ...] = ()  # of a call that may have begun,
    in_prompt: bool = False  # in the prompt
    fences: CodeFences = field(default_factory=CodeFences)
    held: LlguidanceMatcher | None = None


class LazyCallMatcher(RollbackMatcher):
    def __init__(self, plan: LazyCallGrammar) -> None:
        self._plan = plan
        opened = plan.start is ThinkingStart.OPENED and plan.format.thinking is not None
        begun = () if opened else plan.opening_in_prompt
        self._place = _AnswerPlace(thinking=opened, beginnings=begun, in_prompt=bool(begun))

    @property
    def done(self) -> bool:
        return False

    @property
    def free(self) -> bool:
        place = self._place
        if place.held is not None or place.beginnings:
            return False
        return place.thinking or not any(
            place.unread.endswith(marker[:size]) for marker, sizes in self._plan.watched.items() for size in sizes
        )

    def mask(self) -> TokenMask | None:
        if self._place.held is None:
            return self._without_overshooting()
        try:
            return self._place.held.mask()
        except IngotError:  # which is logged
            self._restart()
            return None

    def accept(self, token: int) -> None:
        held = self._place.held
        if held is None:
            self._follow(token)
            return
        try:
            held.accept(token)
            ended = held.done
        except IngotError:
            ended = True
        if ended:
            self._restart()

    def admits(self, token: int) -> bool:
        held = self._place.held
        try:
            return super().admits(token) if held is None else held.admits(token)
        except IngotError:
            self._restart()
            return True

    @property
    def narrow(self) -> bool:
        return self._place.held is not None and self._place.held.narrow

    def standing(self) -> Any:
        place = self._place
        kept = replace(place, fences=copy(place.fences))
        return kept, place.held and place.held.standing()

    def rollback(self, standing: Any) -> None:
        self._place, own = standing
        if self._place.held is not None:
            self._place.held.rollback(own)

    def _without_overshooting(self) -> TokenMask | None:
        place, overshooting = self._place, self._plan.overshooting
        if place.thinking or not place.unread or not overshooting:
            return None
        found = [ids for (marker, size), ids in overshooting.items() if place.unread.endswith(marker[:size])]
        if not found:
            return None
        mask = self._plan.vocabulary.everything()
        for id in (id for ids in found for id in ids):
            forbid_token(mask, id)
        return mask

    # What is free is followed, as the parser reads it.

    def _follow(self, token: int) -> None:
        if token in self._plan.unseen or not (text := self._plan.vocabulary.tokens[token]):
            return
        place = self._place
        place.unread += text.decode("latin-1")
        place.tokens = (*place.tokens, token)
        while self._place.unread and self._reads_on():
            pass

    def _reads_on(self) -> bool:
        """Reads what is certain. Whether there may be more that is."""
        place = self._place
        if place.beginnings:
            return self._watch()
        if place.thinking:
            return self._think()
        signs, found = self._plan.signs
        at, marker = found.find(place.unread, 0, ended=False)
        self._write(at)
        if marker is None:
            return False
        sign = next((sign for sign in signs[marker] if self._in_place(sign.place)), None)
        if sign is None:
            self._write(1)
        else:
            self._act(sign)
        return True

    def _think(self) -> bool:
        at, marker = self._plan.closing.find(self._place.unread, 0, ended=False)
        self._pass(at + len(marker or ""))
        if marker is not None:
            self._place.thinking, self._place.thought = False, True
            self._refresh()
        return marker is not None

    def _watch(self) -> bool:
        place = self._place
        begun = [_begins_call(beginning, place.unread, self._plan.names) for beginning in place.beginnings]
        if True in begun and self._hold(self._written()):
            return False
        if True not in begun and None in begun and len(place.unread) < LONGEST_BEGINNING:
            return False
        place.beginnings = ()
        self._write(0 if place.in_prompt else 1)
        place.in_prompt = False
        return True

    def _in_place(self, where: str) -> bool:
        place = self._place
        match where:
            case "fresh":
                return place.blank
            case "line":
                return place.at_line_start or self._is_attached()
            case "unfenced line":
                return place.at_line_start and not place.fences.open
            case "after a call":
                return place.blank and place.called
            case "after thinking":
                return place.thought and place.at_line_start
            case "header":
                return place.header
        return True

    def _is_attached(self) -> bool:
        """Whether what comes next stands right behind a word or a sentence."""
        last = self._place.last
        return not self._place.fences.open and (last.isalnum() or last in tuple(".!?:;") or last > "\x7f")

    def _act(self, sign: _CallSign) -> None:
        place = self._place
        match sign.action:
            case "hold":
                behind = place.unread[len(sign.marker) :].encode("latin-1")
                if not self._hold([*self._plan.held[sign.marker], *self._plan.ids(behind)]):
                    self._write(len(sign.marker))
            case "watch":
                place.beginnings = sign.beginnings
            case "pass":
                self._pass(len(sign.marker))
            case "open" | "close":
                self._pass(len(sign.marker))
                self._refresh()
                place.called, place.thinking = False, sign.action == "open"
            case "header" | "body":
                self._write(len(sign.marker))
                place.header = sign.action == "header"

    def _hold(self, tokens: Sequence[int]) -> bool:
        """Hold the call that these have begun, if they have."""
        try:
            guide = self._plan.grammar.begin()
            held = guide.follow(tokens)
        except IngotError:
            return False
        if held:
            before = self._place
            self._place = _AnswerPlace(called=True, thought=before.thought, fences=before.fences, held=guide)
            if guide.done:
                self._restart()
        return held

    def _restart(self) -> None:
        """A call has ended."""
        self._place.held, self._place.header = None, False
        self._refresh()

    def _refresh(self) -> None:
        """A marker stands here, with no text behind it yet."""
        self._place.fences.end_line()
        self._place.blank = self._place.at_line_start = True
        self._place.last = ""

    def _written(self) -> list[int]:
        """The tokens of what is unread."""
        place = self._place
        if not place.passed:
            return list(place.tokens)
        return [*self._plan.ids(self._plan.vocabulary.tokens[place.tokens[0]][place.passed :]), *place.tokens[1:]]

    def _write(self, size: int) -> None:
        """So much of what is unread is text."""
        place = self._place
        text = place.unread[:size]
        place.fences.write(text)
        place.blank = place.blank and not text.strip(_SPACE)
        place.last = text[-1:] or place.last
        line = text[text.rfind("\n") + 1 :]
        place.at_line_start = not line.strip(_SPACE) and (place.at_line_start or "\n" in text)
        self._pass(size)

    def _pass(self, size: int) -> None:
        place, tokens = self._place, self._plan.vocabulary.tokens
        place.unread = place.unread[size:]
        place.passed += size
        while place.tokens and place.passed >= (length := len(tokens[place.tokens[0]])):
            place.passed -= length
            place.tokens = place.tokens[1:]


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
                yield _CallSign(marker, trigger.place, "hold")
            case "open":
                beginnings = (_call_beginning((*form.opening, *form.call)) for form in forms)
                yield _CallSign(marker, trigger.place, "watch", tuple(dict.fromkeys(beginnings)))
            case "call":
                beginnings = (_call_beginning(form.call) for form in forms)
                yield _CallSign(marker, trigger.place, "watch", tuple(dict.fromkeys(beginnings)))
            case "think":
                opens = format.thinking is not None and trigger.marker == format.thinking.open
                yield _CallSign(marker, trigger.place, "open" if opens else "close")
            case "strip":
                yield _CallSign(marker, trigger.place, "pass")
    joints = {form.joint.strip() for form in format.forms if form.joint and not form.closing} - {""}
    yield from (_CallSign(_as_byte_text(joint), "after a call", "pass") for joint in sorted(joints))


def _call_beginning(parts: Iterable[Part]) -> CallBeginning:
    """As much of a call as names its tool for certain."""
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
    while isinstance(found[-1], Gap | Maybe):  # these tell nothing
        found.pop()
    return tuple(found)


def _begins_call(beginning: CallBeginning, text: str, names: Sequence[str]) -> bool | None:
    """Whether the text begins so; None where it may yet."""
    for place, part in enumerate(beginning):
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
                behind = beginning[place + 1 :]
                ways = [_begins_call(behind, text[len(name) :], names) for name in names if text.startswith(name)]
                if True in ways:
                    return True
                return None if None in ways or any(name.startswith(text) for name in names) else False
            case str():
                if not text.startswith(part):
                    return None if part.startswith(text) else False
                text = text[len(part) :]
    return True


def _as_byte_text(text: str) -> str:
    return text.encode().decode("latin-1")
