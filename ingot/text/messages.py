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

from ingot.errors import BadRequest, IngotError, Unsupported

Message = Mapping[str, Any]
# What a template reads as a message's content: a string, a list of parts, or either to the same effect.
ContentForm = Literal["text", "parts", "either"]
Render = Callable[[list[dict[str, Any]]], str]

_MARK = "Quartz-Probe"
_CALL_ID = "call00001"  # some templates insist on nine letters and digits


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template can read."""

    content: Mapping[str, ContentForm] = field(default_factory=lambda: MappingProxyType({}))  # by role
    developer: bool = False  # knows that role; else its messages are given as the system's
    null_content: bool = False  # a message may have none; else it is the empty string
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
    kept["content"] = _content(kept.get("content"), traits.content.get(role, "text"), traits)
    if "tool_calls" in kept:
        kept["tool_calls"] = [_call(call, traits) for call in kept["tool_calls"]]
    return kept


def _content(content: Any, form: ContentForm, traits: Traits) -> Any:
    if content is None:
        return None if traits.null_content else _content("", form, traits)
    if isinstance(content, str):
        return [_part(content)] if form == "parts" else content
    if not isinstance(content, list):
        raise BadRequest("A message's content is neither a string nor a list of parts.", param="messages")
    texts = [_text_of(part) for part in content]
    return "\n".join(texts) if form == "text" else [_part(text) for text in texts]


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
    forms = {"user": trial.form("user", "text")}
    for role in ("system", "assistant", "tool"):
        forms[role] = trial.form(role, forms["user"])
    # A template that prints whatever role it is given does not thereby know it.
    known = "developer" in literals and _MARK in trial.text("developer", _MARK, forms["user"])
    forms["developer"] = trial.form("developer", forms["user"]) if known else forms["system"]
    return Traits(
        content=MappingProxyType(forms),
        developer=known,
        null_content=trial.allows_null(forms["user"]),
        object_arguments=trial.wants_objects(forms["user"]),
    )


class _Trial:
    def __init__(self, render: Render) -> None:
        self._render = render

    def text(self, role: str, content: Any, around: ContentForm, arguments: Any = "{}") -> str:
        """What comes out of a conversation in which `role` says `content`; empty where the template fails."""
        try:
            return self._render(_conversation(role, content, around, arguments))
        except IngotError:
            return ""

    def form(self, role: str, around: ContentForm) -> ContentForm:
        as_text = self.text(role, _MARK, around)
        as_parts = self.text(role, [_part(_MARK)], around)
        if _MARK in as_text:
            return "either" if as_parts == as_text else "text"
        return "parts" if _MARK in as_parts else "text"

    def allows_null(self, around: ContentForm) -> bool:
        without = self.text("caller", None, around, {})
        return without != "" and without.count("None") == self.text("caller", "", around, {}).count("None")

    def wants_objects(self, around: ContentForm) -> bool:
        as_object = self.text("caller", "", around, {"probe": _MARK})
        as_text = self.text("caller", "", around, json.dumps({"probe": _MARK}))
        if _MARK in as_object:
            return "{'probe'" not in as_object  # Python's own spelling of an object: nobody meant to print it
        return _MARK not in as_text


def _conversation(role: str, content: Any, around: ContentForm, arguments: Any) -> list[dict[str, Any]]:
    filler = [_part("Hi.")] if around == "parts" else "Hi."
    user = {"role": "user", "content": filler}
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
    if role == "user":
        return [{"role": role, "content": content}]
    if role in ("system", "developer"):
        return [{"role": role, "content": content}, user]
    if role == "assistant":
        return [user, {"role": role, "content": content}, user]
    calling = {"role": "assistant", "content": content if role == "caller" else "", "tool_calls": [call]}
    said = filler if role == "caller" else content
    return [user, calling, {"role": "tool", "tool_call_id": _CALL_ID, "name": "probe", "content": said}]
