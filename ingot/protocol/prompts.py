"""Text and messages made into prompt tokens. Everything here may take a while: not for an event loop."""

from __future__ import annotations

import secrets
from typing import Literal

from ingot.errors import BadRequest, Unsupported
from ingot.protocol.messages import Message, as_dicts
from ingot.protocol.served import Served
from ingot.text.template import prepare_messages

# How a rendered conversation ends: where an answer begins, after the last message, or within it.
Ending = Literal["opened", "closed", "continued"]


def chat_prompt(served: Served, messages: tuple[Message, ...], *, ending: Ending) -> tuple[int, ...]:
    text = rendered(served, messages, ending)
    return tuple(served.tokenizer.encode(text, add_special=False))


def text_prompt(served: Served, text: str, *, path: str) -> tuple[int, ...]:
    tokens = tuple(served.tokenizer.encode(text, add_special=True))
    if not tokens:
        raise BadRequest(f"{path} is empty, and the model has no token that begins a text.", param=path)
    return tokens


def rendered(served: Served, messages: tuple[Message, ...], ending: Ending) -> str:
    template = served.tokenizer.template
    if template is None:
        raise Unsupported("The served model has no chat template; use /v1/completions.", param="messages")
    plain = as_dicts(messages)
    if ending != "continued":
        return template.render(prepare_messages(plain, template), add_generation_prompt=ending == "opened")
    if plain[-1]["role"] != "assistant" or "tool_calls" in plain[-1]:
        raise BadRequest(
            "continue_final_message needs the last message to be an assistant's text.", param="continue_final_message"
        )
    # A mark at the end of the last message shows where the template would close it.
    mark = secrets.token_hex(16)
    plain[-1]["content"] += mark
    text = template.render(prepare_messages(plain, template), add_generation_prompt=False)
    return text[: text.index(mark)]
