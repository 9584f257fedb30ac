"""With live keys and values in fewer bits: solo == batched == after preemption == with guesses, token for token; exact
requests get what a server without a codec gives."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ingot.cache import footprint
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import RAW_CODEC, PairCodec
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Request, Sampling, Stop
from ingot.engine.speculation.lookup import LookupProposer
from ingot.kernels.device import Device
from tests import engines

GREEDY = Sampling(temperature=0.0)
pytestmark = pytest.mark.sampled(3)
KINDS = ["kernel", "kernel-window", "kernel-hybrid"]
CODEC = PairCodec(CodecName.parse("k8v4"))
METAL = Device("metal", "a CPU that follows Metal's rules", 1 << 34)
PLACES = [(kind, device) for device in (None, engines.GPU) for kind in KINDS]
STEP, TAIL = 128, 64
"""Short, so that short prompts are coded."""
LENGTHS = (30, STEP + TAIL - 9, STEP + TAIL + 70, 2 * STEP + TAIL - 4)


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(footprint, "ENCODE_STEP_TOKENS", STEP)
        patch.setattr(footprint, "RAW_TAIL_TOKENS", TAIL)
        yield


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[0]}-{'gpu' if place[1] else 'here'}")
def place(request: pytest.FixtureRequest) -> tuple[str, Device | None]:
    found: tuple[str, Device | None] = request.param
    return found


@pytest.fixture(scope="module")
def engine(place: tuple[str, Device | None]) -> Iterator[Engine]:
    kind, device = place
    made = engines.start(kind, device=device, live=CODEC, context=1024, cache_bytes=1 << 26)
    yield made
    made.check()
    made.close()


def asked(seed: int, *lengths: int, tokens: int = 12, exact: bool = False, cache: bool = False) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            f"r{number}",
            (tuple(rng.randrange(95) for _ in range(length)),),
            max_tokens=tokens,
            sampling=GREEDY,
            stop=Stop(ignore_eos=True),
            cache=cache,
            exact=exact,
        )
        for number, length in enumerate(lengths)
    ]


def alone(engine: Engine, requests: list[Request]) -> list[str]:
    return [engines.text_of(engines.answer(engine, request)) for request in requests]


def together(engine: Engine, requests: list[Request]) -> list[str]:
    streams = [engine.generate(request) for request in requests]
    return [engines.text_of([event for batch in stream for event in batch]) for stream in streams]


def test_a_sequence_is_the_same_alone_and_among_others_though_its_pages_are_coded(engine: Engine) -> None:
    requests = asked(1, *LENGTHS)
    assert together(engine, requests) == alone(engine, requests)


def test_where_slabs_are_inputs_of_kernels_pages_are_unpacked_instead() -> None:
    engine = engines.start("kernel", device=METAL, live=CODEC, context=1024, cache_bytes=1 << 26)
    try:
        requests = asked(1, *LENGTHS[1:3], tokens=8, cache=True)
        assert together(engine, requests) == alone(engine, requests)
        group = engines.runner_of(engine).rows.groups[0]
        assert group.coded is not None and group.coded.slots.used > 0
    finally:
        engine.close()


def test_pages_really_are_coded_and_raw_ones_given_back(place: tuple[str, Device | None]) -> None:
    engine = engines.start(place[0], device=place[1], live=CODEC, context=1024, cache_bytes=1 << 26)
    try:
        engines.answer(engine, asked(3, 4 * STEP, tokens=2, cache=True)[0])
        group = next(group for group in engines.runner_of(engine).rows.groups if group.coded is not None)
        assert group.coded is not None
        assert group.coded.slots.used == footprint.coded_page_count(4 * STEP) > 0
        assert group.slots.used == group.pages.used - group.coded.slots.used
        assert group.coded.page_bytes < group.page_bytes
        engine.check()
    finally:
        engine.close()


def test_an_exact_request_gets_what_a_server_without_a_codec_gives(
    engine: Engine, place: tuple[str, Device | None]
) -> None:
    requests = asked(4, *LENGTHS, exact=True, cache=True)
    plain = engines.start(place[0], device=place[1], live=RAW_CODEC, context=1024, cache_bytes=1 << 26)
    try:
        alone(engine, asked(4, *LENGTHS, cache=True))
        for request in requests:
            ended = engines.answer(engine, request)[-1]
            assert isinstance(ended, Ended)
            [report] = ended.cache
            assert (report.matched, report.codec) == (0, "raw"), "what others kept is none of its business"
        assert together(engine, requests) == alone(plain, requests)
    finally:
        plain.close()


def test_a_conversation_goes_on_from_coded_pages_and_the_receipt_says_so(engine: Engine) -> None:
    [first] = asked(5, 3 * STEP, cache=True)
    engines.answer(engine, first)
    longer = Request(
        "again",
        ((*first.prompts[0], 1, 2, 3),),
        max_tokens=8,
        sampling=GREEDY,
        stop=Stop(ignore_eos=True),
    )
    events = engines.answer(engine, longer)
    assert isinstance(events[-1], Ended)
    [report] = events[-1].cache
    assert report.matched > STEP and report.codec == "k8v4"
    assert engine.kept.status("").live_codec == "k8v4" and engine.kept.status("").codec == "raw"


def test_a_prefix_that_ends_inside_of_a_coded_page_is_gone_on_from(engine: Engine, place: tuple[str, object]) -> None:
    if place[0] != "kernel":
        pytest.skip("others are gone on from at the ends of records alone")
    [first] = asked(6, 3 * STEP, cache=True)
    engines.answer(engine, first)
    parting = Request(
        "parts", ((*first.prompts[0][:100], 1, 2, 3),), max_tokens=8, sampling=GREEDY, stop=Stop(ignore_eos=True)
    )
    events = engines.answer(engine, parting)
    assert isinstance(events[-1], Ended)
    [report] = events[-1].cache
    assert (report.matched, report.codec) == (100, "k8v4")
    assert engines.text_of(engines.answer(engine, parting)) == engines.text_of(events)
    engine.check()


def test_guesses_change_nothing(place: tuple[str, Device | None]) -> None:
    kind, device = place
    prompts = asked(7, STEP + TAIL - 20, 2 * STEP + TAIL - 11, tokens=40)
    texts = []
    for proposers in ((), (LookupProposer(),)):
        engine = engines.start(
            kind,
            device=device,
            live=CODEC,
            context=1024,
            proposers=proposers,
            fixed_draft_tokens=4 if proposers else None,
        )
        try:
            texts.append(together(engine, prompts))
        finally:
            engine.close()
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("reserved_by_page")
def test_a_sequence_is_the_same_after_preemption(place: tuple[str, Device | None]) -> None:
    kind, device = place
    requests = asked(8, *[STEP + TAIL - 1] * 3, tokens=80)
    roomy = engines.start(kind, device=device, live=CODEC, context=1024)
    try:
        wanted, memory = alone(roomy, requests), engines.tight_memory(roomy, rows=3, tokens=256)
    finally:
        roomy.close()
    tight = engines.start(kind, device=device, live=CODEC, context=1024, memory=memory, limits=EngineLimits(4))
    try:
        texts, preemptions = engines.preempted(tight, requests)
        assert texts == wanted and preemptions > 0
        tight.check()
    finally:
        tight.close()
