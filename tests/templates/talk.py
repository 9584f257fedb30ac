"""A conversation with a model that says what the test tells it, in tokens that no encoder would choose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.parser.events import (
    ContentDelta,
    ParsedEvent,
    PastCall,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegan,
)
from ingot.text.parser.parser import ThinkingStart
from ingot.text.prompt.answer_cache import AnswerCache
from ingot.text.prompt.assembly import Prompt
from ingot.text.prompt.canonical import key_with_answer
from ingot.text.prompt.conversation import Conversation, PromptBuilder
from ingot.text.tool_formats.rendering import render_calls
from tests.templates.real import Real
from tests.text.parser.answers import TOOLS, new_parser

Dict = dict[str, Any]
SHOWN: list[Dict] = [
    {"type": "function", "function": {"name": t.name, "parameters": dict(t.parameters)}} for t in TOOLS
]


@dataclass(frozen=True, slots=True)
class Says:
    """What the model is to answer. `wrapped`: its calls are JSON between these two, not in its family's first form."""

    text: str = "Well."
    thought: str = ""
    calls: tuple[PastCall, ...] = ()
    wrapped: tuple[str, str] | None = None

    def written(self, model: Real) -> str:
        """Its calls."""
        if self.wrapped is None:
            return render_calls(model.format, self.calls)
        one_by_one = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in self.calls]
        return "\n".join(one_by_one).join(self.wrapped)


@dataclass
class Talk:
    """`echoes_thinking`: the client sends back what the model thought; `remembers`: we know it ourselves."""

    model: Real
    tools: Sequence[Dict] = ()
    history: TemplateHistory = "stable"
    echoes_thinking: bool = False
    remembers: bool = True
    random: Random = field(default_factory=lambda: Random(0))
    messages: list[Dict] = field(default_factory=list)
    answers: AnswerCache = field(default_factory=AnswerCache)
    computed: tuple[int, ...] = ()  # what the engine has computed so far: prompt, answer and its end
    called: bool = False  # the last answer called a tool
    prompt: Prompt | None = None

    def asks(self, *messages: Dict, thinking: bool | None = None) -> Prompt:
        self.messages += messages
        switch = self.model.switch
        variables = {switch[0]: switch[1] if thinking else switch[2]} if switch and thinking is not None else None
        composer = PromptBuilder(self.model.tokenizer, self.model.template, self.answers)
        wanted = Conversation(
            self.messages, self.tools, variables, history=self.history, remembers=self.remembers, salt="mine"
        )
        self.prompt = composer.compose(wanted, self.model.format)
        return self.prompt

    def says(self, answer: Says) -> Dict:
        """The model answers: the tokens are kept, the client gets the message and sends it back in its own way."""
        assert self.prompt is not None
        raw, start = self._raw(answer)
        tokens = self._tokens(raw)
        parser = new_parser(self.model.format, TOOLS if self.tools else (), start)
        told = _told(parser.push(raw) + parser.flush())
        calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in told["tool_calls"]]
        ids = self.model.template.traits_for(bool(self.tools)).call_ids
        if self.prompt.thread:
            thread = key_with_answer(self.prompt.thread, told["content"], calls, ids=ids)
            self.answers.keep(thread, self.prompt.opening, tokens, told["reasoning_content"])
        self.called = bool(calls)
        self.computed = (*self.prompt.tokens, *tokens, *self._end())
        self.messages.append(self._echo(told))
        return told

    def _raw(self, answer: Says) -> tuple[str, ThinkingStart]:
        assert self.prompt is not None
        tags = self.model.format.thinking
        start = ThinkingStart.after(self.prompt.text, tags)
        body = answer.text
        if answer.calls and self.tools:
            body = (body + "\n" if body else "") + answer.written(self.model)
        if tags is not None and start is ThinkingStart.OPENED:
            return f"{answer.thought}\n{tags.close}\n\n{body}", start
        closed = tags is not None and self.prompt.text.rstrip().endswith(tags.close)
        if tags is not None and not closed and answer.thought and tags.open in self.model.template.source:
            return f"{tags.open}\n{answer.thought}\n{tags.close}\n\n{body}", start
        return body, start

    def _tokens(self, raw: str) -> list[int]:
        """A model is free to spell a text in other tokens than the encoder would."""
        cuts = sorted({0, len(raw), *(self.random.randrange(len(raw) + 1) for _ in range(3))})
        pieces = [raw[begin:end] for begin, end in pairwise(cuts)]
        return [token for piece in pieces for token in self.model.tokenizer.encode(piece, add_special=False)]

    def _end(self) -> tuple[int, ...]:
        if ends := self.model.ends:
            return tuple(self.model.tokenizer.encode(ends[-1 if self.called else 0], add_special=False))
        [end] = self.model.tokenizer.eos_ids
        return (end,)

    def _echo(self, told: Dict) -> Dict:
        message: Dict = {"role": "assistant", "content": told["content"] or None}
        if self.echoes_thinking and told["reasoning_content"]:
            message["reasoning_content"] = told["reasoning_content"]
        if told["tool_calls"]:
            message["tool_calls"] = [_written_anew(call) for call in told["tool_calls"]]
        return message


def results(message: Dict) -> list[Dict]:
    """A result for each of an assistant's calls."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": f"Result {at}"}
        for at, call in enumerate(message.get("tool_calls") or ())
    ]


def _told(events: list[ParsedEvent]) -> Dict:
    told: Dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        match event:
            case ContentDelta():
                told["content"] += event.text
            case ReasoningDelta():
                told["reasoning_content"] += event.text
            case ToolCallBegan():
                function = {"name": event.name, "arguments": ""}
                told["tool_calls"].append({"id": event.id, "type": "function", "function": function})
            case ToolCallArguments():
                told["tool_calls"][event.index]["function"]["arguments"] += event.fragment
    return told


def _written_anew(call: Dict) -> Dict:
    """The same call as a client writes it: other white space, other order of keys, escapes."""
    arguments = json.loads(call["function"]["arguments"])
    shuffled = {key: arguments[key] for key in sorted(arguments, reverse=True)}
    return {**call, "function": {**call["function"], "arguments": json.dumps(shuffled, indent=1)}}
