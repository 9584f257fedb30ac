"""Text and messages made into prompt tokens. Everything here may take a while: not for an event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ingot.engine.hearing.request import Transcript
from ingot.errors import BadRequest, ContextOverflow, Unsupported
from ingot.protocol.chat.shown_media import with_media_shown
from ingot.protocol.served import Served
from ingot.text.cancellation import checkpoint
from ingot.text.formats.table import Format
from ingot.text.prompt.conversation import Conversation, PromptBuilder
from ingot.text.prompt.prompt import Prompt
from ingot.text.template.witness import TemplateHistory

# How a rendered conversation ends: where an answer begins, after the last message, or within it.
Ending = Literal["opened", "closed", "continued"]


def text_tokens(served: Served, text: str, *, path: str, add_special: bool = True) -> tuple[int, ...]:
    """Raises ContextOverflow before it encodes what can only be too long."""
    checkpoint()
    context = served.card.context
    if len(text) > context // 4 and (least := served.tokenizer.least_tokens(text)) > context:
        error = ContextOverflow(needed=least, limit=context, counted=False)
        error.param = path
        raise error
    return tuple(served.tokenizer.encode(text, add_special=add_special))


def text_prompt(served: Served, text: str, *, path: str) -> tuple[int, ...]:
    tokens = text_tokens(served, text, path=path)
    if not tokens:
        raise BadRequest(f"{path} is empty, and the model has no token that begins a text.", param=path)
    return tokens


def rendered(
    served: Served,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    ending: Ending = "opened",
    extra: Mapping[str, Any] | None = None,
    appended: Callable[[str], str] = lambda text: "",
    add_special: bool = False,
    history: TemplateHistory | None = None,
    format: Format | None = None,
    salt: str = "",
    remembers: bool = True,
) -> Prompt:
    """The prompt of a conversation, with what `appended` says is to follow the text that the template gives.

    - `add_special` adds what the tokenizer puts around a bare text, which a template has as a rule put there itself.
    - `history` and `format` are the server's where a request does not say.
    - `remembers`: past answers stand in it as they were generated, and `Turn` may keep the one that follows.

    Raises Unsupported where the template cannot show what is in the conversation.
    """
    template = served.tokenizer.template
    if template is None:
        raise Unsupported(
            "The served model has no chat template; use /v1/completions, or start the server with --chat-template.",
            param="messages",
        )
    conversation = Conversation(
        with_media_shown(messages, served.processor),
        tools=tools or (),
        variables=extra,
        opened=ending == "opened",
        continued=ending == "continued",
        appended=appended,
        history=history or served.history,
        remembers=remembers,
        salt=f"{len(served.tenant)} {served.tenant} {salt}",
        most=served.card.context,
        trusted=served.trusting,
    )
    composer = PromptBuilder(served.tokenizer, template, served.answers, served.encodings)
    prompt = composer.compose(conversation, format or served.format, add_special=add_special)
    heard = any(isinstance(text, Transcript) for message in messages for text in _texts(message.get("content")))
    return replace(prompt, adapted=(*prompt.adapted, "audio-transcribed")) if heard else prompt


def _texts(content: Any) -> list[Any]:
    return [part.get("text") for part in content] if isinstance(content, list) else [content]
