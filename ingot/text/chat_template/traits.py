"""What a model's chat template can read, found by probing it with a few short conversations.

Templates differ in whether content is a string or a list of parts, in whether a call's arguments are JSON text or an
object, in whether a message may have no content, in the roles they support and in what order, and in whether they
support tools and thinking at all. None of them states it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
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
_RESULT = {"role": "tool", "tool_call_id": _CALL_ID, "name": "probe", "content": "Done."}
_MEDIA = ("image", "video")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class RenderTemplate(Protocol):
    def __call__(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """A conversation's text, empty where the template fails."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template can read."""

    content: Mapping[str, ContentForm] = field(default_factory=lambda: MappingProxyType({}))  # by role
    developer: bool = False  # supports that role; else its messages become the system's
    no_content: EmptyForm = "empty"  # of a message that only calls tools
    object_arguments: bool = True  # of tool calls; else they are JSON text
    unparsed_arguments: bool = False  # shows arguments that are any text, as it stands
    reasoning: str | None = None  # the key under which it shows an assistant's thinking, be it only next to calls,
    text_with_reasoning: bool = True  # where there is text, too
    system: bool = True  # shows a system message at the beginning
    late_system: LateSystem = "kept"
    repeats: frozenset[str] = frozenset({"system", "user", "assistant"})  # roles that may have two messages in a row
    tools: bool = True  # shows what tools there are,
    calls: bool = True  # what was called,
    calls_with_text: bool = True  # also where the message has text,
    several_calls: bool = True  # and where a message holds more than one call,
    results: bool = True  # and what came of it,
    user_after_results: bool = True  # and accepts a user's message before the assistant has answered to that
    call_ids: bool = False  # shows the ids of calls
    nine_character_ids: bool = False  # and refuses any that are not nine letters and digits
    media: frozenset[tuple[str, str]] = frozenset()  # roles that may show images or videos, and which of them


def probe_traits(render: RenderTemplate, literals: Set[str]) -> TemplateTraits:
    """The traits of the template behind `render`, whose own string constants are `literals`."""
    probe = _TemplateProbe(render)
    probe.around = probe.form("user")
    probe.objects = probe.shows_calls(objects=True) or not probe.shows_calls(objects=False)
    forms = {role: probe.form(role) for role in ("user", "system", "assistant", "tool")}
    # A template that prints whatever role it gets does not thereby know it.
    developer = "developer" in literals and _MARK in probe.text("developer", _MARK)
    forms["developer"] = probe.form("developer") if developer else forms["system"]
    calls = probe.shows_calls(objects=probe.objects)
    reasoning = probe.reasoning([key for key in REASONING_KEYS if key in literals])
    return TemplateTraits(
        content=MappingProxyType(forms),
        developer=developer,
        no_content=probe.no_content(),
        object_arguments=probe.objects,
        unparsed_arguments=probe.shows_unparsed_arguments(),
        reasoning=reasoning,
        text_with_reasoning=reasoning is None or not calls or probe.shows_text_with_reasoning(reasoning),
        system=_MARK in probe.text("system", _content(_MARK, forms["system"])),
        late_system=probe.late_system(forms),
        repeats=frozenset(role for role in ("system", "user", "assistant") if probe.repeats(role, forms[role])),
        tools=_MARK in render([probe.user()], [_TOOL]),
        calls=calls,
        calls_with_text=not calls or probe.shows_calls_with_text(),
        several_calls=not calls or probe.shows_several_calls(),
        results=calls and "tool" in literals and _MARK in probe.text("tool", _content(_MARK, forms["tool"])),
        user_after_results=not probe.wants_answer_after_results(),
        call_ids=probe.shows_call_ids(),
        nine_character_ids=probe.requires_nine_characters(),
        media=frozenset(
            (role, kind)
            for kind in _MEDIA
            if kind in literals
            for role in ("user", "tool")
            if probe.shows_media(role, kind)
        ),
    )


