"""A model beside a drafter of its own folder: the same text with its guesses and without, right or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ingot.engine.request import Ended, Request, Sampling, Stop
from ingot.kernels.device import Device
from tests import engines, tiny
from tests.models.draft_heads import test_assistant, test_block, test_eagle

DRAFTERS: Mapping[str, Callable[[Path], Path]] = {
    "eagle": lambda folder: test_eagle.written(folder, test_eagle.random_tensors(embeds=False)),
    "assistant": lambda folder: test_assistant.written(folder, test_assistant.assistant_config(ordered=True)),
    "dspark": lambda folder: test_block.written(folder, "dspark"),
    "dflash-beside-recurrent-layers": lambda folder: test_block.written(folder, "dflash"),
}
"""Drafters with random weights, which propose something wrong."""
TARGETS = {
    "assistant": ("gemma4", test_assistant.target_config()),
    "dflash-beside-recurrent-layers": ("hybrid", tiny.CONFIGS["hybrid"]),
}
METAL = Device("metal", "a CPU that follows a GPU's rules", 1 << 34)


@pytest.mark.parametrize(
    "device", [None, pytest.param(METAL, marks=pytest.mark.slow), engines.GPU], ids=["cpu", "metal", "cuda"]
)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_guesses_of_a_drafter_change_no_token(
    drafter: str, device: Device | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, config = TARGETS.get(drafter, ("llama", tiny.CONFIGS["llama"]))
    monkeypatch.setitem(tiny.CONFIGS, kind, config)
    folder = DRAFTERS[drafter](tmp_path / "draft")

    plain = engines.start(kind, device=device)
    guessing = engines.start(kind, device=device, drafter=folder, fixed_draft_tokens=3, cache_bytes=1 << 24)
    asked = [
        Request(
            f"e{number}",
            (tuple(range(number, number + 70)),),
            max_tokens=14 + number,
            sampling=Sampling(temperature=0.7 * (number % 2), seed=number),
            stop=Stop(ignore_eos=True),
        )
        for number in range(3)
    ]
    told = [engines.text_of(engines.answer(plain, request)) for request in asked]
    streams = [guessing.generate(request) for request in asked]
    found = [[event for batch in stream for event in batch] for stream in streams]
    assert [engines.text_of(events) for events in found] == told
    ends = [events[-1] for events in found]
    assert all(isinstance(end, Ended) and end.speculation.proposed > 12 for end in ends)
    again = engines.answer(guessing, asked[1])  # most of it from the cache
    assert engines.text_of(again) == told[1]
    for engine in (plain, guessing):
        engine.check()
        engine.close()
