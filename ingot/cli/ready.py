"""What `ingot serve` says once it serves: where, what, on what, with how much, and what to try."""

from __future__ import annotations

import json

from ingot.engine.request import ModelCard

QUESTION = {"model": "default", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}


def ready_record(url: str, card: ModelCard, *, needs_key: bool) -> str:
    """One record: the ready line, a note for each thing that could be faster, and a curl to paste."""
    facts = (
        f"ready: {url}",
        f"{card.name} ({card.dtype})",
        card.device,
        f"context {card.context} tokens",
        f"memory budget {card.memory_budget / 1e9:.1f} GB",
    )
    notes = [f"note: {note}" for note in card.notes]
    return "\n".join((" | ".join(facts), *notes, f"try: {_curl(url, needs_key)}"))


def _curl(url: str, needs_key: bool) -> str:
    key = ' -H "Authorization: Bearer $INGOT_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(QUESTION)}'"
