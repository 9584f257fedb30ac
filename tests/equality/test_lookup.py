"""With guesses from what was written before == without, token for token."""

from __future__ import annotations

import random

import pytest

from ingot.engine.request import Ended, Request, Sampling, Stop
from ingot.engine.speculation.lookup import LookupProposer
from ingot.kernels.device import Device
from tests import engines

PROMPT = tuple(random.Random(2).randrange(95) for _ in range(90))


def asked(turn: str) -> list[Request]:
    """Answers that have much in common with what was said before: loops, and the same questions again."""
    samplings = [Sampling(temperature=0.0), Sampling(temperature=0.7, seed=4), Sampling(temperature=0.2, seed=5)]
    return [
        Request(f"{turn}{number}", (PROMPT[number:],), max_tokens=40, sampling=sampling, stop=Stop(ignore_eos=True))
        for number, sampling in enumerate(samplings)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", [None, engines.GPU], ids=["here", "gpu"])
@pytest.mark.parametrize("kind", ["llama", "window", "hybrid"])
def test_what_is_looked_up_changes_no_token_and_the_same_question_is_answered_from_memory(
    kind: str, device: Device | None
) -> None:
    plain = engines.start(kind, device=device)
    guessing = engines.start(
        kind, device=device, proposers=[LookupProposer()], fixed_draft_tokens=8, cache_bytes=1 << 24
    )
    told = [engines.text_of(engines.answer(plain, request)) for request in asked("plain")]
    for turn in ("first", "second"):
        streams = [guessing.generate(request) for request in asked(turn)]
        found = [[event for batch in stream for event in batch] for stream in streams]
        assert [engines.text_of(events) for events in found] == told
    for engine in (plain, guessing):
        engine.check()
        engine.close()
    for events in found:
        assert isinstance(events[-1], Ended)
        assert events[-1].speculation.accepted > 25
