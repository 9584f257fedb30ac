"""Messages in the form that a model's chat template can read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from ingot.errors import BadRequest, Unsupported
from ingot.media.items import Shown
from ingot.text.chat_template.traits import ContentForm, EmptyForm, TemplateTraits
from ingot.text.parse.call_arguments import as_object, as_text, is_unparsed

Message = Mapping[str, Any]


def prepared(messages: Sequence[Message], traits: TemplateTraits) -> list[dict[str, Any]]:
    """New messages; those given stay as they are. Raises BadRequest for what no template could read."""
    return [_prepared(message, traits) for message in messages]


def _prepared(message: Message, traits: TemplateTraits) -> dict[str, Any]:
    # Clients send null, or an empty list of calls, for what they leave out; templates ask whether a key is there.
    kept = {key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])}
    role = kept.get("role")
    if not isinstance(role, str):
        raise BadRequest("A message has no role.", param="messages")
    if role == "developer" and not traits.developer:
        kept["role"] = role = "system"
    if traits.reasoning not in (None, "reasoning_content") and "reasoning_content" in kept:
        kept[traits.reasoning] = kept.pop("reasoning_content")
    shows = frozenset(kind for shower, kind in traits.media if shower == role)
    kept["content"] = _content(kept.get("content", ""), traits.content.get(role, "text"), shows)
    if "tool_calls" in kept:
        if not message.get("content"):
            kept["content"] = _no_content(message.get("content"), kept["content"], traits.no_content)
        kept["tool_calls"] = [_call(call, traits) for call in kept["tool_calls"]]
    if "tool_call_id" in kept:
        kept["tool_call_id"] = _id(kept["tool_call_id"], traits)
    return kept


def media_part(shown: Shown) -> dict[str, Any]:
    """A picture or a clip, as a part of a message's content."""
    return {"type": shown.kind, "shown": shown}


def shown_media(messages: Sequence[Message]) -> list[Shown]:
    """The pictures and clips of a conversation, in order."""
    parts = (part for message in messages if isinstance(each := message.get("content"), list) for part in each)
    return [part["shown"] for part in parts if _shown(part) is not None]


def plain_text(content: Any) -> str:
    """A message's content as one text. Raises Unsupported for parts that are no text."""
    return _content(content or "", "text")


def _content(content: Any, form: ContentForm, shows: frozenset[str] = frozenset()) -> Any:
    """`shows` are the kinds of media that the template writes a place for by itself. For others one is written here."""
    if isinstance(content, str):
        return [_part(content)] if form == "parts" else content
    if not isinstance(content, list):
        raise BadRequest("A message's content is neither a string nor a list of parts.", param="messages")
    media = {shown.kind for part in content if (shown := _shown(part)) is not None}
    if media and media <= shows:
        return [{"type": part["type"]} if _shown(part) is not None else _part(_text_of(part)) for part in content]
    texts = [_text_of(part) for part in content]
    return "\n".join(texts) if form == "text" else [_part(text) for text in texts]


def _no_content(given: Any, empty: Any, form: EmptyForm) -> Any:
    return None if form == "null" or (form == "either" and given is None) else empty


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _shown(part: Any) -> Shown | None:
    return part.get("shown") if isinstance(part, Mapping) else None


def _text_of(part: Any) -> str:
    if not isinstance(part, Mapping):
        raise BadRequest("A part of a message's content is not an object.", param="messages")
    if (shown := _shown(part)) is not None:
        return shown.placeholder.whole
    if part.get("type") != "text":
        raise Unsupported(f"Content parts of type {part.get('type')!r} are not supported.", param="messages")
    if not isinstance(part.get("text"), str):
        raise BadRequest("A text part of a message's content has no text.", param="messages")
    return part["text"]


def _call(call: Any, traits: TemplateTraits) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    made = {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), traits)}}
    return made | {"id": _id(call["id"], traits)} if "id" in call else made


def _id(id: Any, traits: TemplateTraits) -> Any:
    """Another server's id, or a client's, in the form of the family's own where the template insists on that."""
    if not traits.nine_ids or re.fullmatch(r"[A-Za-z0-9]{9}", str(id)):
        return id
    return blake2b(str(id).encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _arguments(arguments: Any, traits: TemplateTraits) -> Any:
    """Arguments that are no JSON object (a model may have written them) stay the text they are where that is shown."""
    if not traits.object_arguments or (traits.odd_arguments and is_unparsed(arguments)):
        return as_text(arguments)
    return as_object(arguments)
