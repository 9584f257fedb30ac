"""Ragged attention as one operation, against float64, and models whose attention it computes."""

from __future__ import annotations

import os
from array import array
from itertools import accumulate

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.cpu import native
from ingot.kernels.device import current_device
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.layers import swapping
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.attention_backends import RaggedAttention
from tests.kernels.cpu.attention_reference import Reference, in_pieces, made_rows
from tests.kernels.cpu.paging import Rows
from tests.memory import settled
from tests.models.layers import family_configs

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

BOUND = 1e-5  # of the largest value
HALF_BOUND = 2**-10
"""The same, where keys and values are kept in 16 bits, and a key that lies between two of them may become either."""
WIDE_BOUND = 2**-6
"""The same, where many queries at once are computed as bfloat16."""


def drawn(data: st.DataObject) -> tuple[Reference, list[int], list[list[int]]]:
    """Attention of some kind, the lengths of some sequences, and launches that compute them."""
    size = data.draw(st.sampled_from([2, 6, 8, 20, 32, 33, 64, 80]))
    kv_heads = data.draw(st.integers(1, 3))
    reference = Reference(
        heads=kv_heads * data.draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        size=size,
        dims=data.draw(st.sampled_from([0, size // 4 * 2, size // 2 * 2])),
        neighbours=data.draw(st.booleans()),
        window=data.draw(st.sampled_from([0, 1, 7, 100])),
        cap=data.draw(st.sampled_from([None, 1.5, 30.0])),
        sunk=data.draw(st.booleans()),
        norm=data.draw(st.sampled_from([None, "plain", "whole", "centred"])),
        gated=data.draw(st.booleans()),
        halves=data.draw(st.booleans()),
    )
    lengths = data.draw(st.lists(st.integers(1, 150) | st.integers(500, 600), min_size=1, max_size=3))
    launches, left = [], list(lengths)
    while any(left):
        counts = [data.draw(st.integers(0, min(n, 60)) | st.just(n)) for n in left]
        if not any(counts):
            counts = [min(n, 60) for n in left]
        launches.append(counts)
        left = [n - count for n, count in zip(left, counts, strict=True)]
    return reference, lengths, launches


def check(data: st.DataObject, bound: float, halves: float = HALF_BOUND) -> None:
    reference, lengths, launches = drawn(data)
    rows = made_rows(reference, lengths, seed=len(lengths))
    found = in_pieces(reference, rows, launches)
    for row, output in zip(rows, found, strict=True):
        expected = reference(row.q, row.k, row.v)
        own = max(bound, halves) if reference.halves else bound
        assert np.abs(output - expected).max() <= own * max(1.0, np.abs(expected).max())


@pytest.mark.usefixtures("one_path")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mix_of_prompts_and_steps_gives_what_each_sequence_gives_alone(data: st.DataObject) -> None:
    check(data, BOUND)


@given(data=st.data())
def test_the_fastest_way_for_so_many_queries_is_as_near_as_its_numbers_allow(data: st.DataObject) -> None:
    check(data, WIDE_BOUND if native.has_wide() else BOUND, halves=HALF_BOUND)


@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("size", [20, 33, 64])
@pytest.mark.parametrize("halves", [False, True])
def test_a_prompt_gives_the_same_to_the_last_bit_whole_and_in_pieces(window: int, size: int, halves: bool) -> None:
    reference = Reference(6, 2, size, size // 2 * 2, window=window, sunk=True, norm="plain", halves=halves)
    tokens = 400
    whole = in_pieces(reference, made_rows(reference, [tokens], 5), [[tokens]])[0]
    pieces = [[100], [1], [1], [37], [2], [5], [150], [3], [1], [100]]
    apart = in_pieces(reference, made_rows(reference, [tokens], 5), pieces)[0]
    assert np.array_equal(whole, apart)


@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("halves", [False, True])
def test_a_long_prompt_gives_the_same_to_the_last_bit_whole_and_in_pieces(window: int, halves: bool) -> None:
    reference = Reference(3, 1, 32, 32, window=window, sunk=True, halves=halves)
    tokens, pieces = 1300, [[509], [1], [1], [1], [1], [510], [1], [3], [1], [271], [1]]
    whole = in_pieces(reference, made_rows(reference, [tokens], 5), [[tokens]])[0]
    apart = in_pieces(reference, made_rows(reference, [tokens], 5), pieces)[0]
    assert np.array_equal(whole, apart)


@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("window", [0, 600])
def test_a_step_gives_the_same_to_the_last_bit_alone_and_beside_others(window: int) -> None:
    reference = Reference(4, 2, 16, 16, window=window)
    lengths = [1100, 3, 700, 512, 513, 1023, 1025, 80] * max(1, (os.cpu_count() or 1) // 4)
    together = in_pieces(reference, made_rows(reference, lengths, 6), [[n - 1 for n in lengths], [1] * len(lengths)])
    for chosen in range(8):
        only = [
            [n - 1 if row == chosen else 0 for row, n in enumerate(lengths)],
            [row == chosen for row in range(len(lengths))],
        ]
        rows = made_rows(reference, lengths, 6)
        alone = in_pieces(reference, rows[: chosen + 1], [launch[: chosen + 1] for launch in only])
        assert np.array_equal(alone[chosen], together[chosen])


@pytest.mark.parametrize("one", [False, True])
def test_a_long_prompt_is_right_to_its_end(one: bool, one_path: None) -> None:
    native.use_one_path(one)
    reference = Reference(heads=2, kv_heads=1, size=16, dims=16)
    (row,) = made_rows(reference, [3000], 7)
    expected = reference(row.q[-700:], row.k, row.v)
    (found,) = in_pieces(reference, [row], [[2900], [100]])
    bound = BOUND if one or not native.has_wide() else WIDE_BOUND
    assert np.abs(found[-700:] - expected).max() <= bound * np.abs(expected).max()


@pytest.mark.skipif(native.has_wide(), reason="a machine with AMX has register tiles for many queries")
@pytest.mark.parametrize("cap", [None, 20.0])
def test_without_amx_there_is_one_way_whatever_was_asked_for(cap: float | None, one_path: None) -> None:
    native.use_one_path(False)
    reference = Reference(14, 2, 64, 64, cap=cap, halves=True)
    tokens, pieces = 700, [[100], [7], [1], [21], [63], [64], [65], [9], [1], [369]]
    whole = in_pieces(reference, made_rows(reference, [tokens], 5), [[tokens]])[0]
    apart = in_pieces(reference, made_rows(reference, [tokens], 5), pieces)[0]
    beside = in_pieces(reference, made_rows(reference, [tokens, 300], 5), [[tokens, 300]])[0]
    assert np.array_equal(whole, apart)
    assert np.array_equal(whole, beside)


def test_a_window_wider_than_a_sequence_shows_all_of_it() -> None:
    reference = Reference(heads=2, kv_heads=1, size=16)
    (row,) = made_rows(reference, [100], 8)
    q, k, v = (mx.array(x) for x in (row.q, row.k, row.v))
    operation, tables = reference.native(), Rows(1, 100)
    whole, widest = (
        operation(q, k, v, *reference.states(tables.count, 64), tables.spans([(0, 100, 0, 0)]), window)[0]
        for window in (0, 2**31 - 1)
    )
    assert mx.array_equal(whole, widest).item()


@pytest.mark.parametrize("size", [8, 21])
def test_keys_and_values_are_rounded_to_the_nearest_that_16_bits_hold(size: int) -> None:
    reference = Reference(1, 1, size, halves=True)
    given = np.random.default_rng(9).standard_normal((40, size)) * np.exp2(np.arange(-26, 14))[:, None]
    given[-1, :4] = [65519, 1e9, -np.inf, np.nan]
    x = mx.array(given.astype(np.float32))
    _, keys, values = reference.native()(x, x, x, *reference.states(1, 64), Rows(1, 40).spans([(0, 40, 0, 0)]))
    expected = np.clip(given.astype(np.float32), -65504, 65504).astype(np.float16)
    for state in (keys, values):
        assert np.array_equal(np.array(state)[0, 0, :40], expected, equal_nan=True)


@pytest.mark.parametrize("dtypes", [(mx.float32, mx.float16), (mx.bfloat16, mx.bfloat16)])
def test_states_of_other_kinds_are_refused(dtypes: tuple[mx.Dtype, mx.Dtype]) -> None:
    keys, values = (mx.zeros((1, 1, 64, 8), dtype) for dtype in dtypes)
    spans = Rows(1, 64).spans([(0, 3, 0, 0)])
    with pytest.raises(ValueError, match="alike, and float32 or float16"):
        Reference(2, 1, 8).native()(mx.ones((3, 16)), mx.ones((3, 8)), mx.ones((3, 8)), keys, values, spans)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_states_are_written_in_place(dtype: mx.Dtype) -> None:
    operation = Reference(2, 1, 8).native()
    keys, values = mx.zeros((128, 1, 512, 8), dtype), mx.zeros((128, 1, 512, 8), dtype)
    mx.eval(keys, values)
    size, before = keys.nbytes, settled()
    for position in range(3):
        x = mx.ones((1, 16))
        spans = native.attention_spans([(0, 1, 0, position, position)], [(0, array("i", [7]))])
        y, keys, values = operation(x, x[:, :8], x[:, 8:], keys, values, spans)
        mx.eval(y, keys, values)
    assert mx.get_peak_memory() - before < size
    written = np.array(keys)[:, 0].any(axis=-1)
    assert written[7, :3].all() and written.sum() == 3


FAMILIES = ["gemma2", "gemma3_text", "gpt_oss", "cohere", "cohere2", "phi3", "olmo2", "olmo3", "qwen3_moe", "glm4"]


def greedy(adapter: ModelAdapter, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """The tokens that each prompt is continued with, the prompts being computed in one mixed launch."""
    rows = adapter.new_batch_state()
    live = [rows.new() for _ in prompts]
    given = [token for prompt in prompts for token in prompt]
    parts = [ForwardPart((row,), len(prompt)) for row, prompt in zip(live, prompts, strict=True)]
    ends = [end - 1 for end in accumulate(map(len, prompts))]
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(steps):
        logits = adapter.run(rows, mx.array(given), parts, ends)
        mx.eval(logits, rows.pending())
        given = [int(token) for token in np.array(mx.argmax(logits, axis=-1))]
        for answer, token in zip(answers, given, strict=True):
            answer.append(token)
        parts, ends = [ForwardPart(tuple(live), 1)], list(range(len(prompts)))
    return answers


@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_answers_as_with_mlxs_own_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = family_configs.config(name)
    dice = np.random.default_rng(4)
    prompts = [[int(t) for t in dice.integers(1, family_configs.VOCAB, n)] for n in (70, 5, 33)]
    ours = adapt_model(family_configs.build(name), config, current_device(), widest=128, exact=True)
    calls = []
    computed = RaggedAttention.__call__
    monkeypatch.setattr(RaggedAttention, "__call__", lambda self, *given: calls.append(1) or computed(self, *given))
    answers = greedy(ours, prompts, 12)
    layers = [module for _, module in ours.model.named_modules() if isinstance(module, MixedAttention)]
    assert layers and len(calls) == 12 * len(layers)
    monkeypatch.setattr(swapping.native, "available", lambda: False)
    theirs = adapt_model(family_configs.build(name), config, current_device(), widest=128)
    assert greedy(theirs, prompts, 12) == answers
    assert len(calls) == 12 * len(layers)
