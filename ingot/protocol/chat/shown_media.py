"""The pictures and clips of a conversation, laid out for the served model before a template sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ingot.errors import BadMedia, Unsupported
from ingot.media.processor import Processor
from ingot.protocol.chat.media_files import is_media
from ingot.text.cancellation import checkpoint
from ingot.text.chat_template.messages import media_part


def with_media_shown(messages: list[dict[str, Any]], processor: Processor | None) -> list[dict[str, Any]]:
    """Arithmetic on headers alone: nothing is unpacked. Raises BadMedia or Unsupported, with the message's place."""
    return [
        {**message, "content": [*_parts(message["content"], processor, f"messages.{at}")]}
        if isinstance(message.get("content"), list) and any(map(is_media, message["content"]))
        else message
        for at, message in enumerate(messages)
    ]


def _parts(content: list[Any], processor: Processor | None, path: str) -> Iterator[Any]:
    assert processor is not None, "no body is read into media where the model takes none"
    for part in content:
        if not is_media(part):
            yield part
            continue
        checkpoint()
        try:
            yield from map(media_part, part["medium"].shown(processor))
        except (BadMedia, Unsupported) as error:
            raise type(error)(f"{path}: {error.message}", param=path) from error
