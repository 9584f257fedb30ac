"""Adapters together with what else may be asked for: guesses, pictures, thinned prompts, live codecs. Each answer is
what the adapter alone gives."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.cache import footprint
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Event, Request, Sampling, Stop
from ingot.engine.speculation.draft_model import DraftModelProposer
from ingot.engine.speculation.lookup import LookupProposer
from ingot.engine.speculation.proposer import Proposer
from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.media.image_processors import read_processor
from tests import engines, tiny
from tests.engine.specprefill import world
from tests.equality.test_adapters import LAYERS, matched, tokens_of, written
from tests.models.draft_heads import test_eagle as eagles
from tests.models.lora.made import matrices, shapes, write_mlx
from tests.models.vision import tiny_families
from tests.models.vision.looking import prompt_with, saved
from tests.rehearsed import Rehearsed
from tests.seeing_engines import asked as shown
from tests.seeing_engines import start_seeing

pytestmark = pytest.mark.sampled(3)
TURNS = (None, "one", "two", "one", "three", None)
ADAPTERS = (None, "one", "two")
PLACES = [None, engines.GPU]
place = pytest.mark.parametrize("device", PLACES, ids=["here", "gpu"])


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
        engine.check()
    finally:
        engine.close()


def asked(engine: Engine, name: str, tokens: int = 16, length: int = 40, **options: Any) -> list[Request]:
    """A request for each of the adapters and for the model alone, greedy and sampled."""
    rng = random.Random(3)
    return [
        Request(
            f"{name}{number}",
            (tuple(rng.randrange(95) for _ in range(length + number)),),
            max_tokens=tokens,
            sampling=Sampling(temperature=0.7 * (number % 2), seed=number),
            stop=Stop(ignore_eos=True),
            lora=None if adapter is None else engine.loras[adapter],
            **options,
        )
        for number, adapter in enumerate(TURNS)
    ]


def alone(engine: Engine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [tokens_of(engines.answer(engine, request)) for request in requests]


def together(engine: Engine, requests: Sequence[Request]) -> list[list[Event]]:
    streams = [engine.generate(request) for request in requests]
    return [[event for batch in stream for event in batch] for stream in streams]


def guessed(found: Sequence[Sequence[Event]]) -> list[int]:
    return [events[-1].speculation.proposed for events in found if isinstance(events[-1], Ended)]


# Guesses


@place
@pytest.mark.parametrize("kind", ["llama", "hybrid", pytest.param("window", marks=pytest.mark.slow)])
def test_guesses_change_no_token_of_an_adapter(kind: str, device: Device | None, tmp_path: Path) -> None:
    loras, rehearsed = written(tmp_path, kind), Rehearsed({}, right=0.7)
    with running(engines.start(kind, device=device, loras=loras)) as plain:
        told = alone(plain, asked(plain, "plain"))
        for request, tokens in zip(asked(plain, ""), told, strict=True):
            rehearsed.answers[request.prompts[0], 0] = tokens
    proposers: list[Proposer] = [rehearsed, LookupProposer()]
    with running(
        engines.start(kind, device=device, loras=loras, proposers=proposers, fixed_draft_tokens=6, cache_bytes=1 << 24)
    ) as guessing:
        assert alone(guessing, asked(guessing, "alone")) == told
        found = together(guessing, asked(guessing, "beside"))
        assert [tokens_of(events) for events in found] == told
        assert min(guessed(found)) > 0


@place
def test_a_draft_model_reads_along_with_every_adapter(device: Device | None, tmp_path: Path) -> None:
    loras = written(tmp_path, "llama")
    with running(engines.start("llama", device=device, loras=loras)) as plain:
        told = alone(plain, asked(plain, "plain"))
    draft = DraftModelProposer(world.draft_model(device=device, seed=0), vocab=tiny.VOCAB)
    with running(
        engines.start("llama", device=device, loras=loras, proposers=[draft], fixed_draft_tokens=4, cache_bytes=1 << 24)
    ) as guessing:
        for turn in ("first", "again"):
            found = together(guessing, asked(guessing, turn))
            assert [tokens_of(events) for events in found] == told
        assert min(guessed(found)) > 0


@place
def test_a_head_is_given_the_states_of_each_ones_adapter(device: Device | None, tmp_path: Path) -> None:
    loras = written(tmp_path, "llama")
    folder = eagles.written(tmp_path / "draft", eagles.random_tensors(embeds=False))

    with running(engines.start("llama", device=device, loras=loras)) as plain:
        told = alone(plain, asked(plain, "plain"))
    with running(
        engines.start("llama", device=device, loras=loras, eagle=folder, fixed_draft_tokens=3, cache_bytes=1 << 24)
    ) as guessing:
        for turn in ("first", "again"):
            found = together(guessing, asked(guessing, turn))
            assert [tokens_of(events) for events in found] == told
        assert min(guessed(found)) > 0


# Pictures


def seen_loras(folder: Path, to: Path) -> dict[str, Path]:
    from ingot.kernels.device import current_device
    from ingot.models.adapter import load_model_adapter

    sizes = shapes(load_model_adapter(folder, current_device(), with_vision=True).model, LAYERS)
    sizes = {path: size for path, size in sizes.items() if "vision" not in path and "visual" not in path}
    return {
        name: write_mlx(to / name, matrices(sizes, 4, seed), rank=4, scale=0.1)
        for seed, name in enumerate(("one", "two"))
    }


@pytest.mark.sampled(3)
@place
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_an_adapter_sees_pictures_alone_beside_others_and_with_guesses(
    family: str, device: Device | None, tmp_path: Path
) -> None:
    folder = saved(family, tmp_path / family)
    loras = seen_loras(folder, tmp_path / "loras")
    mixes = [prompt_with(read_processor(folder), seed, ["image"] * (seed % 2)) for seed in range(2)]
    headed = family == "qwen3_5"

    def requests(engine: Engine, turn: str) -> list[Request]:
        return [
            replace(shown(f"{turn}{at}-{name}", *mix), lora=None if name is None else engine.loras[name])
            for at, mix in enumerate(mixes)
            for name in ADAPTERS
        ]

    with running(start_seeing(folder, device=device, loras=loras)) as plain:
        told = alone(plain, requests(plain, "alone"))
    assert len({*told[len(ADAPTERS) :]}) > 1, "the adapters change nothing of what is seen"
    guessing = start_seeing(
        folder, device=device, loras=loras, proposers=(LookupProposer(),), headed=headed, cache_bytes=1 << 24
    )
    with running(guessing):
        for turn in ("first", "again"):
            assert [tokens_of(events) for events in together(guessing, requests(guessing, turn))] == told


def test_a_model_whose_pictures_see_themselves_refuses_adapters_by_name(tmp_path: Path) -> None:
    folder = tiny_families.saved("gemma3", tmp_path / "gemma3")
    loras = seen_loras(folder, tmp_path / "loras")
    with pytest.raises(ModelError, match="see each other, which is not supported with adapters"):
        start_seeing(folder, loras=loras)


# Prompts of which a part is computed


@place
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_a_thinned_prompt_of_an_adapter_is_its_own(kind: str, device: Device | None, tmp_path: Path) -> None:
    def scorer() -> world.Told:
        return world.Told(world.evenly)

    engine = world.start(kind, scorer, device=device, loras=written(tmp_path, kind))
    with running(engine):
        prompt = world.some(400)

        def requests() -> list[Request]:
            return [world.ask(prompt, lora=None if name is None else engine.loras[name]) for name in ADAPTERS]

        cold = [engines.answer(engine, replace(request, cache=False)) for request in requests()]
        told = [tokens_of(events) for events in cold]
        assert all(world.report(events).kept < 400 for events in cold)
        assert len({*told}) > 1
        kept = [engines.answer(engine, request) for request in requests()]
        assert [tokens_of(events) for events in kept] == told
        assert [matched(events) for events in kept] == [0, 0, 0], "one adapter took over what another computed"
        again = together(engine, requests())
        assert [tokens_of(events) for events in again] == told
        assert min(matched(events) for events in again) > 0


# Pages in fewer bits


@place
@pytest.mark.parametrize("kind", ["kernel", pytest.param("kernel-hybrid", marks=pytest.mark.slow)])
def test_coded_pages_of_an_adapter_are_read_as_if_it_were_alone(
    kind: str, device: Device | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "ENCODE_STEP_TOKENS", 128)
    monkeypatch.setattr(footprint, "RAW_TAIL_TOKENS", 64)
    loras, live = written(tmp_path, kind), PairCodec(CodecName.parse("k8v4"))
    with running(engines.start(kind, device=device, loras=loras, context=1024)) as plain:
        told = alone(plain, asked(plain, "plain", length=200, tokens=8))
    with running(
        engines.start(kind, device=device, loras=loras, live=live, context=1024, proposers=[LookupProposer()])
    ) as engine:
        requests = asked(engine, "coded", length=200, tokens=8, cache=False)
        one_by_one = alone(engine, requests)
        assert [tokens_of(events) for events in together(engine, requests)] == one_by_one
        exact = [replace(request, id=f"exact{number}", exact=True) for number, request in enumerate(requests)]
        assert [tokens_of(events) for events in together(engine, exact)] == told
