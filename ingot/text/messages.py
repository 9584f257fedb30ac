"""Messages in the form that a model's chat template can read, found out by trying it on a few short conversations.

Templates differ in whether content is a string or a list of parts, in whether a call's arguments are JSON text or an
object, in whether a message may have no content, and in the roles they know. None of them says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ingot.errors import BadRequest, Unsupported

Message = Mapping[str, Any]
# What a template reads as a message's content: a string, a list of parts, or either to the same effect.
ContentForm = Literal["text", "parts", "either"]
EmptyForm = Literal["null", "empty", "either"]
# A conversation's text, empty where the template fails.
Render = Callable[[list[dict[str, Any]]], str]

_MARK = "Quartz-Probe"
_CALL_ID = "call00001"  # some templates insist on nine letters and digits


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template can read."""

    content: Mapping[str, ContentForm] = field(default_factory=lambda: MappingProxyType({}))  # by role
    developer: bool = False  # knows that role; else its messages are given as the system's
    no_content: EmptyForm = "empty"  # of a message that only calls tools
    object_arguments: bool = True  # of tool calls; else they are JSON text


def prepared(messages: Sequence[Message], traits: Traits) -> list[dict[str, Any]]:
    """New messages; those given stay as they are. Raises BadRequest for what no template could read."""
    return [_prepared(message, traits) for message in messages]


def _prepared(message: Message, traits: Traits) -> dict[str, Any]:
    # Clients send null, or an empty list of calls, for what they leave out; templates ask whether a key is there.
    kept = {key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])}
    role = kept.get("role")
    if not isinstance(role, str):
        raise BadRequest("A message has no role.", param="messages")
    if role == "developer" and not traits.developer:
        kept["role"] = role = "system"
    kept["content"] = _content(kept.get("content", ""), traits.content.get(role, "text"))
    if "tool_calls" in kept:
        if not message.get("content"):
            kept["content"] = _no_content(message.get("content"), kept["content"], traits.no_content)
        kept["tool_calls"] = [_call(call, traits) for call in kept["tool_calls"]]
    return kept


def _content(content: Any, form: ContentForm) -> Any:
    if isinstance(content, str):
        return [_part(content)] if form == "parts" else content
    if not isinstance(content, list):
        raise BadRequest("A message's content is neither a string nor a list of parts.", param="messages")
    texts = [_text_of(part) for part in content]
    return "\n".join(texts) if form == "text" else [_part(text) for text in texts]


def _no_content(given: Any, empty: Any, form: EmptyForm) -> Any:
    return None if form == "null" or (form == "either" and given is None) else empty


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _text_of(part: Any) -> str:
    if not isinstance(part, Mapping):
        raise BadRequest("A part of a message's content is not an object.", param="messages")
    if part.get("type") != "text":
        raise Unsupported(f"Content parts of type {part.get('type')!r} are not supported.", param="messages")
    if not isinstance(part.get("text"), str):
        raise BadRequest("A text part of a message's content has no text.", param="messages")
    return part["text"]


def _call(call: Any, traits: Traits) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"], traits)}}


def _arguments(arguments: Any, traits: Traits) -> Any:
    """Arguments that are no JSON object (a model may have written them) stay the text they are."""
    if not traits.object_arguments:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def probed(render: Render, literals: Set[str]) -> Traits:
    """The traits of the template behind `render`, whose own string constants are `literals`."""
    trial = _Trial(render)
    trial.around = trial.form("user")
    trial.objects = trial.wants_objects()
    forms = {role: trial.form(role) for role in ("user", "system", "assistant", "tool")}
    # A template that prints whatever role it is given does not thereby know it.
    developer = "developer" in literals and _MARK in trial.text("developer", _MARK)
    forms["developer"] = trial.form("developer") if developer else forms["system"]
    return Traits(
        content=MappingProxyType(forms),
        developer=developer,
        no_content=trial.no_content(),
        object_arguments=trial.objects,
    )


class _Trial:
    def __init__(self, render: Render) -> None:
        self._render = render
        self.around: ContentForm = "text"  # the form of the messages that are not on trial
        self.objects = True

    def text(self, role: str, content: Any) -> str:
        """What comes out of a conversation in which `role` says `content`; empty where the template fails."""
        user, said = self._user(), {"role": role, "content": content}
        if role == "user":
            return self._render([said])
        if role in ("system", "developer"):
            return self._render([said, user])
        if role == "assistant":
            return self._render([user, said, user])
        calling = _calling("", {} if self.objects else "{}")
        return self._render([user, calling, {**said, "tool_call_id": _CALL_ID, "name": "probe"}])

    def form(self, role: str) -> ContentForm:
        as_text, as_parts = self.text(role, _MARK), self.text(role, [_part(_MARK)])
        if _MARK in as_text:
            return "either" if as_parts == as_text else "text"
        return "parts" if _MARK in as_parts else "text"

    def wants_objects(self) -> bool:
        # Some templates look for calls only in a message without content.
        if self._shows_call("", objects=True) or self._shows_call(None, objects=True):
            return True
        return not (self._shows_call("", objects=False) or self._shows_call(None, objects=False))

    def no_content(self) -> EmptyForm:
        if not self._shows_call(None, objects=self.objects):
            return "empty"
        if not self._shows_call("", objects=self.objects):
            return "null"
        # The same message may fail only once it is no longer the last.
        null, empty = (self._call(content, self.objects, then_user=True) for content in (None, ""))
        return "empty" if empty and (not null or "None" in null) else "either"

    def _shows_call(self, content: str | None, *, objects: bool) -> bool:
        """Whether a call's arguments come out, and neither they nor the content in Python's own spelling."""
        shown = self._call(content, objects, then_user=False)
        return _MARK in shown and "{'probe'" not in shown and "None" not in shown

    def _call(self, content: str | None, objects: bool, then_user: bool) -> str:
        arguments = {"probe": _MARK}
        calling = _calling(content, arguments if objects else json.dumps(arguments))
        reply = {"role": "tool", "tool_call_id": _CALL_ID, "name": "probe", "content": "Done."}
        return self._render([self._user(), calling, *([reply, self._user()] if then_user else [])])

    def _user(self) -> dict[str, Any]:
        return {"role": "user", "content": [_part("Hi.")] if self.around == "parts" else "Hi."}


def _calling(content: str | None, arguments: Any) -> dict[str, Any]:
    function = {"name": "probe", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
