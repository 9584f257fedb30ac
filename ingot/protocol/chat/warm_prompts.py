"""Prompts that are computed before anybody asks, so that the first who does finds them."""

from __future__ import annotations

from typing import Any, Final

from ingot.engine.request import Request, Sampling
from ingot.errors import ConfigError, ContextOverflow, IngotError
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.openai.completions import read_completion
from ingot.protocol.served import Served
from ingot.text.input_files import FilePrompt

INSTRUCTIONS: Final = ("system", "developer")
FOLLOWING: Final = {"role": "user", "content": "."}


def warm_request(prompt: FilePrompt, served: Served, request_id: str) -> Request:
    """What computes and pins a prompt, up to where the text begins that will differ.

    Raises ConfigError that names the prompt's place in its file.
    """
    try:
        job, length = read(as_body(prompt.value), served, request_id)
        tokens = job.request.prompts[0][:length]
        if len(tokens) >= served.card.context:
            raise ContextOverflow(needed=len(tokens) + 1, limit=served.card.context)
    except IngotError as error:
        raise ConfigError(f"{prompt.place}: {error.message}") from error
    return Request(
        id=request_id,
        prompts=(tokens,),
        max_tokens=1,
        sampling=Sampling(temperature=0.0),
        salt=job.request.salt,
        lora=job.request.lora,
        tenant=served.tenant,
        pin=True,
        background=True,
        marks=tuple(tuple(mark for mark in marks if mark <= len(tokens)) for marks in job.request.marks),
        media=tuple(tuple(item for item in items if item.end <= len(tokens)) for items in job.request.media),
    )


def as_body(value: Any) -> dict[str, Any]:
    """A text is a system prompt, a list is a conversation."""
    if isinstance(value, str):
        value = [{"role": "system", "content": value}]
    return {"messages": value} if isinstance(value, list) else dict(value)


def read(body: dict[str, Any], served: Served, request_id: str) -> tuple[GenerationTask, int | None]:
    """The job of a body, and how many tokens of its prompt are the body's own."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return read_completion(body, served, request_id), None
    body = {**body, "add_generation_prompt": False}
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") not in INSTRUCTIONS:
        return read_chat(body, served, request_id), None
    # Many templates refuse a conversation in which nobody speaks. What the user will say begins where this one does.
    job = read_chat({**body, "messages": [*messages, FOLLOWING]}, served, request_id)
    assert job.head is not None and job.head.source is not None
    spans = job.head.source.prompts[0].spans
    return job, next((span.begin for span in spans if span.message == len(messages)), None)
