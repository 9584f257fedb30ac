"""What a model's chat template can read, found out by trying it on a few short conversations.

Templates differ in whether content is a string or a list of parts, in whether a call's arguments are JSON text or an
object, in whether a message may have no content, in the roles they know and in what order, and in whether they know
of tools and thinking at all. None of them says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Literal, Protocol

# What a template reads as a message's content: a string, a list of parts, or either to the same effect.
ContentForm = Literal["text", "parts", "either"]
EmptyForm = Literal["null", "empty", "either"]
# What becomes of a system message amid the conversation: it stands there, at the beginning, or nowhere.
LateSystem = Literal["kept", "moved", "lost"]

_MARK = "Quartz-Probe"
_UNPARSED_ARGUMENTS = '{"probe": "' + _MARK
_CALL_ID = "call00001"  # some templates insist on nine letters and digits
_FIRST, _SECOND, _LAST = "First-Probe", "Second-Probe", "Last-Probe"
_TOOL = {"type": "function", "function": {"name": _MARK, "description": "", "parameters": {"type": "object"}}}
_MEDIA = ("image", "video")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class RenderTemplate(Protocol):
    def __call__(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """A conversation's text, empty where the template fails."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template can read."""

    content: Mapping[str, ContentForm] = field(default_factory=lambda: MappingProxyType({}))  # by role
    developer: bool = False  # knows that role; else its messages are given as the system's
    no_content: EmptyForm = "empty"  # of a message that only calls tools
    object_arguments: bool = True  # of tool calls; else they are JSON text
    odd_arguments: bool = False  # shows arguments that are any text, as it stands
    reasoning: str | None = None  # the key under which it shows what an assistant thought, be it only beside calls,
    text_beside: bool = True  # where there is text, too
    system: bool = True  # shows a system message at the beginning
    late_system: LateSystem = "kept"
    repeats: frozenset[str] = frozenset({"system", "user", "assistant"})  # roles that may speak twice in a row
    tools: bool = True  # shows what tools there are,
    calls: bool = True  # what was called,
    calls_beside_text: bool = True  # also where the message has text,
    several_calls: bool = True  # and where a message holds more than one call,
    results: bool = True  # and what came of it,
    user_after_results: bool = True  # and lets the user speak before the assistant has answered to that
    call_ids: bool = False  # shows the ids of calls
    nine_character_ids: bool = False  # and refuses any that are not nine letters and digits
    media: frozenset[tuple[str, str]] = frozenset()  # roles that may show pictures or clips, and which of them


def probe_traits(render: RenderTemplate, literals: Set[str]) -> TemplateTraits:
    """The traits of the template behind `render`, whose own string constants are `literals`."""
    trial = _TemplateProbe(render)
    trial.around = trial.form("user")
    trial.objects = trial.wants_objects()
    forms = {role: trial.form(role) for role in ("user", "system", "assistant", "tool")}
    # A template that prints whatever role it is given does not thereby know it.
    developer = "developer" in literals and _MARK in trial.text("developer", _MARK)
    forms["developer"] = trial.form("developer") if developer else forms["system"]
    calls = trial.shows_calls()
    reasoning = trial.reasoning([key for key in _REASONING_KEYS if key in literals])
    return TemplateTraits(
        content=MappingProxyType(forms),
        developer=developer,
        no_content=trial.no_content(),
        object_arguments=trial.objects,
        odd_arguments=trial.shows_odd_arguments(),
        reasoning=reasoning,
        text_beside=reasoning is None or not calls or trial.shows_text_beside(reasoning),
        system=_MARK in trial.text("system", trial.said(_MARK, forms["system"])),
        late_system=trial.late_system(forms),
        repeats=frozenset(role for role in ("system", "user", "assistant") if trial.repeats(role, forms[role])),
        tools=_MARK in render([trial.user()], [_TOOL]),
        calls=calls,
        calls_beside_text=not calls or trial.shows_calls_beside_text(),
        several_calls=not calls or trial.shows_several_calls(),
        results=calls and "tool" in literals and _MARK in trial.text("tool", trial.said(_MARK, forms["tool"])),
        user_after_results=not trial.wants_answer_after_results(),
        call_ids=trial.shows_call_ids(),
        nine_character_ids=trial.requires_nine_characters(),
        media=frozenset(
            (role, kind)
            for kind in _MEDIA
            if kind in literals
            for role in ("user", "tool")
            if trial.shows_media(role, kind)
        ),
    )


