"""Heads beside thinned prompts: they are shown what is kept where it stands, and their guesses change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foundry.lesson import seeded
from foundry.package import MODELS
from foundry.recall import recall_lesson
from foundry.rows import written as written_out
from ingot.cache.forward_batch import ForwardBatch
from ingot.config import Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Sampling, SpecPrefillRequest
from ingot.engine.sequence import TokenSequence
from ingot.engine.specprefill.selection import required_tokens, select_tokens
from ingot.engine.speculation.draft_heads import DraftHeadProposer
from ingot.kernels.device import Device
from tests import engines
from tests.engine.specprefill.world import Told, ask, ended, evenly, report, some, start
from tests.engines import answer, text_of
from tests.models.draft_heads.test_eagle import random_tensors, written

LENGTH = 330


@pytest.fixture(params=[None, engines.GPU], ids=["here", "gpu"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """An engine without a head, and one whose head guesses at random."""
    device: Device | None = request.param
    folder = written(tmp_path / "draft", random_tensors(embeds=False))

    plain = start("llama", lambda: Told(evenly), device=device)
    guessing = start("llama", lambda: Told(evenly), device=device, eagle=folder, fixed_draft_tokens=3)
    yield plain, guessing
    for engine in (plain, guessing):
        engine.check()
        engine.close()


def test_guesses_behind_a_thinned_prompt_change_no_token_cold_and_taken_over(pair: tuple[Engine, Engine]) -> None:
    plain, guessing = pair
    for temperature in (0.0, 0.0, 0.8):
        sampling = Sampling(temperature=temperature, seed=3)
        result = answer(plain, ask(some(LENGTH), max_tokens=20, sampling=sampling))
        found = answer(guessing, ask(some(LENGTH), max_tokens=20, sampling=sampling))
        assert text_of(found) == text_of(result)
        assert report(found).unused is None and ended(found).speculation.proposed > 10


def test_a_head_is_shown_each_kept_token_at_the_position_of_the_one_before(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, shown, launched = some(LENGTH), dict[int, int](), DraftHeadProposer._batch

    def listening(self: DraftHeadProposer, sequence: TokenSequence, place: int, count: int) -> ForwardBatch:
        launch = launched(self, sequence, place, count)
        stated = launch.stated.tolist() if launch.stated is not None else range(launch.positions[0], LENGTH + 99)
        shown.update(zip(range(place, place + count), stated, strict=False))
        return launch

    monkeypatch.setattr(DraftHeadProposer, "_batch", listening)
    ended(answer(pair[1], ask(prompt, max_tokens=10)))
    kept: list[int] = select_tokens(evenly(prompt), required_tokens(LENGTH), 0.3).tolist()
    before = [kept[0], *kept, *range(LENGTH, LENGTH + 8)]
    assert [shown[place] for place in range(len(kept) + 8)] == before[: len(kept) + 8]


def test_a_trained_head_guesses_well_behind_what_is_left_of_a_prompt() -> None:
    prompt = tuple(written_out(recall_lesson(seeded(1, held_out=True), 1000), "xml")[0])
    texts, reports = [], []
    for proposers in ("off", "mtp"):
        settings = Settings(
            memory="2GB",
            deterministic=True,
            speculate=proposers,
            speculate_tokens=3,  # whether it pays is not asked here
            specprefill=True,
            specprefill_scorer="statistics",
        )
        engine = start_engine(settings, MODELS / "hybrid", name="hybrid", source="foundry")
        try:
            events = answer(engine, ask(prompt, SpecPrefillRequest(forced=True), max_tokens=40))
            texts.append(text_of(events))
            reports.append(ended(events))
            assert report(events).kept < 0.6 * len(prompt)
        finally:
            engine.check()
            engine.close()
    assert texts[0] == texts[1]
    result = reports[1].speculation
    assert result.proposed and result.accepted > 0.5 * result.proposed
