"""What penalties look at, learned on the device."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.engine.request import Sampling
from ingot.engine.sampling import SampledTokens, TokenHistory, apply_penalties, needs_history, uniform_draw
from ingot.engine.sampling import sample_tokens as draw_with
from ingot.kernels.cpu import native
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.sampling import sample_tokens as kernel_draw
from tests.kernels.paged_attention.memory import emulated

pytestmark = pytest.mark.usefixtures("rules")

VOCAB = 40


@dataclass
class Row:
    sampling: Sampling
    seed: int = 0
    sampled: int = 0
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    banned: tuple[int, ...] = field(default=())


def draw(logits: mx.array, rows: list[Row]) -> SampledTokens:
    histories = [
        TokenHistory(VOCAB, row.prompt, row.generated) if needs_history(row.sampling) else None for row in rows
    ]
    return draw_with(logits, rows, histories)


def logits_of(seed: int, rows: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)


def reference(logits: np.ndarray, row: Row) -> set[int]:
    """Tokens that may come out, by the definitions, in float64."""
    x = logits.astype(np.float64).copy()
    if row.sampling.repetition_penalty != 1.0:
        for token in {*row.prompt, *row.generated}:
            x[token] = (
                x[token] / row.sampling.repetition_penalty
                if x[token] > 0
                else x[token] * row.sampling.repetition_penalty
            )
    for token, bias in row.sampling.logit_bias:
        x[token] += bias
    for token in set(row.generated):
        count = row.generated.count(token)
        x[token] -= row.sampling.presence_penalty + row.sampling.frequency_penalty * count
    x[list(row.banned)] = -np.inf
    if row.sampling.greedy:
        return {int(np.argmax(x))}
    x /= row.sampling.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p)
    order = order[: row.sampling.top_k or VOCAB]
    cached = p[order] / p[order].sum()
    before = np.cumsum(cached) - cached
    order = order[(before < row.sampling.top_p - 1e-6) | (np.arange(len(order)) == 0)]
    order = order[p[order] >= row.sampling.min_p * p[order[0]] * (1 - 1e-6)]
    return {int(token) for token in order if p[token] > 0}


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.4, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 15]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 50.0),), ((0, -100.0), (7, 2.0))]),
)
ROWS = st.lists(
    st.builds(
        Row,
        SAMPLINGS,
        seed=st.integers(0, 2**63 - 1),
        sampled=st.integers(0, 1000),
        prompt=st.just((1, 2, 3)),
        generated=st.lists(st.integers(0, VOCAB - 1), max_size=8).map(tuple),
        banned=st.sampled_from([(), (5, 9)]),
    ),
    min_size=1,
    max_size=5,
)


@given(rows=ROWS, seed=st.integers(0, 1000))
def test_only_tokens_that_a_rows_own_parameters_allow_come_out(rows: list[Row], seed: int) -> None:
    logits = logits_of(seed, len(rows))
    tokens = draw(mx.array(logits), rows).tokens.tolist()
    for row, own, token in zip(rows, logits, tokens, strict=True):
        assert token in reference(own, row)


@given(rows=ROWS, seed=st.integers(0, 1000))
def test_a_rows_draw_does_not_depend_on_its_neighbours(rows: list[Row], seed: int) -> None:
    logits = logits_of(seed, len(rows))
    together = draw(mx.array(logits), rows).tokens.tolist()
    alone = [draw(mx.array(logits[i : i + 1]), [row]).tokens.item() for i, row in enumerate(rows)]
    assert together == alone


def test_a_row_without_filters_draws_the_same_beside_one_that_has_them() -> None:
    logits = logits_of(2, 2)
    for number in range(50):
        plain, filtered = Row(Sampling(), seed=number), Row(Sampling(top_p=0.5), seed=number)
        alone = draw(mx.array(logits[:1]), [plain]).tokens.item()
        assert draw(mx.array(logits), [plain, filtered]).tokens[0].item() == alone


def test_equally_likely_tokens_are_kept_together() -> None:
    flat = mx.zeros((300, VOCAB))
    rows = [Row(Sampling(top_k=1), sampled=number) for number in range(300)]
    assert len(set(draw(flat, rows).tokens.tolist())) > VOCAB // 2


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.999999), Sampling(temperature=0.5, top_k=5)])
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = logits_of(1, 1)
    count = 4000
    rows = [Row(sampling, seed=7, sampled=number) for number in range(count)]
    tokens = np.array(draw(mx.array(np.repeat(logits, count, 0)), rows).tokens)
    p = np.exp(logits[0].astype(np.float64) / sampling.temperature)
    p[~np.isin(np.arange(VOCAB), list(reference(logits[0], rows[0])))] = 0
    p /= p.sum()
    seen = np.bincount(tokens, minlength=VOCAB) / count
    # Four standard errors of each share, with one count to spare.
    assert np.all(np.abs(seen - p) <= 4 * np.sqrt(p * (1 - p) / count) + 1 / count)


def test_uniform_numbers_are_spread_evenly_over_seeds_and_positions() -> None:
    by_position = np.array([uniform_draw(11, index) for index in range(20_000)])
    by_seed = np.array([uniform_draw(seed, 0) for seed in range(20_000)])
    for numbers in (by_position, by_seed):
        assert numbers.min() >= 0 and numbers.max() < 1
        share, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert abs(share / 20_000 - 0.05).max() < 0.01
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_logprobs_are_the_models_own_and_sorted() -> None:
    logits = logits_of(3, 2)
    rows = [Row(Sampling(temperature=0.0, logprobs=4, logit_bias=((5, 90.0),))), Row(Sampling(logprobs=2))]
    sampled = draw(mx.array(logits), rows)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    assert sampled.tokens[0].item() == 5
    assert sampled.logprobs is not None and sampled.top_tokens is not None and sampled.top_logprobs is not None
    assert sampled.logprobs[0].item() == pytest.approx(exact[0, 5], abs=1e-4)
    assert sampled.top_tokens[0].tolist() == np.argsort(-exact[0])[:4].tolist()
    assert sampled.top_logprobs[0].tolist() == pytest.approx(np.sort(exact[0])[::-1][:4].tolist(), abs=1e-4)


def test_a_draw_at_the_very_end_still_finds_a_token() -> None:
    rows = [Row(Sampling(), seed=seed) for seed in range(200)]
    flat = mx.zeros((200, 50_000))
    tokens = draw(flat, rows).tokens.tolist()
    assert all(0 <= token < 50_000 for token in tokens)


def test_penalties_leave_the_logprobs_that_are_told_alone() -> None:
    logits = logits_of(5, 1)
    plain = Row(Sampling(temperature=0.0, logprobs=3), prompt=(1, 2), generated=(3, 3))
    for penalties in ({"repetition_penalty": 1.8}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.5}):
        result = draw(mx.array(logits), [Row(Sampling(temperature=0.0, logprobs=3, **penalties), generated=(3, 3))])
        expected = draw(mx.array(logits), [plain])
        assert result.top_logprobs is not None and expected.top_logprobs is not None
        assert mx.array_equal(result.top_logprobs, expected.top_logprobs).item()


@pytest.mark.parametrize("temperature", [1e-40, 1e-38, 1e-20, 1e-6])
def test_next_to_no_temperature_draws_the_likeliest(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.kernels.cpu.native.available", lambda: False)  # as on a GPU
    logits = logits_of(6, 1)
    rows = [Row(Sampling(temperature=temperature), sampled=number) for number in range(20)]
    tokens = draw(mx.array(np.repeat(logits, 20, 0)), rows).tokens.tolist()
    assert set(tokens) == {int(np.argmax(logits))}


def test_min_p_alone_keeps_all_that_weigh_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    logits = mx.array([[0.0, -1.0, 0.5, -9.0]])
    rows = [Row(Sampling(temperature=1.0, min_p=0.1), seed=seed) for seed in range(60)]
    for beside in ([], [Row(Sampling(temperature=1.0, top_k=2))]):
        sampled = draw(mx.repeat(logits, len(rows) + len(beside), axis=0), [*rows, *beside]).tokens.tolist()
        assert {*sampled[: len(rows)]} == {0, 1, 2}  # type: ignore[index]


@emulated
@pytest.mark.parametrize("natively", [True, False])
def test_a_kernel_draws_the_same_tokens(natively: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not natively:
        monkeypatch.setattr(native, "available", lambda: False)
    drawing, dice = partial(kernel_draw, Emulator()), random.Random(7)
    filters: list[dict[str, Any]] = [{}, {"top_k": 9}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.05}]
    for seed in range(6):
        some = [
            Row(Sampling(temperature=dice.choice((0.3, 1.0, 1.7)), **each), seed=dice.randrange(999))
            for each in filters
        ]
        rows = [*some, Row(Sampling(temperature=0.0))]
        logits = mx.array(logits_of(seed, len(rows)))
        assert draw_with(logits, rows, kernel=drawing).tokens.tolist() == draw(logits, rows).tokens.tolist()


VOCAB_PENALTIES = 24
TOKENS = st.lists(st.integers(0, VOCAB_PENALTIES - 1), max_size=12)


@given(prompt=TOKENS, sampled=TOKENS)
def test_a_token_that_is_learned_counts_like_one_that_was_known(prompt: list[int], sampled: list[int]) -> None:
    learned = TokenHistory(VOCAB_PENALTIES, prompt)
    for token in sampled:
        learned.learn(mx.array(token, dtype=mx.uint32))
    known = TokenHistory(VOCAB_PENALTIES, prompt, sampled)
    assert mx.array_equal(learned.counts, known.counts).item()


def test_a_row_without_a_history_stays_as_it_is_to_the_last_bit() -> None:
    logits = mx.random.normal((2, VOCAB_PENALTIES), key=mx.random.key(3))
    penalties = Sampling(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3)
    found = apply_penalties(logits, [Sampling(), penalties], [None, TokenHistory(VOCAB_PENALTIES, [1, 2], [3, 3])])
    assert mx.array_equal(found[0], logits[0]).item()
    assert sorted(np.flatnonzero(np.array(found[1]) != np.array(logits[1])).tolist()) == [1, 2, 3]


def test_the_logits_that_are_told_are_not_those_that_are_penalised() -> None:
    logits = mx.random.normal((1, VOCAB_PENALTIES), key=mx.random.key(4))
    before = np.array(logits)
    apply_penalties(logits, [Sampling(repetition_penalty=1.5)], [TokenHistory(VOCAB_PENALTIES, [0, 1], [2])])
    assert np.array_equal(np.array(logits), before)
