"""Text and messages made into prompt tokens. Everything here may take a while: not for an event loop."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Literal

from ingot.errors import BadRequest, Unsupported
from ingot.protocol.messages import AssistantMessage, Message, as_dicts
from ingot.protocol.served import Served

# How a rendered conversation ends: where an answer begins, after the last message, or within it.
Ending = Literal["opened", "closed", "continued"]


def text_prompt(served: Served, text: str, *, path: str) -> tuple[int, ...]:
    tokens = tuple(served.tokenizer.encode(text, add_special=True))
    if not tokens:
        raise BadRequest(f"{path} is empty, and the model has no token that begins a text.", param=path)
    return tokens


def chat_prompt(
    served: Served,
    messages: tuple[Message, ...],
    *,
    ending: Ending,
    extra: Mapping[str, Any] | None = None,
    add_special: bool = False,
) -> tuple[int, ...]:
    """The tokens of a conversation. Raises Unsupported where the template cannot show what is in it.

    `add_special` adds what the tokenizer puts around a bare text, which a template has as a rule put there itself.
    """
    template = served.tokenizer.template
    if template is None:
        raise Unsupported("The served model has no chat template; use /v1/completions.", param="messages")
    dicts = as_dicts(messages)
    mark = continue_last(dicts) if ending == "continued" else None
    text = template.render(dicts, add_generation_prompt=ending == "opened", extra=extra)
    check_calls_shown(messages, text)
    if mark is not None:
        text = text[: text.index(mark)]
    tokens = tuple(served.tokenizer.encode(text, add_special=add_special))
    if not tokens:
        raise BadRequest("The chat template makes nothing of these messages: the prompt is empty.", param="messages")
    return tokens


def continue_last(messages: list[dict[str, Any]]) -> str:
    """Puts a mark at the end of the last message: in the rendered text it shows where the template closes it."""
    last, mark = messages[-1], secrets.token_hex(16)
    if last["role"] != "assistant" or last["content"] is None or "tool_calls" in last:
        raise BadRequest(
            "continue_final_message needs the last message to be an assistant's text.", param="continue_final_message"
        )
    if isinstance(last["content"], str):
        last["content"] += mark
    else:
        last["content"][-1]["text"] += mark
    return mark


def check_calls_shown(messages: tuple[Message, ...], text: str) -> None:
    """A template that knows no tools leaves calls out without a word; the model would answer to half a history."""
    for at, message in enumerate(messages):
        for call in message.tool_calls if isinstance(message, AssistantMessage) else ():
            if call.function.name not in text:
                path = f"messages.{at}.tool_calls"
                raise Unsupported(f"{path}: the served model's chat template does not show tool calls.", param=path)
