"""A model beside an EAGLE-3 draft: the same text with its guesses and without, right or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.engine.request import Ended, Request, Sampling, Stop
from ingot.kernels.device import Device
from tests import engines
from tests.models.draft_heads.test_eagle import random_tensors, written


@pytest.mark.parametrize("device", [None, engines.GPU], ids=["here", "gpu"])
def test_guesses_from_inner_layers_change_no_token(tmp_path: Path, device: Device | None) -> None:
    folder = written(tmp_path / "draft", random_tensors(embeds=False))

    plain = engines.start("llama", device=device)
    guessing = engines.start("llama", device=device, eagle=folder, fixed_draft_tokens=3, cache_bytes=1 << 24)
    asked = [
        Request(
            f"e{number}",
            (tuple(range(number, number + 70)),),
            max_tokens=50,
            sampling=Sampling(temperature=0.7 * (number % 2), seed=number),
            stop=Stop(ignore_eos=True),
        )
        for number in range(6)
    ]
    told = [engines.text_of(engines.answer(plain, request)) for request in asked]
    streams = [guessing.generate(request) for request in asked]
    found = [[event for batch in stream for event in batch] for stream in streams]
    assert [engines.text_of(events) for events in found] == told
    ends = [events[-1] for events in found]
    assert all(isinstance(end, Ended) and end.speculation.proposed > 50 for end in ends)
    for engine in (plain, guessing):
        engine.check()
        engine.close()
