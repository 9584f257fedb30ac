"""Messages in the form and the order that a model's chat template can read.

`prepare_messages` gives each message the form that the template takes: content as a string or as parts, arguments as
text or as an object. Strict templates also refuse what clients send every day: a system message amid the conversation,
two user messages in a row. Others accept such a message and drop it, or move it to the front, where it changes every
token that was computed. `order_messages` merges and folds what a template would refuse, drop or move. What a template
does is found by probing it (`traits`); one that can render the messages gets them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from ingot.errors import BadRequest, Unsupported
from ingot.media.items import PlacedMedia
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.chat_template.traits import ContentForm, TemplateTraits
from ingot.text.parser.arguments import are_unparsed_arguments, arguments_as_object, arguments_as_text

Message = Mapping[str, Any]


def prepare_messages(messages: Sequence[Message], traits: TemplateTraits) -> list[dict[str, Any]]:
    """New messages; the originals stay unchanged. Raises BadRequest for what no template could read."""
    return [_prepare_message(message, traits) for message in messages]


def _prepare_message(message: Message, traits: TemplateTraits) -> dict[str, Any]:
    # Clients send null, or an empty list of calls, for what they leave out; templates ask whether a key is there.
    prepared = {
        key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])
    }
    role = prepared.get("role")
    if not isinstance(role, str):
        raise BadRequest("A message has no role.", param="messages")
    if role == "developer" and not traits.developer:
        prepared["role"] = role = "system"
    if traits.reasoning not in (None, "reasoning_content") and "reasoning_content" in prepared:
        prepared[traits.reasoning] = prepared.pop("reasoning_content")
    shows = frozenset(kind for shower, kind in traits.media if shower == role)
    prepared["content"] = _prepare_content(prepared.get("content", ""), traits.content.get(role, "text"), shows)
    if "tool_calls" in prepared:
        if not message.get("content"):
            null = traits.no_content == "null" or (traits.no_content == "either" and message.get("content") is None)
            prepared["content"] = None if null else prepared["content"]
        prepared["tool_calls"] = [_prepare_call(call, traits) for call in prepared["tool_calls"]]
    if "tool_call_id" in prepared:
        prepared["tool_call_id"] = _prepare_call_id(prepared["tool_call_id"], traits)
    return prepared


def media_part(shown: PlacedMedia) -> dict[str, Any]:
    """An image or a video, as a part of a message's content."""
    return {"type": shown.kind, "shown": shown}


def media_in_messages(messages: Sequence[Message]) -> list[PlacedMedia]:
    """The images and videos of a conversation, in order."""
    parts = (part for message in messages if isinstance(each := message.get("content"), list) for part in each)
    return [part["shown"] for part in parts if _media_of_part(part) is not None]


def content_as_text(content: Any) -> str:
    """A message's content as one text. Raises Unsupported for parts that are no text."""
    return _prepare_content(content or "", "text")


def _prepare_content(content: Any, form: ContentForm, shows: frozenset[str] = frozenset()) -> Any:
    """`shows` are the kinds of media for which the template writes a placeholder itself. Others get one here."""
    if isinstance(content, str):
        return [_content_part(content)] if form == "parts" else content
    if not isinstance(content, list):
        raise BadRequest("A message's content is neither a string nor a list of parts.", param="messages")
    media = {shown.kind for part in content if (shown := _media_of_part(part)) is not None}
    if media and media <= shows:
        return [
            {"type": part["type"]} if _media_of_part(part) is not None else _content_part(_text_of_part(part))
            for part in content
        ]
    texts = [_text_of_part(part) for part in content]
    return "\n".join(texts) if form == "text" else [_content_part(text) for text in texts]


def _content_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _media_of_part(part: Any) -> PlacedMedia | None:
    return part.get("shown") if isinstance(part, Mapping) else None


def _text_of_part(part: Any) -> str:
    if not isinstance(part, Mapping):
        raise BadRequest("A part of a message's content is not an object.", param="messages")
    if (shown := _media_of_part(part)) is not None:
        return shown.placeholder.whole
    if part.get("type") != "text":
        raise Unsupported(f"Content parts of type {part.get('type')!r} are not supported.", param="messages")
    if not isinstance(part.get("text"), str):
        raise BadRequest("A text part of a message's content has no text.", param="messages")
    return part["text"]


def _prepare_call(call: Any, traits: TemplateTraits) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    made = {**call, "function": {**function, "arguments": _prepare_call_arguments(function.get("arguments"), traits)}}
    return made | {"id": _prepare_call_id(call["id"], traits)} if "id" in call else made


