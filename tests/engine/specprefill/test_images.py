"""Prompts that show pictures, of which only what matters is computed: each picture whole, or not looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.engine.engine import Engine
from ingot.engine.request import Request, SpecPrefillRequest
from ingot.engine.sequence import PromptMedia, ThinnedPrompt
from ingot.engine.specprefill.prefill import SpecPrefillSetup
from ingot.engine.specprefill.selection import PromptScores, required_tokens, select_tokens
from ingot.kernels.device import current_device
from ingot.media.image_processors import read_processor
from ingot.media.items import MediaItem
from ingot.models.adapter import load_model_adapter
from tests.engine.specprefill.world import Told, ended, report
from tests.engines import answer
from tests.equality.test_seeing import written
from tests.models.vision import tiny_families
from tests.models.vision.looking import prompt_with, reference, saved
from tests.seeing_engines import asked, looks_of, start_seeing

pytest.importorskip("mlx_vlm")
FAMILIES = ("qwen3_vl", "qwen3_5", "gemma3")
SHOWN = ["image", "image", "image"]
Starting = Callable[..., tuple[Engine, Told]]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_families.saved if request.param == "gemma3" else saved
    return made(request.param, tmp_path_factory.mktemp("sparse") / request.param)


def prompt_of(folder: Path) -> tuple[list[int], list[MediaItem]]:
    return prompt_with(read_processor(folder), 3, SHOWN, text=160)


def judged(items: list[MediaItem], best: int) -> Callable[[tuple[int, ...]], PromptScores]:
    """One of the pictures matters most, then text, and the other pictures not at all."""

    def judge(prompt: tuple[int, ...]) -> PromptScores:
        result = np.random.default_rng(0).random(len(prompt), dtype=np.float32)
        for number, item in enumerate(items):
            result[item.begin : item.end] = 2.0 if number == best else 0.0
        return result

    return judge


@pytest.fixture
def starting() -> Iterator[Starting]:
    made: list[Engine] = []

    def started(folder: Path, judge: Callable[..., PromptScores], **options: Any) -> tuple[Engine, Told]:
        scorer = Told(judge)
        offer = SpecPrefillSetup(scorer, threshold=64, keep=0.3)
        made.append(start_seeing(folder, specprefill=offer, **options))
        return made[-1], scorer

    yield started
    for engine in made:
        engine.check()
        engine.close()


def thin(name: str, tokens: list[int], items: list[MediaItem], **options: Any) -> Request:
    return asked(name, tokens, items, specprefill=SpecPrefillRequest(), **options)


def kept_of(tokens: list[int], items: list[MediaItem], best: int, window: int = 0) -> list[int]:
    spans = PromptMedia(tuple(items)).spans
    flags = required_tokens(len(tokens), media=spans, window=window)
    offsets: list[int] = select_tokens(judged(items, best)(tuple(tokens)), flags, 0.3, spans).tolist()
    return offsets


def by_stock_layers(folder: Path, tokens: list[int], items: list[MediaItem], kept: list[int], count: int) -> list[int]:
    """What mlx-vlm's own language model writes behind what is kept, at the positions of the whole prompt."""
    model, tower = reference(folder), load_model_adapter(folder, current_device(), with_vision=True).tower
    assert tower is not None
    positions = np.asarray(tower.positions(len(tokens), items))
    embeds, visible, deep = model.language_model.model.embed_tokens(mx.array([tokens])), np.zeros(len(tokens), bool), []
    for item in items:
        if item.begin in kept:
            own, further = model.vision_tower(mx.array(tower.pixels(item)), mx.array([list(item.grid)]))
            at = [offset for begin, end in item.runs for offset in range(begin, end)]
            embeds[0, mx.array(at)] = own
            visible[at] = True
            deep.append(list(further))
    stacked = [mx.concatenate(list(each)) for each in zip(*deep, strict=True)]
    embeds, positions, visible, behind = embeds[:, mx.array(kept)], positions[:, kept], visible[kept], list[int]()
    while len(behind) < count:
        logits = model.language_model(
            mx.array([[*(tokens[offset] for offset in kept), *behind]]),
            inputs_embeds=embeds,
            position_ids=mx.array(positions)[:, None],
            visual_pos_masks=mx.array(visible[None]),
            deepstack_visual_embeds=stacked,
        ).logits[0, -1]
        behind.append(int(mx.argmax(logits)))
        embeds = mx.concatenate([embeds, model.language_model.model.embed_tokens(mx.array([behind[-1:]]))], axis=1)
        positions = np.concatenate([positions, np.full((3, 1), positions.max() + 1)], axis=1)
        visible = np.append(visible, False)
    return behind


