"""Requests with pictures and clips: the same tokens alone, beside others, from the cache, after preemption, guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Event, Failed, Request, SequenceEnded
from ingot.engine.speculation.lookup import LookupProposer
from ingot.engine.vision_encoder import VisionMemory
from ingot.errors import BadMedia, RequestTooLarge
from ingot.kernels.device import Device
from ingot.media.image_processors import read_processor
from ingot.media.images import Pixels, View
from ingot.media.items import MediaItem
from tests.engines import GPU, answer
from tests.models.vision.looking import Frames, drawn_frame, prompt_with, saved
from tests.seeing_engines import ROOMY, asked, looks_of, start_seeing

pytestmark = pytest.mark.sampled(2)
FAMILIES = ("qwen3_vl", "qwen3_5")
MIXES = (["image"], ["image", "image"], ["video", "image"], [])


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp("equal") / request.param)


@pytest.fixture(scope="module", params=[None, GPU], ids=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> Device | None:
    found: Device | None = request.param
    return found


@pytest.fixture
def engine(folder: Path, device: Device | None) -> Iterator[Engine]:
    made = start_seeing(folder, device=device)
    yield made
    made.check()
    made.close()


def written(events: list[Event]) -> tuple[int, ...]:
    assert isinstance(events[-1], Ended), events[-1]
    return next(event.tokens for event in events if isinstance(event, SequenceEnded))


def mixes(folder: Path) -> list[tuple[list[int], list[MediaItem]]]:
    processor = read_processor(folder)
    return [prompt_with(processor, seed, shown) for seed, shown in enumerate(MIXES)]


def together(engine: Engine, requests: list[Request]) -> list[tuple[int, ...]]:
    streams = [engine.generate(request) for request in requests]
    return [written([event for batch in stream for event in batch]) for stream in streams]


def test_answers_are_the_same_alone_and_beside_each_other_and_depend_on_what_is_seen(
    folder: Path, engine: Engine
) -> None:
    requests = [asked(f"alone-{at}", *mix) for at, mix in enumerate(mixes(folder))]
    alone = [written(answer(engine, request)) for request in requests]
    eight = [replace(request, id=f"beside-{turn}-{request.id}") for turn in range(2) for request in requests]
    assert together(engine, eight) == 2 * alone
    tokens, items = mixes(folder)[0]
    random = np.random.default_rng(9)
    others = [
        replace(items[0], digest=bytes([number]) * 32, source=Frames((repainted(items[0], random),)))
        for number in range(4)
    ]
    answers = {written(answer(engine, asked(f"other-{at}", tokens, [other]))) for at, other in enumerate(others)}
    assert len({alone[0], *answers}) > 1


def repainted(item: MediaItem, random: np.random.Generator) -> Pixels:
    (frame,) = item.source.frames()
    return drawn_frame(random, frame.shape[1], frame.shape[0])


def test_a_second_turn_runs_no_tower_and_another_picture_of_the_same_size_shares_nothing_beyond_it(
    folder: Path, device: Device | None
) -> None:
    engine = start_seeing(folder, device=device, cache_bytes=1 << 26)
    plain = start_seeing(folder, device=device)
    try:
        tokens, items = prompt_with(read_processor(folder), 5, ["image", "video"], text=20)
        first = written(answer(engine, asked("first", tokens, items)))
        runs = looks_of(engine).runs
        further = [*tokens, *first[:-1], 11, 12, 13, 14]
        events = answer(engine, asked("second", further, items))
        assert isinstance(events[-1], Ended)
        assert events[-1].cache[0].matched >= items[-1].end
        assert looks_of(engine).runs == runs
        assert written(events) == written(answer(plain, asked("cold", further, items)))
        other = replace(items[1], digest=b"?" * 32)
        events = answer(engine, asked("other", further, [items[0], other]))
        assert isinstance(events[-1], Ended)
        assert events[-1].cache[0].matched <= other.begin
        assert all(token >= 0 for token in (*events[-1].cache[0].ours, *events[-1].cache[0].theirs))
        engine.check()
    finally:
        engine.close()
        plain.close()


def test_what_is_kept_on_disk_of_a_prompt_with_a_picture_is_found_by_its_content(folder: Path, tmp_path: Path) -> None:
    tokens, items = prompt_with(read_processor(folder), 5, ["image"], text=90)
    engine = start_seeing(folder, cache_bytes=1 << 26, disk=tmp_path)
    first = written(answer(engine, asked("first", tokens, items)))
    engine.close()
    engine = start_seeing(folder, cache_bytes=1 << 26, disk=tmp_path)
    try:
        events = answer(engine, asked("again", tokens, items))
        assert written(events) == first
        assert isinstance(events[-1], Ended)
        assert events[-1].cache[0].read >= items[0].end
        assert looks_of(engine).runs == 0
        events = answer(engine, asked("other", tokens, [replace(items[0], digest=b"?" * 32)]))
        assert isinstance(events[-1], Ended)
        assert events[-1].cache[0].matched <= items[0].begin
    finally:
        engine.close()


def test_preempted_sequences_are_shown_what_they_were_shown_before(folder: Path, device: Device | None) -> None:
    """A tenant that comes gets its seat of two from the one that has both."""
    engine = start_seeing(folder, device=device, limits=EngineLimits(max_sequences=2, target_itl_ms=5.0))
    prompts = [prompt_with(read_processor(folder), seed, ["image"]) for seed in range(3)]
    tenants = ("one", "one", "other")
    requests = [
        asked(f"r{at}", *prompt, count=40, tenant=tenant)
        for at, (prompt, tenant) in enumerate(zip(prompts, tenants, strict=True))
    ]
    try:
        expected = [written(answer(engine, replace(request, id=f"alone-{request.id}"))) for request in requests]
        streams = [engine.generate(request) for request in requests[:2]]
        begun = [next(iter(stream)) for stream in streams]  # both decode
        streams.append(engine.generate(requests[2]))
        last = [event for batch in streams[2] for event in batch]
        seen = sum(status.preemptions for status in engine.status())
        others = [
            [*first, *(event for batch in stream for event in batch)]
            for first, stream in zip(begun, streams[:2], strict=True)
        ]
        assert seen == 1
        assert [written(events) for events in (*others, last)] == expected
        engine.check()
    finally:
        engine.close()


def test_guesses_change_nothing(folder: Path) -> None:
    plain, guessing = start_seeing(folder), start_seeing(folder, proposers=(LookupProposer(),))
    try:
        for at, mix in enumerate(mixes(folder)):
            request = asked(f"r{at}", *mix, count=24)
            assert written(answer(guessing, request)) == written(answer(plain, request))
    finally:
        plain.close()
        guessing.close()


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_guesses_of_a_head_that_sees_change_nothing(folder: Path, device: Device | None) -> None:
    plain, guessing = start_seeing(folder, device=device), start_seeing(folder, device=device, headed=True)
    try:
        requests = [asked(f"r{at}", *mix, count=16) for at, mix in enumerate(mixes(folder))]
        expected = [written(answer(plain, request)) for request in requests]
        assert together(guessing, requests) == expected
        assert guessing.speculation.draft_tokens > 0
        guessing.check()
    finally:
        plain.close()
        guessing.close()


def test_features_that_are_still_there_are_not_looked_for_again(folder: Path, engine: Engine) -> None:
    tokens, items = mixes(folder)[1]
    first = written(answer(engine, asked("first", tokens, items)))
    runs = looks_of(engine).runs
    assert written(answer(engine, asked("again", tokens, items))) == first
    assert looks_of(engine).runs == runs == 2


def test_what_memory_does_not_hold_is_refused_before_it_is_unpacked(folder: Path) -> None:
    tokens, items = mixes(folder)[1]
    for looking in (VisionMemory(1000, ROOMY.features), VisionMemory(ROOMY.work, 1000)):
        engine = start_seeing(folder, looking=looking)
        try:
            unseen = [replace(item, source=Damaged(())) for item in items]
            with pytest.raises(RequestTooLarge, match="set aside"):
                engine.generate(asked("large", tokens, unseen))
        finally:
            engine.close()


class Damaged(Frames):
    def frames(self, *views: View, resample: int = 3) -> Iterator[Pixels]:
        raise BadMedia("the picture cannot be unpacked: it is damaged.")


def test_a_damaged_picture_ends_its_own_request_and_no_other(folder: Path, engine: Engine) -> None:
    tokens, items = mixes(folder)[0]
    broken = asked("broken", tokens, [replace(items[0], digest=b"!" * 32, source=Damaged(()))])
    streams = [engine.generate(request) for request in (broken, asked("whole", tokens, items))]
    events = [[event for batch in stream for event in batch] for stream in streams]
    assert isinstance(events[0][-1], Failed) and isinstance(events[0][-1].error, BadMedia)
    assert written(events[1]) == written(answer(engine, asked("alone", tokens, items)))
