"""Pictures where running sequences' keys and values are in fewer bits: the same alone, beside others and again,
and for exact requests what a server without a codec gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from foundry.package import MODELS
from ingot.cache import footprint
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Event, Request, SequenceEnded
from ingot.media.image_processors import read_processor
from tests.engines import answer
from tests.models.vision.looking import prompt_with
from tests.seeing_engines import asked, start_seeing

pytest.importorskip("mlx_vlm")
FOLDER = MODELS / "vision"
CODEC = PairCodec(CodecName.parse("k8v4"))
STEP, TAIL = 128, 64


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(footprint, "ENCODE_STEP_TOKENS", STEP)
        patch.setattr(footprint, "RAW_TAIL_TOKENS", TAIL)
        yield


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = start_seeing(FOLDER, live=CODEC, cache_bytes=1 << 26)
    yield made
    made.check()
    made.close()


def written(events: list[Event]) -> tuple[int, ...]:
    assert isinstance(events[-1], Ended), events[-1]
    return next(event.tokens for event in events if isinstance(event, SequenceEnded))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    processor = read_processor(FOLDER)
    shown = (["image"] * 14, ["image", "video"] * 5, [])
    made = [asked(f"r{at}", *prompt_with(processor, at, kinds, text=40), count=12) for at, kinds in enumerate(shown)]
    assert all(len(request.prompts[0]) > STEP + TAIL for request in made[:2]), "what is short is not coded"
    return made


def test_answers_are_the_same_alone_beside_each_other_and_again(engine: Engine, requests: list[Request]) -> None:
    alone = [written(answer(engine, request)) for request in requests]
    streams = [engine.generate(replace(request, id=f"beside-{request.id}")) for request in requests]
    assert [written([event for batch in stream for event in batch]) for stream in streams] == alone


def test_exact_requests_get_what_a_server_without_a_codec_gives(engine: Engine, requests: list[Request]) -> None:
    plain = start_seeing(FOLDER)
    try:
        for request in requests:
            exact = replace(request, id=f"exact-{request.id}", exact=True)
            assert written(answer(engine, exact)) == written(answer(plain, request))
    finally:
        plain.close()
