"""What clients send, in the form that does not change from one request to the next.

Some clients put into their prompt what differs in every request, and some write the keys of the same object in
another order each time. Neither means anything to the model; both would make each prompt a new one from its first
tokens on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ingot.text.chat_template.traits import REASONING_KEYS
from ingot.text.parser.arguments import are_unparsed_arguments, arguments_as_object, arguments_as_text

Message = Mapping[str, Any]

_INLINE_THINKING = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class VolatileBlock:
    """A block that a client puts at the very front of its system prompt, and that is not meant for the model."""

    name: str
    pattern: re.Pattern[str]


VOLATILE_BLOCKS: tuple[VolatileBlock, ...] = (
    # For the vendor's own accounting. Its version carries a suffix that differs from prompt to prompt.
    VolatileBlock(
        "claude-code-billing-header",
        re.compile(r"x-anthropic-billing-header: *[\w-]+=[^;\n]*(?:; *[\w-]+=[^;\n]*)*;? *(?:\n+|\Z)"),
    ),
)


def canonical_messages(messages: Sequence[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """The messages without volatile blocks, and the names of those that were removed.

    Only the front of the first message is checked, and only if it is the system's. Each message keeps its index, also
    where nothing is left of it.
    """
    canonical, names = list(messages), []
    if canonical and canonical[0].get("role") in ("system", "developer"):
        for volatile in VOLATILE_BLOCKS:
            content = _without_pattern(canonical[0].get("content"), volatile.pattern)
            if content is not None:
                canonical[0] = {**canonical[0], "content": content}
                names.append(volatile.name)
    return canonical, tuple(names)


def _without_pattern(content: Any, pattern: re.Pattern[str]) -> Any:
    """Content without what the pattern finds at its front; None where it finds nothing."""
    if isinstance(content, str):
        found = pattern.match(content)
        return content[found.end() :] if found else None
    if not (isinstance(content, list) and content and isinstance(content[0], Mapping)):
        return None
    text = content[0].get("text")
    found = pattern.match(text) if isinstance(text, str) else None
    if found is None or text is None:
        return None
    remaining = text[found.end() :]
    return [{**content[0], "text": remaining}, *content[1:]] if remaining else content[1:] or ""


_TOOL_KEYS = ("type", "function")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_SCHEMA_KEYS = ("$schema", "$id", "title", "type", "description", "enum", "const", "properties", "required", "items")
_SCHEMAS_BY_NAME = frozenset({"patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_ONE_SCHEMA = frozenset(
    {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties"}
)


def ordered_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools in their order, with the keys of each in one order, however they came.

    A function's arguments come in the order in which its schema requires them, then the optional ones by name.
    """
    return [_ordered_tool(tool) for tool in tools]


def ordered_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of arguments as `ordered_tools` has it. Whoever holds a call to a schema must hold it to this one: it
    settles in which order arguments come, and the prompt shows them to the model in that order."""
    ordered: dict[str, Any] = _ordered_schema(schema)
    return ordered


def _ordered_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    placed = _keys_in_order(tool, _TOOL_KEYS)
    function = tool.get("function")
    if isinstance(function, Mapping):
        placed["function"] = {
            key: _ordered_schema(value) if key == "parameters" else _ordered_data(value)
            for key, value in _keys_in_order(function, _FUNCTION_KEYS).items()
        }
    return placed


def _ordered_schema(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return _ordered_data(schema)
    return {key: _ordered_keyword(key, value, schema) for key, value in _keys_in_order(schema, _SCHEMA_KEYS).items()}


def _ordered_keyword(key: str, value: Any, schema: Mapping[str, Any]) -> Any:
    if key == "properties" and isinstance(value, Mapping):
        required = schema.get("required")
        first = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        return {name: _ordered_schema(each) for name, each in _keys_in_order(value, first).items()}
    if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: _ordered_schema(value[name]) for name in sorted(value)}
    if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
        return [_ordered_schema(each) for each in value]
    return _ordered_schema(value) if key in _ONE_SCHEMA else _ordered_data(value)


def _keys_in_order(value: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    names = dict.fromkeys([*(name for name in first if name in value), *sorted(value)])
    return {name: value[name] for name in names}


def _ordered_data(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _ordered_data(value[name]) for name in sorted(value)}
    return [_ordered_data(each) for each in value] if isinstance(value, list) else value


def conversation_keys(messages: Sequence[Message], salt: str, *, ids: bool) -> list[bytes]:
    """What names a conversation after none, one, two... of its messages; `ids`: those of calls count.

    What an assistant thought does not count, as many clients leave it out of what they send back.
    """
    found = [blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()]
    for message in messages:
        found.append(extend_conversation_key(found[-1], _message_essence(message, ids=ids)))
    return found


def key_with_answer(thread: bytes, content: str, calls: Sequence[tuple[str, str, str]], *, ids: bool) -> bytes:
    """The key of the conversation `thread` after an answer, whose calls are tuples of id, name and arguments."""
    made = [{"id": id, "function": {"name": name, "arguments": arguments}} for id, name, arguments in calls]
    return extend_conversation_key(
        thread, _message_essence({"role": "assistant", "content": content, "tool_calls": made}, ids=ids)
    )


def extend_conversation_key(thread: bytes, essence: Any) -> bytes:
    written = json.dumps(essence, sort_keys=True, ensure_ascii=True, default=str)
    return blake2b(thread + written.encode(), digest_size=16).digest()


def reasoning_of(message: Message) -> str | None:
    """The thinking of an assistant's message, without white space around it.

    None where there is none, as most clients leave it out. An empty text in its key means that none is wanted.
    """
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            return message[key].strip()
    found = _INLINE_THINKING.match(_text_of_content(message.get("content")))
    return found[1].strip() if found else None


def visible_text(message: Message) -> str:
    """The text of an assistant's message, without thinking in front of it and white space around it."""
    text = _text_of_content(message.get("content"))
    thinking = _INLINE_THINKING.match(text)
    return text[thinking.end() if thinking else 0 :].strip()


def _message_essence(message: Message, *, ids: bool) -> list[Any]:
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role != "assistant":
        answered_call = message.get("tool_call_id") if ids else None
        return [role, _essence_parts(message.get("content")), message.get("name"), answered_call]
    calls = [_call_essence(call, ids=ids) for call in message.get("tool_calls") or ()]
    return [role, visible_text(message), calls]


def _essence_parts(content: Any) -> list[Any]:
    """A string is the same as a single part: clients change from one to the other between turns."""
    if not isinstance(content, list):
        return [content or ""]
    return [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in content]


def _text_of_content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _call_essence(call: Any, *, ids: bool) -> list[Any]:
    function = call.get("function") or {}
    return [call.get("id") if ids else None, function.get("name"), _arguments_essence(function.get("arguments"))]


def _arguments_essence(arguments: Any) -> Any:
    """Arguments as a value, so that white space, escapes and the order of keys do not count."""
    return (
        arguments_as_text(arguments).strip()
        if are_unparsed_arguments(arguments)
        else _plain_numbers(arguments_as_object(arguments))
    )


def _plain_numbers(value: Any) -> Any:
    """A JavaScript client writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain_numbers(each) for key, each in value.items()}
    return [_plain_numbers(each) for each in value] if isinstance(value, list) else value