def test_the_answer_is_what_stock_layers_write_behind_the_kept_pictures_and_text(
    starting: Starting, tmp_path: Path
) -> None:
    folder = saved("qwen3_vl", tmp_path / "qwen3_vl")
    tokens, items = prompt_of(folder)
    kept = kept_of(tokens, items, 1)
    assert len(kept) < len(tokens) and [item.begin in kept for item in items] == [False, True, False]
    engine, _ = starting(folder, judged(items, 1))
    events = answer(engine, thin("one", tokens, items, count=3))
    assert report(events).kept == len(kept)
    assert list(written(events)) == by_stock_layers(folder, tokens, items, kept, 3)


@pytest.mark.sampled(3)
def test_pieces_of_any_size_give_the_same_answer_and_what_is_left_out_is_not_looked_at(
    starting: Starting, folder: Path
) -> None:
    tokens, items = prompt_of(folder)
    result = []
    for widest in (64, 1024):
        engine, _ = starting(folder, judged(items, 1), widest=widest)
        events = answer(engine, thin("one", tokens, items))
        assert report(events).kept < len(tokens) == ended(events).usage.prompt_tokens
        result.append(written(events))
        assert looks_of(engine).runs == 1
    assert result[0] == result[1]


@pytest.mark.sampled(3)
def test_another_picture_that_is_kept_shares_nothing_behind_it_and_one_that_is_left_out_all(
    starting: Starting, folder: Path
) -> None:
    tokens, items = prompt_of(folder)
    others = [replace(item, digest=bytes([number]) * 32) for number, item in enumerate(items)]
    engine, scorer = starting(folder, judged(items, 1), cache_bytes=1 << 26)
    first = answer(engine, thin("first", tokens, items))
    again = answer(engine, thin("again", tokens, items))
    assert written(again) == written(first) and len(scorer.asked) == 1
    # What differs is not looked at.
    unseen = answer(engine, thin("unseen", tokens, [others[0], items[1], others[2]]))
    assert written(unseen) == written(first)
    assert ended(unseen).usage.cached_tokens == ended(again).usage.cached_tokens
    seen = answer(engine, thin("seen", tokens, [items[0], others[1], items[2]]))
    offset = kept_of(tokens, items, 1, window_of(engine)).index(items[1].begin)
    assert ended(seen).usage.cached_tokens <= offset


def window_of(engine: Engine) -> int:
    return max((group.window or 0 for group in engine._workload._core.runner.rows.groups), default=0)


@pytest.mark.sampled(3)
def test_who_does_not_ask_sees_all_pictures(starting: Starting, folder: Path) -> None:
    tokens, items = prompt_of(folder)
    engine, _ = starting(folder, judged(items, 1), cache_bytes=1 << 26)
    answer(engine, thin("thin", tokens, items))
    dense = answer(engine, asked("dense", tokens, items))
    fresh, _ = starting(folder, judged(items, 1))
    assert written(dense) == written(answer(fresh, asked("dense", tokens, items)))
    assert looks_of(engine).runs == 3


def test_what_marks_a_picture_goes_with_it_unless_it_is_anothers(folder: Path) -> None:
    _, items = prompt_of(folder)
    [one, two, three] = items
    near = replace(two, runs=tuple((begin + one.end - two.begin, end + one.end - two.begin) for begin, end in two.runs))
    spans = PromptMedia((one, near, three)).spans
    assert spans == [(one.begin - 1, one.end), (near.begin, near.end + 1), (three.begin - 1, three.end + 1)]


def test_what_is_left_stands_where_it_stood_on_all_axes(tmp_path: Path) -> None:
    folder = saved("qwen3_vl", tmp_path / "qwen3_vl")
    tokens, items = prompt_of(folder)
    tower = load_model_adapter(folder, current_device(), with_vision=True).tower
    assert tower is not None
    prompt_media, kept = PromptMedia.of(tokens, tuple(items), tower), np.array(kept_of(tokens, items, 1), np.int32)
    assert prompt_media.positions is not None
    thinned = ThinnedPrompt(tuple(tokens), kept, prompt_media.thinned(kept))
    for begin, end in ((0, len(kept)), (3, 60), (len(kept) - 2, len(kept) + 3)):
        stated = thinned.explicit_positions(begin, end)
        wanted = prompt_media.positions[:, kept[begin:end]]
        if stated is not None:
            np.testing.assert_array_equal(stated[:, : wanted.shape[1]], wanted)
        else:
            assert (wanted[:, 1:] - wanted[:, :-1] == 1).all()
    assert thinned.position(len(kept) + 4) == prompt_media.position(len(tokens) + 4)
