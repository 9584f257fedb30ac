"""What `ingot serve` says once it serves: where, what, on what, with how much, and what to try."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ingot.engine.encoder_request import EncoderCard
    from ingot.engine.fleet_standing import Standing
    from ingot.engine.model_card import ModelCard
    from ingot.engine.speaking.request import SpeakingCard
    from ingot.engine.speech_request import HearingCard
    from ingot.text.tool_formats.registry import FoundFormat

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
    hearing: HearingCard | None = None,
    speaking: SpeakingCard | None = None,
) -> str:
    """One record: the ready line, one for each further model, a note for each thing that is guessed or could be faster,
    a curl to paste. `chats` says whether there is a chat template."""
    facts = (
        f"ready: {url}",
        f"{card.name} ({card.formats or card.dtype})",
        card.device,
        f"context {card.context} tokens",
        f"memory budget {card.memory_budget / 1e9:.1f} GB",
        *([f"sees {' and '.join(SEEN[kind] for kind in card.sees)}"] if card.sees else []),
        *([f"tool format {found.format.name}{' (a guess)' if found.guessed else ''}"] if chats else []),
        *([f"guessing ahead: {', '.join(card.proposers)}"] if card.proposers else []),
        *([f"kernels: {card.kernels}"] if card.kernels else []),
    )
    notes = [f"note: {note}" for note in (*card.notes, *(_guessed(found) if chats else [NO_CHAT]))]
    further = [_further(encoder) for encoder in encoders]
    further += [] if hearing is None else [_hears(hearing)]
    further += [] if speaking is None else [_speaks(speaking)]
    first = TRIES["chat"] if chats else GOES_ON
    return "\n".join((" | ".join(facts), *further, *notes, f"try: {_curl(url, needs_key, *first)}"))


def fleet_record(url: str, standings: Iterable[Standing], memory: int, *, needs_key: bool) -> str:
    """The same of several models: a line for each, with how it stands."""
    each = list(standings)
    count = f"{len(each)} model{'' if len(each) == 1 else 's'}"
    kinds = [one.kind for one in each]
    kind = "chat" if "chat" in kinds else kinds[0]
    return "\n".join(
        (
            f"ready: {url} | {count} | memory budget {memory / 1e9:.1f} GB",
            *map(_stands, each),
            f"try: {_curl(url, needs_key, *TRIES[kind])}",
        )
    )


def _stands(one: Standing) -> str:
    why = f": {one.failure}" if one.failure else ""
    facts = (one.kind, *(["pinned"] if one.pinned else []), f"{one.state}{why}")
    return f"model: {', '.join((one.name, *one.aliases))} ({', '.join(facts)})"


def _guessed(found: FoundFormat) -> list[str]:
    unused = [f"the checkpoint's response_template is not used: {found.unused}"] if found.unused else []
    if not found.guessed:
        return unused
    why = (
        "the model shows none of its own"
        if found.source == "guess"
        else "by the model's type, as its template shows none"
    )
    return [*unused, f"tool format {found.format.name} is a guess: {why}; --tool-format names another"]


def _further(card: EncoderCard) -> str:
    purpose = f"vectors of {card.dimension} numbers" if card.role == "embedding" else "reranking"
    return f"also: {card.name} ({card.dtype}) for {purpose} | inputs of {card.length} tokens"


def _hears(card: HearingCard) -> str:
    heard = "English" if len(card.languages) == 1 else f"{len(card.languages)} languages"
    return f"also: {card.name} ({card.dtype}) for transcription | hears {heard}"


def _speaks(card: SpeakingCard) -> str:
    return f"also: {card.name} ({card.dtype}) for speech | {len(card.voices)} voices"


def _curl(url: str, needs_key: bool, path: str, given: str) -> str:
    key = ' -H "Authorization: Bearer $INGOT_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/{path}{key} {given}"


def _body(value: object) -> str:
    return f"-H 'Content-Type: application/json' -d '{json.dumps(value)}'"


TRIES: Final = {
    "chat": ("chat/completions", _body(QUESTION)),
    "embedding": ("embeddings", _body({"input": "Why is the sky blue?"})),
    "rerank": ("rerank", _body({"query": "Why is the sky blue?", "documents": ["It scatters light.", "It rains."]})),
    "audio": ("audio/transcriptions", "-F file=@speech.mp3"),
    "speech": ("audio/speech", _body({"input": "The sky is blue."}) + " -o speech.mp3"),
}
"""What to ask a model of each kind for first: where, and with what."""
GOES_ON: Final = ("completions", _body(BEGINNING))
