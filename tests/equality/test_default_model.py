"""The same contract on a real model: SmolLM2, as it is served."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from ingot.cache.forward_batch import ForwardPart, Row
from ingot.config import DEFAULT_MODEL, Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Request, Sampling, Stop
from ingot.kernels.cpu import native
from ingot.kernels.device import current_device
from ingot.models import adapter as adapters
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import no_progress
from tests.engines import answer, text_of

QUESTIONS = [
    "In which city is the Eiffel Tower?",
    "Write one sentence about the sea.",
    "Count from one to five.",
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings = Settings(memory="3GB", context=1024, deterministic=True)  # which CPUs with AMX need
    made = start_engine(
        settings, ensure_packaged_model(DEFAULT_MODEL, settings, no_progress), name=DEFAULT_MODEL, source="packaged"
    )
    yield made
    made.check()
    made.close()


def asked(engine: Engine, number: int, **options: object) -> Request:
    template = engine.tokenizer.template
    assert template is not None
    prompt = template.render([{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}])
    tokens = tuple(engine.tokenizer.encode(prompt, add_special=False))
    sampling = Sampling(temperature=0.0)
    return Request(f"q{number}", (tokens,), **{"max_tokens": 12, "sampling": sampling, **options})  # type: ignore[arg-type]


def test_it_knows_where_the_eiffel_tower_is_and_when_to_stop(engine: Engine) -> None:
    events = answer(engine, asked(engine, 0, max_tokens=40))
    assert "Paris" in text_of(events)
    assert events[-2].reason == "stop"  # type: ignore[union-attr]


def test_alone_and_batched_give_the_same_text(engine: Engine) -> None:
    requests = [asked(engine, number, stop=Stop(ignore_eos=True)) for number in range(3)]
    alone = [text_of(answer(engine, request)) for request in requests]
    streams = [engine.generate(request) for request in requests]
    assert [text_of([event for batch in stream for event in batch]) for stream in streams] == alone


def test_a_seed_gives_the_same_text_again_and_another_seed_another(engine: Engine) -> None:
    def text(seed: int) -> str:
        return text_of(answer(engine, asked(engine, 1, sampling=Sampling(temperature=1.2, top_p=0.95, seed=seed))))

    assert text(1) == text(1) != text(2)


@pytest.fixture
def several_paths() -> Iterator[None]:
    """As it is served: many tokens are computed in other ways than few."""
    native.use_one_path(False)
    yield
    native.use_one_path()


@pytest.mark.usefixtures("several_paths")
@pytest.mark.skipif(native.has_wide(), reason="a machine with AMX computes more than twelve tokens in another way")
def test_tokens_that_may_be_taken_back_are_computed_as_they_would_be_one_by_one() -> None:
    settings = Settings()
    adapter = adapters.load_model_adapter(ensure_packaged_model(DEFAULT_MODEL, settings, no_progress), current_device())
    rows, tokens = adapter.new_batch_state(), [(37 * number) % 40_000 for number in range(324)]

    def run(row: Row, new: list[int], tentative: int = 0) -> mx.array:
        return adapter.run(rows, mx.array(new), [ForwardPart((row,), len(new), tentative=tentative)])

    alone, together = rows.new(), rows.new()
    for row in (alone, together):
        mx.eval(run(row, tokens[:300]))
    one_by_one = mx.concatenate([run(alone, [token]) for token in tokens[300:]])
    assert mx.array_equal(run(together, tokens[300:], tentative=23), one_by_one)