def _prepare_call_id(id: Any, traits: TemplateTraits) -> Any:
    """Another server's id, or a client's, in the form of the family's own where the template insists on that."""
    if not traits.nine_character_ids or re.fullmatch(r"[A-Za-z0-9]{9}", str(id)):
        return id
    return blake2b(str(id).encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _prepare_call_arguments(arguments: Any, traits: TemplateTraits) -> Any:
    """Arguments that are no JSON object (a model may have written them) stay the text they are where that is shown."""
    if not traits.object_arguments or (traits.unparsed_arguments and are_unparsed_arguments(arguments)):
        return arguments_as_text(arguments)
    return arguments_as_object(arguments)


@dataclass(frozen=True, slots=True)
class TemplateMessage:
    """A message as the template is to get it, and which of the client's it was made of."""

    message: dict[str, Any]
    sources: tuple[int, ...]
    folded: bool = False  # another role's text, where only this role is allowed

    @property
    def role(self) -> str:
        return str(self.message.get("role"))


def order_messages(
    lines: Iterable[TemplateMessage], traits: TemplateTraits, history: TemplateHistory
) -> tuple[list[TemplateMessage], tuple[str, ...]]:
    """The lines as the template can take them, and the names of what was done to them."""
    done: set[str] = set()
    groups: list[_MessageGroup] = []
    has_begun = False  # there was a message other than the system's
    for line in lines:
        if line.role == "developer" and not traits.developer:
            line = replace(line, message={**line.message, "role": "system"})
        if line.role == "system" and _is_misplaced_system(has_begun, traits, history):
            line = _system_as_user(line)
            done.add("system-folded")
        has_begun = has_begun or line.role != "system"
        last = groups[-1] if groups else None
        if last is not None and last.role == "tool" and line.role == "user" and not traits.user_after_results:
            last = _MessageGroup([TemplateMessage({"role": "assistant", "content": ""}, ())])
            groups.append(last)
            done.add("empty-answer-inserted")
        if last is not None and _can_merge(last, line, traits):
            if not line.folded and not last.folded:
                done.add(f"{line.role}-merged")
            last.lines.append(line)
            last.folded = last.folded and line.folded
        else:
            groups.append(_MessageGroup([line], line.folded))
    return [_merge_group(group) for group in groups], tuple(sorted(done))


@dataclass(slots=True)
class _MessageGroup:
    """Lines of one role that make one message."""

    lines: list[TemplateMessage]
    folded: bool = False  # all of them are

    @property
    def role(self) -> str:
        return self.lines[0].role


def _is_misplaced_system(has_begun: bool, traits: TemplateTraits, history: TemplateHistory) -> bool:
    if not has_begun:
        return not traits.system
    return traits.late_system == "lost" or (traits.late_system == "moved" and history == "stable")


def _system_as_user(line: TemplateMessage) -> TemplateMessage:
    """Tags keep the model from taking the words for the user's."""
    text = content_as_text(line.message.get("content"))
    return replace(line, message={"role": "user", "content": f"<system>\n{text}\n</system>"}, folded=True)


def _can_merge(first: _MessageGroup, second: TemplateMessage, traits: TemplateTraits) -> bool:
    if first.role != second.role:
        return False
    if first.role == "user" and (first.folded or second.folded):
        return True
    return first.role in ("system", "user", "assistant") and first.role not in traits.repeats


def _merge_group(group: _MessageGroup) -> TemplateMessage:
    if len(group.lines) == 1:
        return group.lines[0]
    messages = [line.message for line in group.lines]
    message = {**messages[0], "content": _join_contents([each.get("content") for each in messages])}
    if calls := [call for each in messages for call in each.get("tool_calls") or ()]:
        message["tool_calls"] = calls
    if reasoning := [text for each in messages if (text := each.get("reasoning_content"))]:
        message["reasoning_content"] = "\n\n".join(reasoning)
    return TemplateMessage(message, tuple(source for line in group.lines for source in line.sources), group.folded)


def _join_contents(contents: Sequence[Any]) -> Any:
    filled = [content for content in contents if content]
    if len(filled) < 2:
        return filled[0] if filled else contents[-1]
    if all(isinstance(content, str) for content in filled):
        return "\n\n".join(filled)
    first, *others = (content if isinstance(content, list) else [_content_part(content)] for content in filled)
    return [*first, *(part for parts in others for part in (_content_part("\n\n"), *parts))]
