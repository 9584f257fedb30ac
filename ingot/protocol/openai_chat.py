"""`POST /v1/chat/completions`: the body as OpenAI describes it, and the job it becomes."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ingot.engine.request import Request
from ingot.protocol import bounds
from ingot.protocol.answers import Head, Job
from ingot.protocol.chat_answers import ChatStreamed, ChatWhole
from ingot.protocol.fields import Bool, Int, ListOf, MapOf, OneOf, Text
from ingot.protocol.generation import GenerationBody
from ingot.protocol.messages import CONVERSATION, Message
from ingot.protocol.prompts import Ending, chat_prompt
from ingot.protocol.records import Record, Tagged, accepts, refuses, requires
from ingot.protocol.rules import Given, Is, Never, Not
from ingot.protocol.served import Served
from ingot.protocol.template_variables import TemplateVariables

NO_TOOLS = "is not supported: this server does not yet parse tool calls out of a model's answer."
NO_GRAMMAR = "is not supported: this server cannot yet hold a model to a format."
OTHER_TIER = "is not offered: every request is served alike."


@dataclass(frozen=True, slots=True)
class TextFormat:
    type: str = requires(OneOf(("text",)), "Plain text.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBody(GenerationBody):
    messages: tuple[Message, ...] = requires(CONVERSATION, "The conversation so far.")
    max_completion_tokens: int | None = accepts(
        Int(bounds.MAX_TOKENS), "Most tokens to generate; by default, as many as the context holds."
    )
    max_tokens: int | None = accepts(Int(bounds.MAX_TOKENS), "The older name of max_completion_tokens.")
    logprobs: bool = accepts(Bool(), "Give the log-probability of each token.", default=False)
    top_logprobs: int | None = accepts(
        Int(bounds.TOP_LOGPROBS), "Give this many likeliest tokens too; needs `logprobs`."
    )
    add_generation_prompt: bool | None = accepts(
        Bool(), "End the prompt where an answer begins; the default unless the last message is continued."
    )
    continue_final_message: bool = accepts(
        Bool(), "Go on with the last message, an assistant's, instead of beginning a new one.", default=False
    )
    chat_template_kwargs: dict[str, Any] | None = accepts(
        TemplateVariables(), "Values for variables that the model's chat template reads."
    )

    response_format: TextFormat | None = accepts(
        Tagged("type", {"text": Record(TextFormat)}, refused={"json_object": NO_GRAMMAR, "json_schema": NO_GRAMMAR}),
        "Plain text is the only format.",
    )
    modalities: tuple[str, ...] | None = accepts(
        ListOf(OneOf(("text",), {"audio": "is not supported: the answer is text."}), most=2, least=1),
        "What the answer is made of.",
    )
    service_tier: str | None = accepts(
        OneOf(("auto", "default"), dict.fromkeys(("flex", "scale", "priority", "fast"), OTHER_TIER)),
        "Every request is served alike.",
    )
    metadata: dict[str, str] | None = accepts(
        MapOf(Text(bounds.METADATA_VALUE_CHARS), bounds.METADATA_ENTRIES, bounds.METADATA_KEY_CHARS),
        "Given back with the answer.",
    )
    safety_identifier: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "Who asks; kept by nobody.")
    prompt_cache_key: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "A hint; prompts are matched by content.")
    prompt_cache_retention: str | None = accepts(
        OneOf(("in_memory", "24h")), "The longest a cached prompt may be kept; none outlives the server."
    )
    parallel_tool_calls: bool | None = accepts(Bool(), "Means nothing without tools.")

    tools: None = refuses(NO_TOOLS, [])
    tool_choice: None = refuses(NO_TOOLS, "none", "auto")
    functions: None = refuses(NO_TOOLS, [])
    function_call: None = refuses(NO_TOOLS, "none", "auto")
    store: None = refuses("is not supported: answers are not kept. Send false.", False)
    audio: None = refuses("is not supported: the answer is text.")
    prediction: None = refuses("is not supported: predicted output is not used.")
    reasoning_effort: None = refuses("is not supported: thinking cannot yet be controlled per request.")
    verbosity: None = refuses("is not supported: no served model takes it. Ask for it in the prompt.")
    web_search_options: None = refuses("is not supported: this server never searches the web.")
    moderation: None = refuses("is not supported: nothing is moderated.")
    prompt_cache_options: None = refuses("is not supported: the server decides what it keeps.")
    chat_template: None = refuses("is not supported: a request cannot bring its own template.")

    @property
    def limit(self) -> int | None:
        """Both names are of an upper bound, so the lower one holds where they differ."""
        given = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        return min(given, default=None)

    @property
    def ending(self) -> Ending:
        if self.continue_final_message:
            return "continued"
        return "closed" if self.add_generation_prompt is False else "opened"


CHAT_BODY = Record(
    ChatBody,
    (
        Never(
            (Given("top_logprobs"), Not(Is("logprobs", True))),
            "top_logprobs needs logprobs to be true.",
            param="top_logprobs",
        ),
        Never(
            (Is("add_generation_prompt", True), Is("continue_final_message", True)),
            "add_generation_prompt begins a new message and continue_final_message goes on with the last: choose one.",
            param="continue_final_message",
        ),
    ),
)


def read_chat(value: Any, served: Served, request_id: str) -> Job:
    """The job that a decoded body asks for. Renders and tokenizes, so it may take a while: not for an event loop."""
    reading = served.reading()
    body: ChatBody = CHAT_BODY.parse(value, "", reading)
    request = Request(
        id=request_id,
        prompts=(chat_prompt(served, body.messages, ending=body.ending, extra=body.chat_template_kwargs),),
        max_tokens=body.limit,
        n=body.n,
        sampling=body.sampling(logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        stop=body.stopping(),
        cache=body.cache == "auto",
        salt=body.cache_salt,
        deadline=body.deadline(served),
    )
    head = Head.of(request_id, int(time.time()), served, reading)
    return Job(request, chat_view(body, head), "messages")


def chat_view(body: ChatBody, head: Head) -> ChatStreamed | ChatWhole:
    tiered = body.service_tier is not None
    if body.stream:
        return ChatStreamed(head, body.n, logprobs=body.logprobs, include_usage=body.include_usage, tiered=tiered)
    return ChatWhole(head, body.n, logprobs=body.logprobs, metadata=body.metadata, tiered=tiered)