class _TemplateProbe:
    def __init__(self, render: RenderTemplate) -> None:
        self._render = render
        self.around: ContentForm = "text"  # the form of the messages that are not on trial
        self.objects = True

    def text(self, role: str, content: Any) -> str:
        """What comes out of a conversation in which `role` says `content`; empty where the template fails."""
        said = {"role": role, "content": content}
        if role == "user":
            return self._render([said])
        if role in ("system", "developer"):
            return self._render([said, self.user()])
        if role == "assistant":
            return self._render([self.user(), said, self.user()])
        calling = _calling_message("", {} if self.objects else "{}")
        return self._render([self.user(), calling, {**said, "tool_call_id": _CALL_ID, "name": "probe"}])

    def form(self, role: str) -> ContentForm:
        as_text, as_parts = self.text(role, _MARK), self.text(role, [_text_part(_MARK)])
        if _MARK in as_text:
            return "either" if as_parts == as_text else "text"
        return "parts" if _MARK in as_parts else "text"

    def wants_objects(self) -> bool:
        # Some templates look for calls only in a message without content.
        if self._shows_call("", objects=True) or self._shows_call(None, objects=True):
            return True
        return not self.shows_calls(objects=False)

    def shows_calls(self, objects: bool | None = None) -> bool:
        kind = self.objects if objects is None else objects
        return self._shows_call("", objects=kind) or self._shows_call(None, objects=kind)

    def shows_odd_arguments(self) -> bool:
        """Whether text that is no JSON comes out of a call word for word."""
        return any(
            _UNPARSED_ARGUMENTS in self._render([self.user(), _calling_message(content, _UNPARSED_ARGUMENTS)])
            for content in (None, "")
        )

    def shows_call_ids(self) -> bool:
        shown = [self._call(content, self.objects, then_user=False) for content in (None, "")]
        return any(_CALL_ID in text for text in (*shown, self.text("tool", "Done.")))

    def requires_nine_characters(self) -> bool:
        calling = _calling_message("", {} if self.objects else "{}")
        other = {**calling, "tool_calls": [{**calling["tool_calls"][0], "id": "call_of_any_length"}]}
        return bool(self._render([self.user(), calling])) and not self._render([self.user(), other])

    def wants_answer_after_results(self) -> bool:
        """Whether the user's words are lost after results, but not once something, be it nothing, was answered."""
        calling = _calling_message("", {} if self.objects else "{}")
        before = [self.user(), calling, {"role": "tool", "tool_call_id": _CALL_ID, "name": "probe", "content": "Done."}]
        nothing = {"role": "assistant", "content": ""}
        if _LAST in self._render([*before, self.user(_LAST)]):
            return False
        return _LAST in self._render([*before, nothing, self.user(_LAST)])

    def no_content(self) -> EmptyForm:
        if not self._shows_call(None, objects=self.objects):
            return "empty"
        if not self._shows_call("", objects=self.objects):
            return "null"
        # The same message may fail only once it is no longer the last.
        null, empty = (self._call(content, self.objects, then_user=True) for content in (None, ""))
        return "empty" if empty and (not null or "None" in null) else "either"

    def reasoning(self, keys: Sequence[str]) -> str | None:
        """The first of the keys whose value comes out of a finished answer, or at least of one that calls."""
        for key in keys:
            answer = {"role": "assistant", "content": self.said("Yes.", self.around), key: _MARK}
            if _MARK in self._render([self.user(), answer, self.user()]):
                return key
        return next((key for key in keys if _MARK in self._called(**{key: _MARK})), None)

    def shows_text_beside(self, key: str) -> bool:
        if _MARK not in self._called(**{key: _MARK}):
            return True  # nothing would be gained
        text = self._called(content=self.said(_FIRST, self.around), **{key: _MARK})
        return _FIRST in text and _MARK in text

    def shows_calls_beside_text(self) -> bool:
        call = self._plain_call(_MARK, _CALL_ID)
        return _MARK in self._called(content=self.said(_FIRST, self.around), tool_calls=[call], named="probe")

    def shows_several_calls(self) -> bool:
        calls = [self._plain_call(name, id) for name, id in ((_FIRST, "call00001"), (_SECOND, "call00002"))]
        text = self._called(tool_calls=calls)
        return _FIRST in text and _SECOND in text

    def late_system(self, forms: Mapping[str, ContentForm]) -> LateSystem:
        answer = {"role": "assistant", "content": self.said(_FIRST, forms["assistant"])}
        late = {"role": "system", "content": self.said(_MARK, forms["system"])}
        plain = self._render([self.user(), answer, self.user(_LAST)])
        text = self._render([self.user(), answer, late, self.user(_LAST)])
        if not (_FIRST in plain and _MARK in text and _LAST in text):
            return "lost"
        return "kept" if _common_prefix_length(plain, text) >= plain.index(_FIRST) + len(_FIRST) else "moved"

    def repeats(self, role: str, form: ContentForm) -> bool:
        first, second = ({"role": role, "content": self.said(each, form)} for each in (_FIRST, _SECOND))
        before = [self.user()] if role == "assistant" else []
        after = [] if role == "user" else [self.user()]
        text = self._render([*before, first, second, *after])
        return _FIRST in text and _SECOND in text

    def shows_media(self, role: str, kind: str) -> bool:
        """Whether one of them leaves a trace of its own, and the text beside it stays."""
        with_it, without = self.text(role, [{"type": kind}, _text_part(_MARK)]), self.text(role, [_text_part(_MARK)])
        return _MARK in with_it and with_it != without and not any(f"{q}type{q}" in with_it for q in "'\"")

    def said(self, text: str, form: ContentForm) -> Any:
        return [_text_part(text)] if form == "parts" else text

    def user(self, text: str = "Hi.") -> dict[str, Any]:
        return {"role": "user", "content": self.said(text, self.around)}

    def _plain_call(self, name: str, id: str) -> dict[str, Any]:
        function = {"name": name, "arguments": {} if self.objects else "{}"}
        return {"id": id, "type": "function", "function": function}

    def _called(self, *, named: str | None = None, **more: Any) -> str:
        """What comes out of a message that calls and has this, too, once its calls were answered, by that name."""
        empty = "" if self._shows_call("", objects=self.objects) else None
        calling = {"role": "assistant", "content": empty, "tool_calls": [self._plain_call("probe", _CALL_ID)]} | more
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": named or call["function"]["name"], "content": "Done."}
            for call in calling["tool_calls"]
        ]
        return self._render([self.user(), calling, *results])

    def _shows_call(self, content: str | None, *, objects: bool) -> bool:
        """Whether a call's arguments come out, and neither they nor the content in Python's own spelling."""
        shown = self._call(content, objects, then_user=False)
        return _MARK in shown and "{'probe'" not in shown and "None" not in shown

    def _call(self, content: str | None, objects: bool, then_user: bool) -> str:
        arguments = {"probe": _MARK}
        calling = _calling_message(content, arguments if objects else json.dumps(arguments))
        reply = {"role": "tool", "tool_call_id": _CALL_ID, "name": "probe", "content": "Done."}
        return self._render([self.user(), calling, *([reply, self.user()] if then_user else [])])


def _common_prefix_length(one: str, other: str) -> int:
    """How many characters two texts have in common at the front."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _calling_message(content: str | None, arguments: Any) -> dict[str, Any]:
    function = {"name": "probe", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
