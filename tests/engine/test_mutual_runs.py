"""Pictures whose tokens see each other: never cut, the same however a prompt is, and what cannot be had beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.random_models import write_tokenizer
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.config import Settings
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Sampling
from ingot.engine.sequence import PromptMedia
from ingot.errors import ConfigError, Unsupported
from ingot.kernels.device import current_device
from ingot.media.image_processors import read_processor
from ingot.models.adapter import load_model_adapter
from ingot.models.kv_codec import with_kv_codec
from tests.engines import answer, text_of
from tests.models.vision.looking import prompt_with
from tests.models.vision.tiny_configs import VOCAB
from tests.models.vision.tiny_families import saved
from tests.seeing_engines import asked, start_seeing

pytest.importorskip("mlx_vlm")
FEATURES = 16


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved("gemma3", tmp_path_factory.mktemp("mutual") / "gemma3")
    write_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture
def engine(gemma: Path) -> Iterator[Engine]:
    made = start_seeing(gemma)
    yield made
    made.check()
    made.close()


def test_a_chunk_ends_before_a_run_or_behind_it(gemma: Path) -> None:
    tokens, items = prompt_with(read_processor(gemma), 3, ["image", "image"])
    (begin, end), (later, _) = items[0].runs[0], items[1].runs[0]
    prompt_media = PromptMedia(tuple(items), bidirectional=True)
    assert prompt_media.uncut(0, begin + 1) == begin == prompt_media.uncut(0, end - 1)
    assert prompt_media.uncut(0, end) == end and prompt_media.uncut(0, begin) == begin
    assert prompt_media.uncut(begin, 1) == FEATURES
    assert prompt_media.uncut(begin - 1, FEATURES) == 1
    assert prompt_media.uncut(begin, later - begin + 2) == later - begin
    assert PromptMedia(tuple(items)).uncut(0, begin + 1) == begin + 1
    assert prompt_media.mutual_within(begin - 1, later) == ((1, 1 + FEATURES),)
    assert prompt_media.mutual_within(end, len(tokens)) == ((later - end, later - end + FEATURES),)


def test_tokens_around_a_picture_that_see_it_belong_to_it(tmp_path: Path) -> None:
    """Molmo 2's begin and end its pictures. Another one of the same size has other keys from the first of them on."""
    processor = read_processor(saved("molmo2", tmp_path / "molmo2"))
    tokens, [item] = prompt_with(processor, 3, ["image"])
    before, behind = item.layout.around
    assert (before, behind) == (1, 2)
    assert (item.begin + before, item.end - behind) == (item.runs[0][0], item.runs[-1][1])
    prompt_media = PromptMedia((item,), bidirectional=True)
    assert prompt_media.uncut(0, item.begin + 1) == item.begin
    assert prompt_media.uncut(item.begin, 1) == item.end - item.begin
    assert prompt_media.inside(item.runs[0][0]) is prompt_media.inside(item.runs[-1][1]) is item
    assert prompt_media.mutual_within(0, len(tokens)) == ((item.begin, item.end),)
    other = PromptMedia((replace(item, digest=bytes(32)),), bidirectional=True)
    one, another = prompt_media.keyed(tokens), other.keyed(tokens)
    assert one[: item.begin] == another[: item.begin] and one[item.begin] != another[item.begin]


def test_answers_are_the_same_however_a_prompt_is_cut(gemma: Path) -> None:
    processor = read_processor(gemma)
    prompts = [prompt_with(processor, seed, ["image"] * (1 + seed % 3), text=30) for seed in range(3)]
    found = []
    for widest in (17, 512):
        engine = start_seeing(gemma, widest=widest, limits=EngineLimits(target_itl_ms=0.01))
        try:
            requests = [asked(f"r{at}", *prompt) for at, prompt in enumerate(prompts)]
            found.append([text_of(answer(engine, request)) for request in requests])
            streams = [engine.generate(replace(request, id=f"beside-{request.id}")) for request in requests]
            assert [text_of([event for batch in stream for event in batch]) for stream in streams] == found[-1]
        finally:
            engine.close()
    assert found[0] == found[1]


def test_logprobs_of_prompts_with_pictures_are_refused_by_name(gemma: Path, engine: Engine) -> None:
    request = asked("scored", *prompt_with(read_processor(gemma), 3, ["image"]))
    with pytest.raises(Unsupported, match="prompt_logprobs"):
        engine.generate(replace(request, sampling=Sampling(prompt_logprobs=1)))


def test_a_pass_that_holds_no_picture_is_refused_at_start(gemma: Path) -> None:
    settings = Settings(memory="1GB", prefill_chunk=FEATURES - 1, cache_dir=None)
    with pytest.raises(ConfigError, match=f"image of this model is {FEATURES} tokens"):
        start_engine(settings, gemma, name="gemma", source="random weights")


def test_live_codecs_are_refused_by_name(gemma: Path) -> None:
    adapter = load_model_adapter(gemma, current_device(), with_vision=True)
    with pytest.raises(ConfigError, match=r"kv_codec k8v4 cannot be used: .*--text-only"):
        with_kv_codec(adapter, PairCodec(CodecName.parse("k8v4")))
