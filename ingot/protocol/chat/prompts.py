"""Text and messages made into prompt tokens. Everything here may take a while: not for an event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ingot.engine.speech_request import Transcript
from ingot.errors import BadRequest, ContextOverflow, Unsupported
from ingot.protocol.chat.shown_media import with_media_shown
from ingot.protocol.served import Served
from ingot.text.cancellation import checkpoint
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.prompt.conversation import Conversation, PromptBuilder
from ingot.text.prompt.infill import Infill
from ingot.text.prompt.prompt import Prompt
from ingot.text.tool_formats.format import Format

# How a rendered conversation ends: where an answer begins, after the last message, or within it.
Ending = Literal["opened", "closed", "continued"]


def text_tokens(served: Served, text: str, *, path: str, add_special: bool = True) -> tuple[int, ...]:
    """Raises ContextOverflow before it encodes what can only be too long."""
    check_length(served, text, path)
    return tuple(served.tokenizer.encode(text, add_special=add_special))


def check_length(served: Served, text: str, path: str) -> None:
    checkpoint()
    context = served.card.context
    if len(text) > context // 4 and (least := served.tokenizer.least_tokens(text)) > context:
        error = ContextOverflow(needed=least, limit=context, counted=False)
        error.param = path
        raise error


def text_prompt(served: Served, text: str, *, path: str) -> tuple[int, ...]:
    tokens = text_tokens(served, text, path=path)
    if not tokens:
        raise BadRequest(f"{path} is empty, and the model has no token that begins a text.", param=path)
    return tokens


def infill_tokens(served: Served, *, path: str) -> Infill:
    """Raises Unsupported for a model that cannot fill in the middle."""
    if served.tokenizer.infill is None:
        raise Unsupported(
            f"{path}: the served model cannot fill in the middle: its vocabulary names no tokens for a prefix and a "
            "suffix. Models that write code, such as Qwen2.5-Coder, StarCoder and DeepSeek-Coder, have them.",
            param=path,
        )
    return served.tokenizer.infill


def infill_prompt(
    served: Served,
    prefix: str | tuple[int, ...],
    suffix: str,
    *,
    paths: tuple[str, str],
    files: Sequence[tuple[str, str]] = (),
) -> tuple[int, ...]:
    """The prompt for what stands between two texts, which are in the body at these `paths`. Other `files`, by name and
    text, stand before it."""
    infill, tokenizer = infill_tokens(served, path=paths[1]), served.tokenizer
    for text, path in ((prefix, paths[0]), (suffix, paths[1]), *((text, "input_extra") for _, text in files)):
        if isinstance(text, str):
            check_length(served, text, path)
    before = tokenizer.encode_plain(prefix) if isinstance(prefix, str) else prefix
    made = infill.prompt(before, tokenizer.encode_plain(suffix, leads=False))
    return (*tokenizer.first_ids, *infill.context(files, tokenizer.encode_plain), *made)


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
