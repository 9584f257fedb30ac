"""Clients' actions for the other models of a server, each of which may have to be loaded first."""

from __future__ import annotations

import io
import json
import math
import struct
import uuid
import wave
from collections.abc import Mapping, Sequence
from typing import Final

from bench.soak.acts import ACTS, Act, Fault, Person, reranked
from bench.soak.tables import LORA, STAYS, TURNS

RATE: Final = 16_000


def adapted(person: Person) -> None:
    body = {"model": f"{STAYS}:{LORA}", "messages": person.turns(), "max_tokens": 16, "stream": True}
    person.told("/v1/chat/completions", body, b"data: [DONE]")


def another_model(person: Person) -> None:
    """Which makes the one go that was there."""
    body = {"model": person.random.choice(TURNS), "messages": person.turns(), "max_tokens": 16, "stream": True}
    person.told("/v1/chat/completions", body, b"data: [DONE]")


def gave_up_on_another_model(person: Person) -> None:
    """While it is loaded, perhaps."""
    body = {"model": person.random.choice(TURNS), "messages": person.turns(), "max_tokens": 200, "stream": True}
    with person.asking("/v1/chat/completions", body) as connection:
        connection.getresponse().read(20)


def embedded(person: Person) -> None:
    answer = person.told("/v1/embeddings", {"model": "vectors", "input": [person.says(20) for _ in range(4)]})
    if len(json.loads(answer.raw)["data"]) != 4:
        raise Fault("four texts did not give four embeddings")


def transcribed(person: Person) -> None:
    raw, form = transcription("ears", hum(person.random.uniform(0.5, 2.0)))
    answer = person.ask("/v1/audio/transcriptions", raw, form=form)
    if answer.status != 200:
        raise Fault(f"audio was answered with {answer.status}: {answer.raw[:300]!r}")


def transcription(model: str, sound: bytes) -> tuple[bytes, str]:
    """A form that asks a model to write a sound down, and what it says of its own form."""
    mark = uuid.uuid4().hex
    head = f'--{mark}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--{mark}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="hum.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    raw = head.encode() + sound + f"\r\n--{mark}--\r\n".encode()
    return raw, f"multipart/form-data; boundary={mark}"


def hum(seconds: float) -> bytes:
    """A WAV file."""
    samples = (int(8000 * math.sin(at / 12)) for at in range(int(RATE * seconds)))
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, RATE, 0, "NONE", ""))
        sound.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return file.getvalue()


FURTHER: Final[Mapping[Act, tuple[str, int]]] = {
    adapted: (STAYS, 3),
    another_model: (TURNS[0], 2),
    gave_up_on_another_model: (TURNS[0], 1),
    reranked: ("rerank", 2),
    embedded: ("vectors", 2),
    transcribed: ("ears", 1),
}
"""The model that each needs, and how often it is done, against all others."""


def acts_with(models: Sequence[str]) -> dict[Act, int]:
    """What is done to a server of these models."""
    return {**ACTS, **{act: weight for act, (model, weight) in FURTHER.items() if model in models}}
