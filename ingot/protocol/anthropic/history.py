"""Anthropic's messages as a chat that templates take: one message for each turn, thinking that we vouch for, results
of tools as messages of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ingot.errors import BadRequest
from ingot.media.medium import Medium
from ingot.protocol.anthropic.messages import (
    AssistantMessage,
    Message,
    RedactedBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
    said_by,
)
from ingot.protocol.chat.media import Unseen, content_of
from ingot.protocol.chat.sealing import ThinkingSeal
from ingot.protocol.schema.fields import BodyReading
from ingot.text.parse.call_arguments import as_text

ChatMessage = dict[str, Any]


def as_chat(
    system: str | tuple[TextBlock, ...] | None, messages: tuple[Message, ...], seal: ThinkingSeal, reading: BodyReading
) -> list[ChatMessage]:
    """`reading` is told which thinking was left out, as not signed here."""
    told: list[ChatMessage] = []
    if system:
        told.append(plain_message("system", [system] if isinstance(system, str) else [block.text for block in system]))
    called: dict[str, str] = {}  # names by ids
    for at, message in enumerate(messages):
        path = f"messages.{at}"
        match message:
            case SystemMessage():
                told.append(plain_message("system", [block.text for block in message.blocks]))
            case UserMessage():
                told += user_messages(message, called, path)
            case AssistantMessage():
                told.append(assistant_message(message, seal, path, reading))
                called |= {block.id: block.name for block in message.blocks if isinstance(block, ToolUseBlock)}
    return told


def user_messages(message: UserMessage, called: dict[str, str], path: str) -> Iterator[ChatMessage]:
    """A turn of the user's: the results of tools, and what is said before, between and after them."""
    texts: list[str | Medium] = []
    for at, block in enumerate(message.blocks):
        if not isinstance(block, ToolResultBlock):
            texts += said_by(block)
            continue
        if texts:
            yield plain_message("user", texts)
            texts = []
        name = called.get(block.tool_use_id)
        if name is None:
            where = f"{path}.content.{at}.tool_use_id"
            raise BadRequest(f"{where}: no tool_use before it has the id '{block.tool_use_id[:100]}'.", param=where)
        said = block.said
        content = said if isinstance(said, str) else content_of(said)
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}
    if texts:
        yield plain_message("user", texts)


def assistant_message(message: AssistantMessage, seal: ThinkingSeal, path: str, reading: BodyReading) -> ChatMessage:
    # A text without a word may be what filled a silence of ours.
    texts = [block.text for block in message.blocks if isinstance(block, TextBlock | Unseen) and block.text]
    calls = [call(block) for block in message.blocks if isinstance(block, ToolUseBlock)]
    thoughts = []
    for at, block in enumerate(message.blocks):
        if isinstance(block, ThinkingBlock | RedactedBlock):
            thought = vouched(block, seal)
            if thought is None:
                note(reading, f"{path}.content.{at}.{block.type}")
            else:
                thoughts.append(thought)
    told: ChatMessage = {"role": "assistant", "content": None}
    if texts or not calls:
        told = plain_message("assistant", texts)
    if calls:
        told["tool_calls"] = calls
    if thoughts:
        told["reasoning_content"] = "\n".join(thoughts)
    return told


def vouched(block: ThinkingBlock | RedactedBlock, seal: ThinkingSeal) -> str | None:
    """The thinking, if it is word for word what a model here thought.

    What is not is left out rather than refused: an agent that was moved here in mid-conversation sends back what
    other servers signed, and must get on.
    """
    if isinstance(block, RedactedBlock):
        return None
    signed = seal.open(block.signature)
    return signed if block.thinking in (signed, "") else None


def note(reading: BodyReading, path: str) -> None:
    if not reading.knows_ignored(path):
        reading.ignore(path)


def call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": as_text(block.input)}
    return {"id": block.id, "type": "function", "function": function}


def plain_message(role: str, said: Sequence[str | Medium]) -> ChatMessage:
    return {"role": role, "content": content_of(said)}


def loaded_tools(messages: Iterable[Message]) -> set[str]:
    """The deferred tools that results have named."""
    return {
        name
        for message in messages
        if isinstance(message, UserMessage)
        for block in message.blocks
        if isinstance(block, ToolResultBlock)
        for name in block.loaded
    }


def forget_thinking(messages: list[ChatMessage], keep: int) -> list[str]:
    """Takes the thinking out of all but the newest `keep` turns that have any; gives back what it was, by turn.

    A turn is what the assistant does between two messages of the user's, the results of tools aside. An empty thought
    stays: where there is none, the thinking that the server remembers would come back.
    """
    turns: list[list[ChatMessage]] = [[]]
    for message in messages:
        if message["role"] == "user":
            turns.append([])
        elif "reasoning_content" in message:
            turns[-1].append(message)
    thoughtful = [turn for turn in turns if turn]
    forgotten = thoughtful[: len(thoughtful) - keep] if keep else thoughtful
    thoughts = ["\n".join(message["reasoning_content"] for message in turn) for turn in forgotten]
    for turn in forgotten:
        for message in turn:
            message["reasoning_content"] = ""
    return thoughts
