"""The engine answers about pictures for every family but Qwen's: the same alone, beside others, and again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.random_models import write_tokenizer
from ingot.config import Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Ended, Request, Sampling
from ingot.media.image_processors import read_processor
from ingot.media.items import MediaItem
from tests.engines import answer, text_of
from tests.models.vision.looking import prompt_with
from tests.models.vision.tiny_configs import CONFIGS, OWN_SHAPE, VOCAB
from tests.models.vision.tiny_families import saved, small_upstream

pytest.importorskip("mlx_vlm")
SETTINGS = Settings(memory="1GB", dtype="float32", deterministic=True, cache_dir=None)


@pytest.fixture(params=[*CONFIGS, *OWN_SHAPE])
def seeing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Engine]]:
    with small_upstream():
        folder = saved(request.param, tmp_path / request.param)
        write_tokenizer(folder, VOCAB)
        engine = start_engine(SETTINGS, folder, name=request.param, source="random weights")
    yield folder, engine
    engine.close()


def asked(id: str, tokens: list[int], items: list[MediaItem]) -> Request:
    media = (tuple(items),) if items else ()
    return Request(id, (tuple(tokens),), max_tokens=6, sampling=Sampling(temperature=0), media=media)


@pytest.mark.sampled(3)
def test_answers_are_the_same_alone_beside_others_and_from_what_is_kept(seeing: tuple[Path, Engine]) -> None:
    folder, engine = seeing
    processor = read_processor(folder)
    prompts = [prompt_with(processor, seed, ["image"] * (seed % 3), text=30) for seed in range(6)]
    alone = [text_of(answer(engine, asked(f"alone-{at}", *prompt))) for at, prompt in enumerate(prompts)]
    looks = engine._workload._vision.runs
    again = [answer(engine, asked(f"again-{at}", *prompt)) for at, prompt in enumerate(prompts)]
    assert [text_of(events) for events in again] == alone
    assert engine._workload._vision.runs == looks, "what was seen once is not looked at again"
    streams = [engine.generate(asked(f"beside-{at}", *prompt)) for at, prompt in enumerate(prompts)]
    beside = [text_of([event for batch in stream for event in batch]) for stream in streams]
    assert beside == alone
    assert all(isinstance(events[-1], Ended) for events in again)
