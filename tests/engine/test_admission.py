"""Who is let in, without an engine behind the door."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.engine.admission import Admission, EngineLimits
from ingot.engine.output import ActiveRequest
from ingot.engine.request import Request, Sampling
from ingot.engine.streams import BlockingStream
from ingot.errors import BadRequest, ContextOverflow, Overloaded, Unsupported
from ingot.media.images import ImageFile
from ingot.media.items import MediaItem
from ingot.media.layout import Grid, Layout, Size
from tests import engines
from tests.scripted import CARD


def door(max_queue: int, *, seats: int = 0) -> Admission:
    return Admission(replace(CARD, vocab=96), engines.tiny_tokenizer(), EngineLimits(4, max_queue), lambda: seats)


def enter(made: Admission, name: str, tenant: str = "", *, n: int = 1) -> ActiveRequest:
    request = Request(name, ((1, 2, 3),), n=n, sampling=Sampling(seed=1), tenant=tenant)
    return made.enter(request, BlockingStream())


def test_one_tenant_cannot_take_the_whole_queue_from_another() -> None:
    made = door(8)
    for number in range(8):
        enter(made, f"a{number}", "a")
    with pytest.raises(Overloaded, match="8 sequences wait"):
        enter(made, "a8", "a")
    for number in range(4):
        enter(made, f"b{number}", "b")
    with pytest.raises(Overloaded):
        enter(made, "b4", "b")
    for number in range(3):
        enter(made, f"c{number}", "c")
    with pytest.raises(Overloaded):
        enter(made, "c3", "c")


def test_exact_states_have_the_context_that_memory_holds_of_them() -> None:
    made = Admission(
        replace(CARD, vocab=96, context=100, exact_context=20), engines.tiny_tokenizer(), EngineLimits(4, 4), lambda: 0
    )
    prompt = (1,) * 15
    exact = made.enter(Request("some", (prompt,), max_tokens=50, exact=True), BlockingStream())
    assert [sequence.limit for sequence in exact.sequences] == [5]
    coded = made.enter(Request("more", (prompt,), max_tokens=50), BlockingStream())
    assert [sequence.limit for sequence in coded.sequences] == [50]
    with pytest.raises(ContextOverflow, match="context is 20 tokens"):
        made.enter(Request("longer", ((1,) * 20,), exact=True), BlockingStream())


def test_a_tenant_that_waits_for_nothing_lends_its_share() -> None:
    made = door(8)
    for number in range(4):
        enter(made, f"a{number}", "a")
    running = enter(made, "b", "b")
    made.began(running.sequences)
    for number in range(4, 8):
        enter(made, f"a{number}", "a")


def test_with_one_tenant_the_queue_is_as_long_as_it_is_said_to_be() -> None:
    made = door(2, seats=1)
    for number in range(3):
        enter(made, f"r{number}")
    with pytest.raises(Overloaded) as refused:
        enter(made, "more")
    assert refused.value.retry_after >= 1
    with pytest.raises(Overloaded):
        enter(door(0), "none")


def test_more_answers_than_ever_fit_are_a_mistake_and_no_overload() -> None:
    with pytest.raises(BadRequest, match="asks for 7 answers; at most 6") as refused:
        enter(door(2, seats=4), "many", n=7)
    assert refused.value.param == "n"


def test_whoever_ends_gives_the_place_back_exactly_once() -> None:
    made = door(3)
    first, second = enter(made, "one"), enter(made, "two", n=2)
    with pytest.raises(Overloaded):
        enter(made, "three")
    made.began(first.sequences)
    first.sequences[0].admitted_at = 1.0
    made.left(first.sequences[0])
    for sequence in second.sequences:
        made.left(sequence)
    assert made.close("one") is first and made.close("one") is None and made.close("two") is second
    made.check()


def test_an_id_that_is_taken_is_refused_and_counted_nowhere() -> None:
    made = door(8)
    first = enter(made, "one")
    with pytest.raises(BadRequest, match="already running"):
        enter(made, "one")
    made.left(first.sequences[0])
    made.close("one")
    made.check()


def test_a_long_prompt_is_looked_at_once_however_many_answers_are_wanted() -> None:
    encoder_runs = 0

    class Prompt(tuple):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            nonlocal encoder_runs
            encoder_runs += 1
            return super().__iter__()

    request = Request("many", (Prompt((1, 2, 3)),), n=8)
    door(8).enter(request, BlockingStream())
    # The largest, the smallest, where messages end, and each answer's own tokens.
    assert encoder_runs <= 3 + 8


def test_an_engine_without_a_vision_tower_lets_no_picture_in() -> None:
    gif = b"GIF89a" + bytes([1, 0, 1, 0, 0, 0, 0, 0x2C, 0, 0, 0, 0, 1, 0, 1, 0, 0, 2, 0, 0x3B])
    layout = Layout(Size(1, 1), Grid(1, 1, 1), "<image>", "<image>", (1,))
    item = MediaItem("image", b"digest", ((1, 2),), layout, ImageFile.of(gif))
    with pytest.raises(Unsupported, match="without a vision encoder"):
        door(8).enter(Request("a", ((1, 2, 3),), media=((item,),)), BlockingStream())
