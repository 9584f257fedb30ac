"""Prompt tokens from texts and messages; images and videos are laid out for the served model before the template is
rendered. Everything here may take a while: not for an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ingot.engine.speech_request import TranscribedText
from ingot.errors import BadMedia, BadRequest, ContextOverflow, Unsupported
from ingot.media.layout import MediaProcessor
from ingot.protocol.chat.media import is_media_part
from ingot.protocol.served import ServedModel
from ingot.text.cancellation import checkpoint
from ingot.text.chat_template.messages import media_part
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.prompt.assembly import Prompt
from ingot.text.prompt.conversation import Conversation, PromptBuilder
from ingot.text.tokenizer.special_tokens import Infill
from ingot.text.tool_formats.format import Format

PromptEnding = Literal["opened", "closed", "continued"]
"""How a rendered conversation ends: where an answer begins, after the last message, or within it."""
ABOUT_SUFFIX = "The text after the gap that is filled in after the prompt; for models that support it."


def encode_text(served: ServedModel, text: str, *, path: str, add_special: bool = True) -> tuple[int, ...]:
    """Raises ContextOverflow before it encodes what can only be too long."""
    check_text_length(served, text, path)
    return tuple(served.tokenizer.encode(text, add_special=add_special))


def check_text_length(served: ServedModel, text: str, path: str) -> None:
    checkpoint()
    context = served.card.context
    if len(text) > context // 4 and (least := served.tokenizer.least_tokens(text)) > context:
        error = ContextOverflow(needed=least, limit=context, exactly=False)
        error.param = path
        raise error


def encode_text_prompt(served: ServedModel, text: str) -> tuple[int, ...]:
    tokens = encode_text(served, text, path="prompt")
    if not tokens:
        raise BadRequest("prompt is empty, and the model has no token that begins a text.", param="prompt")
    return tokens


def find_infill_tokens(served: ServedModel, *, path: str) -> Infill:
    """Raises Unsupported for a model that cannot fill in the middle."""
    if served.tokenizer.infill is None:
        raise Unsupported(
            f"{path}: the served model cannot fill in the middle: its vocabulary has no tokens for a prefix and a "
            "suffix. Code models such as Qwen2.5-Coder, StarCoder and DeepSeek-Coder have them.",
            param=path,
        )
    return served.tokenizer.infill


def encode_infill_prompt(
    served: ServedModel,
    prefix: str | tuple[int, ...],
    suffix: str,
    *,
    paths: tuple[str, str],
    files: Sequence[tuple[str, str]] = (),
) -> tuple[int, ...]:
    """The fill-in-the-middle prompt of two texts, which are in the body at these `paths`, after other `files`, each a
    name and a text."""
    infill, tokenizer = find_infill_tokens(served, path=paths[1]), served.tokenizer
    for text, path in ((prefix, paths[0]), (suffix, paths[1]), *((text, "input_extra") for _, text in files)):
        if isinstance(text, str):
            check_text_length(served, text, path)
    before = tokenizer.encode_plain(prefix) if isinstance(prefix, str) else prefix
    prompt = infill.prompt(before, tokenizer.encode_plain(suffix, leads=False))
    return (*tokenizer.first_ids, *infill.context(files, tokenizer.encode_plain), *prompt)


def render_messages(
    served: ServedModel,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    ending: PromptEnding = "opened",
    extra: Mapping[str, Any] | None = None,
    appended: Callable[[str], str] = lambda text: "",
    add_special: bool = False,
    history: TemplateHistory | None = None,
    format: Format | None = None,
    salt: str = "",
    remembers: bool = True,
) -> Prompt:
    """The prompt of a conversation. `appended` gives the text that follows the rendered template.

    - `add_special` adds the tokenizer's own special tokens, which templates usually contain already.
    - `history` and `format` are by default the server's.
    - `remembers`: past answers are in it with the tokens they were generated in, and so may be the next one.

    Raises Unsupported where the template cannot render the conversation.
    """
    template = served.tokenizer.template
    if template is None:
        raise Unsupported(
            "The served model has no chat template; use /v1/completions, or start the server with --chat-template.",
            param="messages",
        )
    conversation = Conversation(
        lay_out_media(messages, served.processor),
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
    builder = PromptBuilder(served.tokenizer, template, served.answers, served.encodings)
    prompt = builder.compose(conversation, format or served.format, add_special=add_special)
    if any(map(_has_transcript, messages)):
        return replace(prompt, adapted=(*prompt.adapted, "audio-transcribed"))
    return prompt


def _has_transcript(message: dict[str, Any]) -> bool:
    content = message.get("content")
    texts = [part.get("text") for part in content] if isinstance(content, list) else [content]
    return any(isinstance(text, TranscribedText) for text in texts)


def lay_out_media(messages: list[dict[str, Any]], processor: MediaProcessor | None) -> list[dict[str, Any]]:
    """Computed from headers alone: nothing is decoded. Raises BadMedia or Unsupported, with the message's path."""
    return [
        {**message, "content": [*_lay_out_parts(message["content"], processor, f"messages.{at}")]}
        if isinstance(message.get("content"), list) and any(map(is_media_part, message["content"]))
        else message
        for at, message in enumerate(messages)
    ]


def _lay_out_parts(content: list[Any], processor: MediaProcessor | None, path: str) -> Iterator[Any]:
    assert processor is not None, "bodies have media only where the model takes them"
    for part in content:
        if not is_media_part(part):
            yield part
            continue
        checkpoint()
        try:
            yield from map(media_part, part["medium"].shown(processor))
        except (BadMedia, Unsupported) as error:
            raise type(error)(f"{path}: {error.message}", param=path) from error
