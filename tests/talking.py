"""Conversations with tiny random models that cannot but call the tool that a test wants, or babble in plain letters.

Unlike a scripted model's, their answers depend on every layer, of every kind, having the right state.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench import random_models
from ingot.config import Settings
from ingot.engine.admission import EngineLimits
from ingot.engine.core import LoadedModel
from ingot.engine.engine import Engine
from ingot.engine.request import CallArguments, CallBegan, Failed, Request, TextDelta
from ingot.engine.streams import EventStream
from ingot.kernels.device import current_device
from tests import engines, scripted, tiny
from tests.http.asgi import call
from tests.http.scripted import build_app, settings

KINDS = {"append": "llama", "window": "window", "hybrid": "hybrid"}
ALPHABET = scripted.tokenizer().encode("abcdefghijklmnopqrstuvwxyz", add_special=False)
LETTERS = {str(token): 100 for token in ALPHABET}
TEMPLATE = """
{%- if messages[0].role == 'system' or tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {%- for tool in tools or [] %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\nTo call one: <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
WIDEST = 256
CONTEXT = 4096
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does what {name} does, and nothing else.",
            "parameters": {
                "type": "object",
                "properties": {"what": {"enum": [f"{name}-it"]}},
                "required": ["what"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("look", "fetch", "write")
]


def start(
    kind: str, *, cache_bytes: int = 1 << 26, limits: EngineLimits | None = None, disk: Path | None = None
) -> Engine:
    """A running engine of one of `KINDS`, which keeps records in the folder `disk`, if there is one. The caller closes
    it."""
    spelling, folder = scripted.tokenizer(TEMPLATE), _folder(KINDS[kind])
    settings = Settings(context=CONTEXT, prefill_chunk=WIDEST, speculate="off")

    def load() -> LoadedModel:
        made = engines.load(settings, folder, spelling, name=kind)
        kept = None if disk is None else engines.disk_backend(disk, {"model": kind})
        return replace(made, cache_bytes=cache_bytes, disk=kept)

    return Engine(load, limits or EngineLimits())


@cache
def _folder(kind: str) -> Path:
    config = tiny.CONFIGS[kind] | {"vocab_size": scripted.VOCAB}
    return engines.write_tiny(f"talking-{kind}", config, random_models.build(config, spread=0.2))


@dataclass
class Answered:
    message: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache: dict[str, Any]
    ended_by_itself: bool  # not because it was as long as it might be

    @property
    def reason(self) -> str:
        return str(self.cache["reason"])

    @property
    def diverged(self) -> Any:
        return self.cache["diverged"]

    @property
    def left(self) -> int:
        """Tokens of which states were left. The last one of an answer is not computed, unless the next step runs
        already when it is read, as on a GPU: there only an answer that may be no longer is known to end before."""
        computed_ahead = self.ended_by_itself and current_device().kind != "cpu"
        return self.prompt_tokens + self.completion_tokens - (0 if computed_ahead else 1)


@dataclass
class Talk:
    """A client of one application. `ask` sends a whole conversation and gives what came back."""

    app: Any
    opened: list[Request]
    headers: dict[str, str] = field(default_factory=dict)

    def by(self, key: str) -> Talk:
        """The same, with an API key."""
        return replace(self, headers={"x-api-key": key})

    def ask(self, messages: list[dict[str, Any]], **more: Any) -> Answered:
        return asyncio.run(self.asked(messages, **more))

    async def asked(self, messages: list[dict[str, Any]], **more: Any) -> Answered:
        body = {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 200, **more}
        made = await call(self.app, body=body, headers=self.headers)
        assert made.status == 200, made.body
        told = made.json()
        usage = told["usage"]
        return Answered(
            told["choices"][0]["message"],
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            told["ingot"]["cache"],
            told["choices"][0]["finish_reason"] != "length",
        )

    def called(self, messages: list[dict[str, Any]], tool: str, **more: Any) -> Answered:
        """An answer that calls this tool."""
        return self.ask(messages, tool_choice={"type": "function", "function": {"name": tool}}, **more)

    def said(self, messages: list[dict[str, Any]], **more: Any) -> Answered:
        """An answer of a few letters."""
        return self.ask(messages, logit_bias=LETTERS, max_tokens=12, **more)


def talking(engine: Engine, **changes: Any) -> Talk:
    """A client of this engine, which notes what the engine is asked."""
    opened: list[Request] = []
    take = engine.open

    async def noted(request: Request) -> EventStream:
        opened.append(request)
        return await take(request)

    engine.open = noted  # type: ignore[method-assign]
    return Talk(build_app(engine, settings(**changes)), opened)


Spoken = tuple[str, list[tuple[str, str]]]
"""What an answer says, and the tools it calls with their arguments."""


def spoken(message: dict[str, Any]) -> Spoken:
    calls = [made["function"] for made in message.get("tool_calls") or ()]
    return message["content"] or "", [(made["name"], made["arguments"]) for made in calls]


def computed_anew(engine: Engine, request: Request) -> Spoken:
    """What the engine answers to the very same tokens when it takes over nothing."""
    text, calls = "", list[tuple[str, str]]()
    for event in engines.answer(engine, replace(request, id=f"cold-{request.id}", cache=False)):
        match event:
            case TextDelta():
                text += event.text
            case CallBegan():
                calls.append((event.name, ""))
            case CallArguments():
                calls[-1] = (calls[-1][0], calls[-1][1] + event.fragment)
            case Failed():
                raise event.error
    return text, calls


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def result(answer: Answered, text: str) -> dict[str, Any]:
    """What the tool that an answer called gave back."""
    return {"role": "tool", "tool_call_id": answer.message["tool_calls"][0]["id"], "content": text}


def echo(answer: Answered) -> dict[str, Any]:
    """An answer as clients send it back: without what they do not know, its arguments written anew."""
    kept = {"role": "assistant", "content": answer.message["content"]}
    calls = [
        {**made, "function": {**made["function"], "arguments": json.dumps(json.loads(made["function"]["arguments"]))}}
        for made in answer.message.get("tool_calls") or ()
    ]
    return kept | ({"tool_calls": calls} if calls else {})
