"""`POST /v1/tokenize` and `/v1/detokenize`: the served model's own view of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ingot.protocol.chat.answers import IgnoredNote
from ingot.protocol.chat.ask import ChatInput
from ingot.protocol.chat.preparation import render_chat_prompt
from ingot.protocol.chat.prompts import encode_text
from ingot.protocol.openai.chat import CHAT_TOOLS, ChatFunctionTool
from ingot.protocol.openai.messages import CHAT_CONVERSATION, ChatMessage, messages_as_dicts
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Bool, Text
from ingot.protocol.schema.model_fields import ModelNameField, TokenIdsField
from ingot.protocol.schema.objects import IsSet, Never, Not, ObjectOf, accepts, requires
from ingot.protocol.served import ServedModel
from ingot.protocol.terms import DEFAULT_NAME


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    model: str = accepts(ModelNameField(), "The served model's name, or `default`.", default=DEFAULT_NAME)
    prompt: str | None = accepts(Text(), "A text. Either this or `messages`.")
    messages: tuple[ChatMessage, ...] | None = accepts(
        CHAT_CONVERSATION, "A conversation, put through the chat template."
    )
    tools: tuple[ChatFunctionTool, ...] = accepts(
        CHAT_TOOLS, "Functions that the model is shown. Only with `messages`.", default=()
    )
    add_special_tokens: bool | None = accepts(
        Bool(), "Add what the tokenizer puts around a text (default: true for `prompt`, false for `messages`)."
    )
    add_generation_prompt: bool | None = accepts(
        Bool(), "End where an answer begins (default: true). Only with `messages`."
    )


@dataclass(frozen=True, slots=True)
class DetokenizeBody:
    tokens: tuple[int, ...] = requires(TokenIdsField(bounds.PROMPT_TOKENS, least=0), "Token ids.")
    model: str = accepts(ModelNameField(), "The served model's name, or `default`.", default=DEFAULT_NAME)
    skip_special_tokens: bool = accepts(Bool(), "Leave special tokens out.", default=False)


TOKENIZE_BODY = ObjectOf(
    TokenizeBody,
    (
        Never((IsSet("prompt"), IsSet("messages")), "Send either prompt or messages, not both.", param="messages"),
        Never((Not(IsSet("prompt")), Not(IsSet("messages"))), "Send either prompt or messages.", param="prompt"),
        Never(
            (IsSet("prompt"), IsSet("add_generation_prompt")),
            "add_generation_prompt goes with messages.",
            param="add_generation_prompt",
        ),
        Never((IsSet("prompt"), IsSet("tools")), "tools go with messages.", param="tools"),
    ),
)
DETOKENIZE_BODY = ObjectOf(DetokenizeBody)


class TokenizeAnswer(Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    ingot: IgnoredNote | UnsetType = UNSET


class DetokenizeAnswer(Struct):
    prompt: str
    ingot: IgnoredNote | UnsetType = UNSET


def answer_tokenize(value: Any, served: ServedModel) -> TokenizeAnswer:
    reading = served.reading()
    tokens = tokens_of_body(TOKENIZE_BODY.parse(value, "", reading), served)
    return TokenizeAnswer(list(tokens), len(tokens), served.card.context, IgnoredNote.of(reading))


def tokens_of_body(body: TokenizeBody, served: ServedModel) -> tuple[int, ...]:
    if body.messages is not None:
        ask = ChatInput(
            messages_as_dicts(body.messages),
            tools=tuple(tool.tool for tool in body.tools),
            ending="closed" if body.add_generation_prompt is False else "opened",
        )
        return render_chat_prompt(served, ask, add_special=body.add_special_tokens is True).tokens
    assert body.prompt is not None, "the rules of the body leave one of the two"
    return encode_text(served, body.prompt, path="prompt", add_special=body.add_special_tokens is not False)


def answer_detokenize(value: Any, served: ServedModel) -> DetokenizeAnswer:
    reading = served.reading()
    body: DetokenizeBody = DETOKENIZE_BODY.parse(value, "", reading)
    text = served.tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens)
    return DetokenizeAnswer(text, IgnoredNote.of(reading))