class _TemplateProbe:
    def __init__(self, render: RenderTemplate) -> None:
        self._render = render
        self.around: ContentForm = "text"  # the form of the messages that are not probed
        self.objects = True

    def text(self, role: str, content: Any) -> str:
        """The text of a conversation in which `role` has this content; empty where the template fails."""
        message = {"role": role, "content": content}
        if role == "user":
            return self._render([message])
        if role in ("system", "developer"):
            return self._render([message, self.user()])
        if role == "assistant":
            return self._render([self.user(), message, self.user()])
        return self._render([self.user(), self._calling(""), {**_RESULT, **message}])

    def form(self, role: str) -> ContentForm:
        as_text, as_parts = self.text(role, _MARK), self.text(role, _content(_MARK, "parts"))
        if _MARK in as_text:
            return "either" if as_parts == as_text else "text"
        return "parts" if _MARK in as_parts else "text"

    def shows_calls(self, *, objects: bool) -> bool:
        # Some templates show calls only in a message without content.
        return any(self._shows_call(content, objects=objects) for content in ("", None))

    def shows_unparsed_arguments(self) -> bool:
        """Whether text that is no JSON comes out of a call word for word."""
        callings = [_calling_message(content, _UNPARSED_ARGUMENTS) for content in (None, "")]
        return any(_UNPARSED_ARGUMENTS in self._render([self.user(), calling]) for calling in callings)

    def shows_call_ids(self) -> bool:
        shown = [self._call(content, self.objects) for content in (None, "")]
        return any(_CALL_ID in text for text in (*shown, self.text("tool", "Done.")))

    def requires_nine_characters(self) -> bool:
        calling = self._calling("")
        other = {**calling, "tool_calls": [{**calling["tool_calls"][0], "id": "call_of_any_length"}]}
        return bool(self._render([self.user(), calling])) and not self._render([self.user(), other])

    def wants_answer_after_results(self) -> bool:
        """Whether a user's text is lost after results, but shown after an answer, even an empty one."""
        before, last = [self.user(), self._calling(""), _RESULT], self.user(_LAST)
        empty = {"role": "assistant", "content": ""}
        return _LAST not in self._render([*before, last]) and _LAST in self._render([*before, empty, last])

    def no_content(self) -> EmptyForm:
        if not self._shows_call(None, objects=self.objects):
            return "empty"
        if not self._shows_call("", objects=self.objects):
            return "null"
        # The same message may fail only once it is no longer the last.
        null, empty = (self._call(content, self.objects, _RESULT, self.user()) for content in (None, ""))
        return "empty" if empty and (not null or "None" in null) else "either"

    def reasoning(self, keys: Sequence[str]) -> str | None:
        """The first of the keys whose value comes out of a finished answer, or at least of one that calls."""
        for key in keys:
            answer = {"role": "assistant", "content": _content("Yes.", self.around), key: _MARK}
            if _MARK in self._render([self.user(), answer, self.user()]):
                return key
        return next((key for key in keys if _MARK in self._called(**{key: _MARK})), None)

    def shows_text_with_reasoning(self, key: str) -> bool:
        if _MARK not in self._called(**{key: _MARK}):
            return True  # nothing would be gained
        text = self._called(content=_content(_FIRST, self.around), **{key: _MARK})
        return _FIRST in text and _MARK in text

    def shows_calls_with_text(self) -> bool:
        content = _content(_FIRST, self.around)
        return _MARK in self._called(content=content, tool_calls=[self._plain_call(_MARK, _CALL_ID)], named="probe")

    def shows_several_calls(self) -> bool:
        calls = [self._plain_call(name, id) for name, id in ((_FIRST, "call00001"), (_SECOND, "call00002"))]
        text = self._called(tool_calls=calls)
        return _FIRST in text and _SECOND in text

    def late_system(self, forms: Mapping[str, ContentForm]) -> LateSystem:
        answer = {"role": "assistant", "content": _content(_FIRST, forms["assistant"])}
        late = {"role": "system", "content": _content(_MARK, forms["system"])}
        plain = self._render([self.user(), answer, self.user(_LAST)])
        text = self._render([self.user(), answer, late, self.user(_LAST)])
        if not (_FIRST in plain and _MARK in text and _LAST in text):
            return "lost"
        return "kept" if text.startswith(plain[: plain.index(_FIRST) + len(_FIRST)]) else "moved"

    def repeats(self, role: str, form: ContentForm) -> bool:
        both = [{"role": role, "content": _content(text, form)} for text in (_FIRST, _SECOND)]
        before = [self.user()] if role == "assistant" else []
        after = [] if role == "user" else [self.user()]
        text = self._render([*before, *both, *after])
        return _FIRST in text and _SECOND in text

    def shows_media(self, role: str, kind: str) -> bool:
        """Whether one of them leaves a trace of its own, and the text next to it stays."""
        part = _content(_MARK, "parts")
        with_media, without = self.text(role, [{"type": kind}, *part]), self.text(role, part)
        return _MARK in with_media and with_media != without and not any(f"{q}type{q}" in with_media for q in "'\"")

    def user(self, text: str = "Hi.") -> dict[str, Any]:
        return {"role": "user", "content": _content(text, self.around)}

    def _calling(self, content: str | None) -> dict[str, Any]:
        return _calling_message(content, {} if self.objects else "{}")

    def _plain_call(self, name: str, id: str) -> dict[str, Any]:
        function = {"name": name, "arguments": {} if self.objects else "{}"}
        return {"id": id, "type": "function", "function": function}

    def _called(self, *, named: str | None = None, **more: Any) -> str:
        """The text of a message that calls and has these keys too, and of its results, which have that name."""
        empty = "" if self._shows_call("", objects=self.objects) else None
        calling = {**self._calling(empty), **more}
        results = [
            {**_RESULT, "tool_call_id": call["id"], "name": named or call["function"]["name"]}
            for call in calling["tool_calls"]
        ]
        return self._render([self.user(), calling, *results])

    def _shows_call(self, content: str | None, *, objects: bool) -> bool:
        """Whether a call's arguments come out, and neither they nor the content in Python's own spelling."""
        shown = self._call(content, objects)
        return _MARK in shown and "{'probe'" not in shown and "None" not in shown

    def _call(self, content: str | None, objects: bool, *following: dict[str, Any]) -> str:
        arguments = {"probe": _MARK}
        calling = _calling_message(content, arguments if objects else json.dumps(arguments))
        return self._render([self.user(), calling, *following])


def _content(text: str, form: ContentForm) -> Any:
    return [{"type": "text", "text": text}] if form == "parts" else text


def _calling_message(content: str | None, arguments: Any) -> dict[str, Any]:
    function = {"name": "probe", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
