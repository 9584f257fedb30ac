"""What `ingot serve` says once it serves: where, what, on what, with how much, and what to try."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ingot.engine.encoder_request import EncoderCard
from ingot.engine.request import ModelCard
from ingot.text.formats.registry import FoundFormat

QUESTION = {"model": "default", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
BEGINNING = {"model": "default", "prompt": "The sky is blue because", "max_tokens": 64}
SEEN = {"image": "pictures", "video": "clips"}
NO_CHAT = "the model has no chat template and only goes on with texts (/v1/completions); --chat-template gives it one"


def ready_record(
    url: str,
    card: ModelCard,
    found: FoundFormat,
    *,
    needs_key: bool,
    chats: bool = True,
    encoders: Iterable[EncoderCard] = (),
) -> str:
    """One record: the ready line, one for each encoder, a note for each thing that is guessed or could be faster, a
    curl to paste. `chats` says whether there is a chat template."""
    facts = (
        f"ready: {url}",
        f"{card.name} ({card.formats or card.dtype})",
        card.device,
        f"context {card.context} tokens",
        f"memory budget {card.memory_budget / 1e9:.1f} GB",
        *([f"sees {' and '.join(SEEN[kind] for kind in card.sees)}"] if card.sees else []),
        *([f"tool format {found.format.name}"] if chats else []),
        *([f"guessing ahead: {', '.join(card.proposers)}"] if card.proposers else []),
        *([f"kernels: {card.kernels}"] if card.kernels else []),
    )
    notes = [f"note: {note}" for note in (*card.notes, *(_guessed(found) if chats else [NO_CHAT]))]
    further = [_further(encoder) for encoder in encoders]
    return "\n".join((" | ".join(facts), *further, *notes, f"try: {_curl(url, needs_key, chats)}"))


def _guessed(found: FoundFormat) -> list[str]:
    if found.source != "guess":
        return []
    return [f"tool format {found.format.name} is a guess: the model shows none of its own; --tool-format names another"]


def _further(card: EncoderCard) -> str:
    purpose = f"vectors of {card.dimension} numbers" if card.role == "embedding" else "reranking"
    return f"also: {card.name} ({card.dtype}) for {purpose} | inputs of {card.length} tokens"


def _curl(url: str, needs_key: bool, chats: bool) -> str:
    key = ' -H "Authorization: Bearer $INGOT_API_KEY"' if needs_key else ""
    path, body = ("chat/completions", QUESTION) if chats else ("completions", BEGINNING)
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
