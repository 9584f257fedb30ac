"""`POST /v1/tokenize` and `/v1/detokenize`: the served model's own view of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ingot.protocol.chat.answers import Note
from ingot.protocol.chat.ask import Ask
from ingot.protocol.chat.preparation import asked_prompt
from ingot.protocol.chat.prompts import text_tokens
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.openai.chat import TOOLS, FunctionTool
from ingot.protocol.openai.messages import CONVERSATION, Message, as_dicts
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Bool, Text
from ingot.protocol.schema.model_fields import TokenIds
from ingot.protocol.schema.model_name import ModelName
from ingot.protocol.schema.objects import ObjectOf, accepts, requires
from ingot.protocol.schema.rules import Given, Never, Not
from ingot.protocol.served import Served


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    model: str = accepts(ModelName(), "The served model's name, or `default`.", default=DEFAULT_NAME)
    prompt: str | None = accepts(Text(), "A text. Either this or `messages`.")
    messages: tuple[Message, ...] | None = accepts(CONVERSATION, "A conversation, put through the chat template.")
    tools: tuple[FunctionTool, ...] = accepts(
        TOOLS, "Functions that the model is shown. Only with `messages`.", default=()
    )
    add_special_tokens: bool | None = accepts(
        Bool(), "Add what the tokenizer puts around a text (default: true for `prompt`, false for `messages`)."
    )
    add_generation_prompt: bool | None = accepts(
        Bool(), "End where an answer begins (default: true). Only with `messages`."
    )


@dataclass(frozen=True, slots=True)
class DetokenizeBody:
    tokens: tuple[int, ...] = requires(TokenIds(bounds.PROMPT_TOKENS, least=0), "Token ids.")
    model: str = accepts(ModelName(), "The served model's name, or `default`.", default=DEFAULT_NAME)
    skip_special_tokens: bool = accepts(Bool(), "Leave special tokens out.", default=False)


TOKENIZE_BODY = ObjectOf(
    TokenizeBody,
    (
        Never((Given("prompt"), Given("messages")), "Send either prompt or messages, not both.", param="messages"),
        Never((Not(Given("prompt")), Not(Given("messages"))), "Send either prompt or messages.", param="prompt"),
        Never(
            (Given("prompt"), Given("add_generation_prompt")),
            "add_generation_prompt goes with messages.",
            param="add_generation_prompt",
        ),
        Never((Given("prompt"), Given("tools")), "tools go with messages.", param="tools"),
    ),
)
DETOKENIZE_BODY = ObjectOf(DetokenizeBody)


class Tokenized(Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    ingot: Note | UnsetType = UNSET


class Detokenized(Struct):
    prompt: str
    ingot: Note | UnsetType = UNSET


def tokenize(value: Any, served: Served) -> Tokenized:
    reading = served.reading()
    tokens = tokens_of(TOKENIZE_BODY.parse(value, "", reading), served)
    return Tokenized(list(tokens), len(tokens), served.card.context, Note.of(reading))


def tokens_of(body: TokenizeBody, served: Served) -> tuple[int, ...]:
    if body.messages is not None:
        ask = Ask(
            as_dicts(body.messages),
            tools=tuple(tool.tool for tool in body.tools),
            ending="closed" if body.add_generation_prompt is False else "opened",
        )
        return asked_prompt(served, ask, add_special=body.add_special_tokens is True).tokens
    assert body.prompt is not None, "the rules of the body leave one of the two"
    return text_tokens(served, body.prompt, path="prompt", add_special=body.add_special_tokens is not False)


def detokenize(value: Any, served: Served) -> Detokenized:
    reading = served.reading()
    body: DetokenizeBody = DETOKENIZE_BODY.parse(value, "", reading)
    text = served.tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens)
    return Detokenized(text, Note.of(reading))
