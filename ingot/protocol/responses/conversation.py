"""The conversation that the items of a response's input make up."""

from __future__ import annotations

from typing import Any

from ingot.errors import BadRequest
from ingot.protocol.chat.media import Unseen, content_of
from ingot.protocol.chat.sealing import ThinkingSeal
from ingot.protocol.responses.input_items import (
    ContentPart,
    CustomCallInput,
    CustomOutputInput,
    FunctionCallInput,
    FunctionOutputInput,
    InputFile,
    InputImage,
    Item,
    McpCallInput,
    MessageInput,
    ReasoningInput,
    ReferenceInput,
    joined_name,
)
from ingot.protocol.schema.fields import general
from ingot.text.parse.call_arguments import as_text


class InputConversation:
    """Items, in order, put together to messages as a chat has them.

    An answer is one message in a chat and several items here: thinking, text and calls that follow one another are
    made one message again, so that the prompt is the one that the model went on from. `finish` after the last. Thinking
    that was sealed elsewhere is left out rather than refused: an agent that was moved here must get on.
    """

    def __init__(self, seal: ThinkingSeal) -> None:
        self._seal = seal
        self.left_out: list[str] = []  # thinking that was sealed elsewhere
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of the tools called, by call id
        self._answer: dict[str, Any] | None = None  # the assistant's message that items are still added to
        self._said_last = False
        self._results: list[tuple[str, str]] = []  # of the server's own calls, which follow the whole answer

    def add(self, item: Item, path: str) -> None:
        match item:
            case MessageInput(role="assistant"):
                self._say(joined_text(item.content))
            case MessageInput():
                self._tell({"role": item.role, "content": parts_of(item.content)})
            case ReasoningInput():
                thought = item.thought(self._seal)
                if thought is None:
                    self.left_out.append(general(f"{path}.encrypted_content"))
                self._think(thought or "")
            case FunctionCallInput() | CustomCallInput():
                self._call(item.call_id, joined_name(item.namespace, item.name), item.arguments)
            case FunctionOutputInput() | CustomOutputInput():
                self._settle()
                self._result(item.call_id, parts_of(item.output))
            case McpCallInput():
                call_id = item.call_id or item.id
                self._call(call_id, joined_name(item.server_label, item.name), item.arguments)
                self._results.append((call_id, item.result))
            case ReferenceInput():
                raise BadRequest(f"{path}: an item that is referred to must not be a reference itself.", param=path)

    def finish(self) -> list[dict[str, Any]]:
        self._settle()
        return self._messages

    def _think(self, thought: str) -> None:
        if not thought:
            return
        self._settle()
        answer = self._begun()
        if answer["content"] or "tool_calls" in answer:
            self._answer = None
            answer = self._begun()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + thought
        self._said_last = False

    def _say(self, text: str) -> None:
        self._settle()
        if self._said_last:  # two messages in a row are two turns
            self._answer = None
        answer = self._begun()
        answer["content"] = (answer["content"] or "") + text
        self._said_last = True

    def _call(self, call_id: str, name: str, arguments: Any) -> None:
        function = {"name": name, "arguments": as_text(arguments)}
        self._begun().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._names[call_id] = name
        self._said_last = False

    def _settle(self) -> None:
        results, self._results = self._results, []
        for call_id, result in results:
            self._result(call_id, result)

    def _result(self, call_id: str, content: str | list[dict[str, Any]]) -> None:
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        name = self._names.get(call_id)
        self._append(message if name is None else message | {"name": name})

    def _begun(self) -> dict[str, Any]:
        if self._answer is None:
            self._answer = {"role": "assistant", "content": None}
            self._messages.append(self._answer)
            self._said_last = False
        return self._answer

    def _tell(self, message: dict[str, Any]) -> None:
        self._settle()
        self._append(message)

    def _append(self, message: dict[str, Any]) -> None:
        self._answer, self._said_last = None, False
        self._messages.append(message)


def parts_of(content: str | tuple[ContentPart, ...]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    media = (InputImage, InputFile)
    return content_of([part.medium if isinstance(part, media) else part.text for part in content]) or []


def joined_text(content: str | tuple[ContentPart, ...]) -> str:
    """What an assistant said, who shows no pictures."""
    if isinstance(content, str):
        return content
    return "".join(_as_text(part) for part in content)


def _as_text(part: ContentPart) -> str:
    if isinstance(part, InputImage | InputFile):
        return Unseen("image" if isinstance(part, InputImage) else "file", taken=True).text
    return part.text
