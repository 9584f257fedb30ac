"""A GPU's kernels, emulated: that they are used, and for rows of any width at once.

The kernels' source is the one that the GPUs compile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate

import mlx.core as mx
import pytest

from ingot.cache.attention_state import AppendState
from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.cache.kv_storage import KernelStorage
from ingot.cache.layer_state import RecurrentState
from ingot.engine.engine import Engine
from ingot.engine.request import Request, Sampling, Stop
from ingot.kernels.paged_attention.inputs import KernelRows
from ingot.kernels.paged_attention.kernels import PagedAttention, has_paged_kernels
from ingot.kernels.paged_attention.rope import RopeKernel
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.layers.recurrent import KernelRecurrence
from ingot.models.probe import logits_gap
from tests import engines, tiny

KINDS = ["kernel", "kernel-packed", "kernel-window", "kernel-hybrid"]
pytestmark = pytest.mark.skipif(
    not has_paged_kernels(engines.GPU), reason="kernels run on no device here, nor can be emulated"
)


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = engines.start(request.param, context=540, device=engines.GPU, cache_bytes=1 << 24)
    yield made
    made.close()


def prompt(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(95) for _ in range(count))


def asked(name: str, tokens: tuple[int, ...], *, cache: bool = False) -> Request:
    return Request(
        name, (tokens,), max_tokens=12, sampling=Sampling(temperature=0.0), stop=Stop(ignore_eos=True), cache=cache
    )


def texts(engine: Engine, requests: list[Request]) -> list[str]:
    return [
        engines.text_of([event for batch in stream for event in batch])
        for stream in [engine.generate(request) for request in requests]
    ]


def test_the_kernels_are_used(engine: Engine) -> None:
    engines.answer(engine, asked("k", prompt(5, 0)))
    runner = engines.runner_of(engine)
    paged = [state for state in runner.rows.states if isinstance(state, AppendState)]
    assert paged and all(isinstance(state.storage, KernelStorage) for state in paged)
    mixers = [type(module).__mro__ for _, module in runner._adapter.model.named_modules()]
    recurrent = sum(isinstance(state, RecurrentState) for state in runner.rows.states)
    assert sum(KernelRecurrence in kinds for kinds in mixers) == recurrent
    slower = [note for note in runner._adapter.notes if "slower" in note]
    assert all("a graph has no kernels for" in note for note in slower)


def test_keys_and_values_are_turned_and_written_by_one_kernel(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[type] = []
    for kind, name in ((RopeKernel, "__call__"), (PagedAttention, "write")):
        given = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda self, *rest, given=given: written.append(type(self)) or given(self, *rest)
        )
    engines.answer(engine, asked("t", prompt(70, 1)))
    assert set(written) == {RopeKernel}, "of prompts and of single tokens alike"


def fed(adapter: ModelAdapter, rows: BatchState, parts: list[tuple[Row, tuple[int, ...]]]) -> list[mx.array]:
    """Logits after each token of each row, all in one pass."""
    tokens = mx.array([token for _, own in parts for token in own])
    logits = adapter.run(rows, tokens, [ForwardPart((row,), len(own)) for row, own in parts])
    mx.eval(logits, rows.pending())
    return list(mx.split(logits, list(accumulate(len(own) for _, own in parts))[:-1]))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_width_up_to_sixteen_are_one_call_and_see_what_they_see_token_by_token(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapt_model(tiny.build(kind), tiny.CONFIGS[kind], engines.GPU)
    begun = [prompt(length, length) for length in (30, 75, 64, 200, 5)]
    widths = [1, 16, 40, 3, 1]
    ends = [prompt(width, 90 + number) for number, width in enumerate(widths)]
    rows, alone = adapter.new_batch_state(), adapter.new_batch_state()
    together = [rows.new() for _ in begun]
    fed(adapter, rows, list(zip(together, begun, strict=True)))
    asked: list[KernelRows] = []
    attend = PagedAttention.attend
    monkeypatch.setattr(
        PagedAttention, "attend", lambda self, q, r, *rest: asked.append(r) or attend(self, q, r, *rest)
    )
    found = fed(adapter, rows, list(zip(together, ends, strict=True)))
    few = tuple((len(begin) + width, width) for begin, width in zip(begun, widths, strict=True) if width <= 16)
    assert [each.spans for each in asked] == [few] * len(asked) and asked, "all but the longest, a layer at a time"
    for number, (begin, end) in enumerate(zip(begun, ends, strict=True)):
        row = alone.new()
        fed(adapter, alone, [(row, begin)])
        single = mx.concatenate([fed(adapter, alone, [(row, (token,))])[0] for token in end])
        assert logits_gap(found[number], single) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_sixteen_bits_are_one_call_and_see_what_they_see_by_mlx(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.build(kind)
    model.set_dtype(mx.bfloat16)
    adapter = adapt_model(model, tiny.CONFIGS[kind], engines.GPU)
    begun, widths = [prompt(length, length) for length in (30, 75, 200)], [1, 40, 20]
    ends = [prompt(width, 90 + number) for number, width in enumerate(widths)]
    asked: list[KernelRows] = []
    attend = PagedAttention.attend
    monkeypatch.setattr(
        PagedAttention, "attend", lambda self, q, r, *rest: asked.append(r) or attend(self, q, r, *rest)
    )

    def found() -> list[mx.array]:
        rows = adapter.new_batch_state()
        together = [rows.new() for _ in begun]
        fed(adapter, rows, list(zip(together, begun, strict=True)))
        asked.clear()
        return fed(adapter, rows, list(zip(together, ends, strict=True)))

    by_kernels = found()
    assert {each.spans for each in asked} == {((31, 1),), ((115, 40), (220, 20))}
    monkeypatch.setattr(PagedAttention, "takes_prompts", False)
    by_mlx = found()
    assert {each.spans for each in asked} == {((31, 1),)}
    assert all(logits_gap(*each) < 0.05 for each in zip(by_kernels, by_mlx, strict=True))
