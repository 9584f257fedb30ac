"""One conversation, asked in the words of each protocol, and each protocol's answer in plain words again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

Json = dict[str, Any]


@dataclass(frozen=True)
class User:
    text: str


@dataclass(frozen=True)
class Assistant:
    text: str = ""
    calls: tuple[tuple[str, str, Json], ...] = ()  # id, name, arguments


@dataclass(frozen=True)
class Result:
    call: str
    name: str
    text: str


@dataclass(frozen=True)
class Conversation:
    turns: tuple[User | Assistant | Result, ...]
    system: str | None = None
    tools: tuple[Json, ...] = ()  # name, description, parameters
    most: int = 500
    stop: str | None = None


@dataclass(frozen=True)
class Answer:
    text: str
    thinking: str
    calls: tuple[tuple[str, Json], ...]
    reason: str  # stop, length, tool_calls
    prompt: int
    completion: int


class Protocol:
    """`body` asks; `whole` and `streamed` read what came back."""

    path: str

    def body(self, asked: Conversation) -> Json:
        raise NotImplementedError

    def whole(self, made: Json) -> Answer:
        raise NotImplementedError

    def streamed(self, lines: list[Json]) -> Answer:
        raise NotImplementedError

    def ask(self, client: httpx.Client, asked: Conversation, *, stream: bool) -> Answer:
        made = client.post(self.path, json=self.body(asked) | {"stream": stream}, timeout=60)
        assert made.status_code == 200, made.text
        return self.streamed(list(events(made.text))) if stream else self.whole(made.json())


def events(text: str) -> Iterator[Json]:
    """The JSON of server-sent events, or of lines."""
    for line in text.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            yield json.loads(data)


class Chat(Protocol):
    path = "/v1/chat/completions"

    def body(self, asked: Conversation) -> Json:
        said = [] if asked.system is None else [{"role": "system", "content": asked.system}]
        return {
            "messages": said + [self._message(turn) for turn in asked.turns],
            "max_tokens": asked.most,
            "stream_options": {"include_usage": True},
            **({"tools": [{"type": "function", "function": tool} for tool in asked.tools]} if asked.tools else {}),
            **({"stop": asked.stop} if asked.stop else {}),
        }

    def _message(self, turn: User | Assistant | Result) -> Json:
        match turn:
            case User():
                return {"role": "user", "content": turn.text}
            case Result():
                return {"role": "tool", "tool_call_id": turn.call, "content": turn.text}
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for id, name, arguments in turn.calls
        ]
        return {"role": "assistant", "content": turn.text or None, **({"tool_calls": calls} if calls else {})}

    def whole(self, made: Json) -> Answer:
        choice = made["choices"][0]
        message = choice["message"]
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
        return self._answer(
            message["content"] or "",
            message.get("reasoning_content", ""),
            calls,
            choice["finish_reason"],
            made["usage"],
        )

    def streamed(self, lines: list[Json]) -> Answer:
        choices = [choice for line in lines for choice in line["choices"]]
        deltas = [choice["delta"] for choice in choices]
        calls: dict[int, list[str]] = {}
        for delta in deltas:
            for call in delta.get("tool_calls", []):
                made = calls.setdefault(call["index"], ["", ""])
                made[0] += call["function"].get("name", "")
                made[1] += call["function"].get("arguments", "")
        (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        thinking = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        return self._answer(
            text, thinking, [(name, given) for name, given in calls.values()], reason, lines[-1]["usage"]
        )

    def _answer(self, text: str, thinking: str, calls: list[tuple[str, str]], reason: str, usage: Json) -> Answer:
        made = tuple((name, json.loads(arguments)) for name, arguments in calls)
        return Answer(text, thinking, made, reason, usage["prompt_tokens"], usage["completion_tokens"])


class Responses(Protocol):
    path = "/v1/responses"

    def body(self, asked: Conversation) -> Json:
        return {
            "input": [item for turn in asked.turns for item in self._items(turn)],
            "instructions": asked.system,
            "max_output_tokens": asked.most,
            "tools": [{"type": "function", **tool} for tool in asked.tools],
            "store": False,
            **({"stop": asked.stop} if asked.stop else {}),
        }

    def _items(self, turn: User | Assistant | Result) -> list[Json]:
        match turn:
            case User():
                return [{"role": "user", "content": turn.text}]
            case Result():
                return [{"type": "function_call_output", "call_id": turn.call, "output": turn.text}]
        said = [{"role": "assistant", "content": turn.text}] if turn.text else []
        return said + [
            {"type": "function_call", "call_id": id, "name": name, "arguments": json.dumps(arguments)}
            for id, name, arguments in turn.calls
        ]

    def whole(self, made: Json) -> Answer:
        parts: dict[str, list[Json]] = {"message": [], "reasoning": [], "function_call": []}
        for item in made["output"]:
            parts[item["type"]].append(item)
        calls = tuple((item["name"], json.loads(item["arguments"])) for item in parts["function_call"])
        reason = "length" if made["status"] == "incomplete" else "tool_calls" if calls else "stop"
        return Answer(
            "".join(part["text"] for item in parts["message"] for part in item["content"]),
            "".join(part["text"] for item in parts["reasoning"] for part in item["content"]),
            calls,
            reason,
            made["usage"]["input_tokens"],
            made["usage"]["output_tokens"],
        )

    def streamed(self, lines: list[Json]) -> Answer:
        final = self.whole(lines[-1]["response"])
        deltas = [line["delta"] for line in lines if line["type"] == "response.output_text.delta"]
        assert "".join(deltas) == final.text
        return final


REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


class Messages(Protocol):
    path = "/v1/messages"

    def body(self, asked: Conversation) -> Json:
        return {
            "messages": [self._message(turn) for turn in asked.turns],
            "max_tokens": asked.most,
            "thinking": {"type": "adaptive"},
            **({"system": asked.system} if asked.system else {}),
            "tools": [
                {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                for tool in asked.tools
            ],
            **({"stop_sequences": [asked.stop]} if asked.stop else {}),
        }

    def _message(self, turn: User | Assistant | Result) -> Json:
        match turn:
            case User():
                return {"role": "user", "content": turn.text}
            case Result():
                result = {"type": "tool_result", "tool_use_id": turn.call, "content": turn.text}
                return {"role": "user", "content": [result]}
        said: list[Json] = [{"type": "text", "text": turn.text}] if turn.text else []
        calls = [{"type": "tool_use", "id": id, "name": name, "input": given} for id, name, given in turn.calls]
        return {"role": "assistant", "content": said + calls}

    def whole(self, made: Json) -> Answer:
        blocks = made["content"]
        return Answer(
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"),
            REASONS[made["stop_reason"]],
            self._prompt(made["usage"]),
            made["usage"]["output_tokens"],
        )

    def streamed(self, lines: list[Json]) -> Answer:
        blocks: list[Json] = []
        for line in lines:
            if line["type"] == "content_block_start":
                blocks.append(line["content_block"] | {"json": ""})
            elif line["type"] == "content_block_delta":
                block, delta = blocks[line["index"]], line["delta"]
                for kind, name in (("text_delta", "text"), ("thinking_delta", "thinking")):
                    if delta["type"] == kind:
                        block[name] += delta[name]
                if delta["type"] == "input_json_delta":
                    block["json"] += delta["partial_json"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"] or "{}")
        (last,) = [line for line in lines if line["type"] == "message_delta"]
        usage = lines[0]["message"]["usage"] | last["usage"]
        return self.whole({"content": blocks, "stop_reason": last["delta"]["stop_reason"], "usage": usage})

    def _prompt(self, usage: Json) -> int:
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"])


class Ollama(Protocol):
    path = "/api/chat"

    def body(self, asked: Conversation) -> Json:
        said = [] if asked.system is None else [{"role": "system", "content": asked.system}]
        return {
            "model": "default",
            "messages": said + [self._message(turn) for turn in asked.turns],
            "options": {"num_predict": asked.most, **({"stop": [asked.stop]} if asked.stop else {})},
            "tools": [{"type": "function", "function": tool} for tool in asked.tools],
        }

    def _message(self, turn: User | Assistant | Result) -> Json:
        match turn:
            case User():
                return {"role": "user", "content": turn.text}
            case Result():
                return {"role": "tool", "tool_name": turn.name, "content": turn.text}
        calls = [{"function": {"name": name, "arguments": given}} for _, name, given in turn.calls]
        return {"role": "assistant", "content": turn.text, **({"tool_calls": calls} if calls else {})}

    def whole(self, made: Json) -> Answer:
        return self.streamed([made])

    def streamed(self, lines: list[Json]) -> Answer:
        messages = [line["message"] for line in lines]
        calls = tuple(
            (call["function"]["name"], call["function"]["arguments"])
            for message in messages
            for call in message.get("tool_calls", [])
        )
        last = lines[-1]
        reason = "tool_calls" if calls and last["done_reason"] == "stop" else last["done_reason"]
        return Answer(
            "".join(message["content"] for message in messages),
            "".join(message.get("thinking") or "" for message in messages),
            calls,
            reason,
            last["prompt_eval_count"],
            last["eval_count"],
        )


PROTOCOLS: tuple[Protocol, ...] = (Chat(), Responses(), Messages(), Ollama())
