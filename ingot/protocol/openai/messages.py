"""The messages of a chat as they come over the wire, and as a chat template takes them."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.protocol.chat.media import TEXT_ONLY, MessageList, Unseen
from ingot.protocol.schema.bounds import IDENTIFIER_CHARS, MESSAGES, NAME_CHARS, TOOL_CALLS
from ingot.protocol.schema.fields import Anything, ListOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged, text_or
from ingot.text.parse.call_arguments import as_text

UNSEEN = {"image_url": "image", "input_audio": "audio", "video_url": "video", "file": "file"}
MEDIA = {name: f"({what}) {TEXT_ONLY}" for name, what in UNSEEN.items()}


@dataclass(frozen=True, slots=True)
class TextPart:
    type: str = requires(OneOf(("text",)), "The kind of part.")
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class RefusalPart:
    type: str = requires(OneOf(("refusal",)), "The kind of part.")
    refusal: str = requires(Text(), "What the assistant said when it declined.")

    @property
    def text(self) -> str:
        return self.refusal


CONTENT = text_or(tagged("type", TextPart, refused=MEDIA, unseen=UNSEEN), least=1)
ANSWER = text_or(tagged("type", TextPart, RefusalPart, refused=MEDIA, unseen=UNSEEN), least=1)
Content = str | tuple[TextPart | RefusalPart | Unseen, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    role: str = requires(OneOf(("system", "developer")), "Who speaks.")
    content: Content = requires(CONTENT, "The instructions.")
    name: str | None = accepts(Text(NAME_CHARS), "A name for the speaker, for templates that show one.")

    def as_dict(self) -> dict[str, Any]:
        return chat_message(self.role, self.content, self.name)


@dataclass(frozen=True, slots=True)
class UserMessage:
    role: str = requires(OneOf(("user",)), "Who speaks.")
    content: Content = requires(CONTENT, "What the user says.")
    name: str | None = accepts(Text(NAME_CHARS), "A name for the speaker, for templates that show one.")

    def as_dict(self) -> dict[str, Any]:
        return chat_message(self.role, self.content, self.name)


@dataclass(frozen=True, slots=True)
class CalledFunction:
    name: str = requires(Text(NAME_CHARS, least=1), "The function's name.")
    arguments: Any = accepts(Anything(), "Its arguments, as JSON text; what is no JSON object is shown as it is.")


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str = requires(Text(IDENTIFIER_CHARS), "The call's id, to which a tool message answers.")
    type: str = requires(OneOf(("function",), {"custom": "tools are not supported."}), "Functions are the only tools.")
    function: CalledFunction = requires(ObjectOf(CalledFunction), "What was called.")

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": as_text(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    role: str = requires(OneOf(("assistant",)), "Who speaks.")
    content: Content | None = accepts(ANSWER, "What the assistant said; none is an empty turn.")
    name: str | None = accepts(Text(NAME_CHARS), "A name for the speaker, for templates that show one.")
    refusal: str | None = accepts(Text(), "What the assistant said when it declined; stands in for the content.")
    tool_calls: tuple[ToolCall, ...] = accepts(ListOf(ObjectOf(ToolCall), TOOL_CALLS), "The calls it made.", default=())
    reasoning_content: str | None = accepts(Text(), "What it thought, for templates that show past thinking.")
    reasoning: str | None = accepts(Text(), "Another name of reasoning_content.")
    audio: None = refuses(f"cannot be honoured: audio {TEXT_ONLY}")
    function_call: None = refuses("is not supported; send `tool_calls`, which replaced it.")

    def as_dict(self) -> dict[str, Any]:
        content = self.content if self.content is not None else self.refusal
        message = chat_message(self.role, content, self.name)
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        return message


@dataclass(frozen=True, slots=True)
class ToolMessage:
    role: str = requires(OneOf(("tool",)), "Who speaks.")
    content: Content = requires(CONTENT, "What the tool returned.")
    tool_call_id: str = requires(Text(IDENTIFIER_CHARS), "The call that this answers.")
    name: str | None = accepts(Text(NAME_CHARS), "The function that was called, for templates that show it.")

    def as_dict(self) -> dict[str, Any]:
        return chat_message(self.role, self.content, self.name) | {"tool_call_id": self.tool_call_id}


Message = Instruction | UserMessage | AssistantMessage | ToolMessage

MESSAGE = tagged(
    *("role", Instruction, UserMessage, AssistantMessage, ToolMessage),
    refused={"function": "messages are not supported; send role 'tool', which replaced it."},
)
CONVERSATION = MessageList(ListOf(MESSAGE, most=MESSAGES, least=1))


def as_dicts(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    return [message.as_dict() for message in messages]


def chat_message(role: str, content: Content | None, name: str | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": plain(content)}
    return message if name is None else message | {"name": name}


def plain(content: Content | None) -> str | list[dict[str, str]] | None:
    """Parts stay parts: whether and how they are joined is the template's affair."""
    if content is None or isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]
