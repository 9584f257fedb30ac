"""Routing and combining, against the operations of mlx-lm's own mixtures."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.moe.kernels import (
    ExpertPlaces,
    ExpertRouter,
    RouterShape,
    SharedOutput,
    combine_experts,
    place_experts,
)
from ingot.upstream import import_upstream
from tests.kernels.paged_attention.memory import BOUNDS, emulated

pytestmark = emulated
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def drawn(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def there(tokens: int) -> mx.array:
    return mx.zeros((tokens, 2), mx.int32)


def weights_by_expert(chosen: mx.array, weights: mx.array, experts: int) -> mx.array:
    """[tokens, experts], zeros for those that were not chosen."""
    tokens, top = chosen.shape
    rows = mx.arange(tokens)[:, None]
    whole = mx.zeros((tokens, experts))
    whole[mx.broadcast_to(rows, (tokens, top)), chosen] = weights.astype(mx.float32)
    return whole


def off(found: mx.array, wanted: mx.array) -> float:
    wide = found.astype(mx.float32), wanted.astype(mx.float32)
    return float(mx.abs(wide[0] - wide[1]).max() / mx.abs(wide[1]).max())


def routed(shape: RouterShape, logits: mx.array, seed: int = 0, **options: Any) -> tuple[mx.array, mx.array]:
    tokens = logits.shape[0]
    chosen, weights = ExpertRouter(Emulator(seed=seed), shape, **options)(logits, there(tokens))
    return chosen.reshape(tokens, -1), weights.reshape(tokens, -1)


def softmax_of_all(logits: mx.array, top: int, *, normed: bool) -> tuple[mx.array, mx.array]:
    """Qwen's."""
    scores = mx.softmax(logits, axis=-1, precise=True)
    chosen = mx.argsort(scores, axis=-1)[..., -top:]
    weights = mx.take_along_axis(scores, chosen, axis=-1).astype(mx.float32)
    return chosen, weights / mx.sum(weights, axis=-1, keepdims=True) if normed else weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("experts", "top"), [(128, 8), (60, 4), (512, 10), (5, 2), (4, 4), (1000, 3)])
def test_experts_are_chosen_by_their_softmax(experts: int, top: int, normed: bool, dtype: mx.Dtype) -> None:
    logits = 3 * drawn(5, experts, dtype=dtype)
    shape = RouterShape(experts, top, shares="sum" if normed else "none", later=True)
    found = weights_by_expert(*routed(shape, logits, seed=3), experts)
    wanted = weights_by_expert(*softmax_of_all(logits, top, normed=normed), experts)
    assert mx.array_equal(found > 0, wanted > 0)
    assert off(found, wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chosen_logits_may_have_a_softmax_of_their_own(dtype: mx.Dtype) -> None:
    """GPT-OSS's."""
    logits, top = 3 * drawn(5, 32, dtype=dtype), 4
    chosen = mx.argsort(logits, axis=-1)[..., -top:]
    weights = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1).astype(mx.float32), axis=-1)
    found = routed(RouterShape(32, top, "logits", "softmax", later=True), logits)
    assert off(weights_by_expert(*found, 32), weights_by_expert(chosen, weights, 32)) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("experts", "top", "groups", "top_groups"), [(64, 4, 1, 1), (256, 8, 8, 4), (24, 3, 4, 2), (384, 8, 1, 1)]
)
@pytest.mark.parametrize("normed", [True, False])
def test_a_bias_chooses_alone_and_so_do_groups(
    experts: int, top: int, groups: int, top_groups: int, normed: bool, dtype: mx.Dtype
) -> None:
    """DeepSeek V3's."""
    logits, bias = drawn(6, experts, dtype=dtype), 0.3 * drawn(experts, seed=1)
    select = import_upstream("mlx_lm.models.deepseek_v3").group_expert_select
    wanted = select(logits, bias, top, groups, top_groups, 2.5, normed)
    shape = RouterShape(experts, top, "sigmoid", "sum" if normed else "none", groups, top_groups)
    found = routed(shape, logits, seed=2, bias=bias, scale=2.5)
    assert off(weights_by_expert(*found, experts), weights_by_expert(*wanted, experts)) < 1e-5


def test_what_is_added_to_a_sum_makes_weights_smaller() -> None:
    logits = drawn(3, 16)
    shape = RouterShape(16, 4, "sigmoid", "sum")
    (_, whole), (_, less) = routed(shape, logits), routed(shape, logits, eps=1.0)
    _, scores = routed(RouterShape(16, 4, "sigmoid"), logits)
    assert off(mx.sum(whole, axis=-1), mx.ones(3)) < 1e-6
    assert off(less, scores / (1 + mx.sum(scores, axis=-1, keepdims=True))) < 1e-6


@pytest.mark.parametrize("later", [True, False])
def test_of_equals_those_at_one_end_are_chosen(later: bool) -> None:
    logits = mx.array([[1.0, 2.0, 1.0, 1.0, 0.0, 1.0]])
    chosen, _ = routed(RouterShape(6, 3, "logits", later=later), logits)
    assert chosen.tolist() == ([[1, 5, 3]] if later else [[1, 0, 2]])


def test_experts_are_different_ones_whatever_the_logits_are() -> None:
    for worst in (float("nan"), float("-inf"), float("inf"), 3e38):
        logits = mx.full((2, 40), worst)
        for scores in ("softmax", "sigmoid", "logits"):
            chosen, _ = routed(RouterShape(40, 8, scores), logits, bias=drawn(40))  # type: ignore[arg-type]
            for row in chosen.tolist():
                assert len({*row}) == 8 and min(row) >= 0 and max(row) < 40  # type: ignore[misc, arg-type]


def test_tokens_that_are_not_there_have_the_first_ones_experts() -> None:
    logits, shape = drawn(4, 64), RouterShape(64, 4)
    logits[2:] = float("nan")
    slots = mx.array([[0, 5], [3, 1], [-1, -1], [-1, -1], [-1, -1]], mx.int32)
    chosen, weights = (each.reshape(4, 4) for each in ExpertRouter(Emulator(), shape)(logits, slots))
    assert mx.array_equal(chosen[0], chosen[2]) and mx.array_equal(chosen[0], chosen[3])
    assert mx.array_equal(chosen[:2], routed(shape, logits[:2])[0]) and mx.all(mx.isfinite(weights))


def test_only_the_first_numbers_of_a_row_are_logits() -> None:
    logits = drawn(3, 20)
    chosen, weights = routed(RouterShape(16, 4), logits)
    alone, same = routed(RouterShape(16, 4), mx.contiguous(logits[:, :16]))
    assert mx.array_equal(chosen, alone) and mx.array_equal(weights, same)


@pytest.mark.parametrize("seed", [1, 2])
def test_threads_may_run_in_any_order(seed: int) -> None:
    logits, shape = drawn(2, 96), RouterShape(96, 6, groups=4, top_groups=2)
    for one, other in zip(routed(shape, logits), routed(shape, logits, seed=seed), strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (RouterShape(8, 9), "9 of 8 experts"),
        (RouterShape(2048, 8), "8 of 2048 experts"),
        (RouterShape(20, 2, groups=3), "of 3 groups of 20 experts"),
    ],
)
def test_a_router_without_a_kernel_is_named(shape: RouterShape, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ExpertRouter(Emulator(), shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 300])
def test_experts_outputs_are_weighed_and_summed(size: int, dtype: mx.Dtype) -> None:
    given, bias = drawn(3 * 4, size, dtype=dtype), drawn(6, size, dtype=dtype, seed=1)
    weights = mx.softmax(drawn(3, 4, seed=2), axis=-1)
    chosen = mx.array([[0, 3, 2, 5], [1, 2, 3, 4], [5, 4, 0, 1]], mx.int32)
    plain = combine_experts(Emulator(), given, chosen.flatten(), weights.flatten(), 4)
    wanted = (given.reshape(3, 4, size).astype(mx.float32) * weights[..., None]).sum(axis=1)
    assert off(plain, wanted) < BOUNDS[dtype]
    biased = combine_experts(Emulator(), given, chosen.flatten(), weights.flatten(), 4, bias=bias)
    wanted = ((given.reshape(3, 4, size) + bias[chosen]).astype(mx.float32) * weights[..., None]).sum(axis=1)
    assert off(biased, wanted) < BOUNDS[dtype] and biased.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_what_the_expert_of_all_tokens_gave_is_added(gated: bool, dtype: mx.Dtype) -> None:
    given, shared, gates = (
        drawn(6, 40, dtype=dtype),
        drawn(3, 40, dtype=dtype, seed=1),
        drawn(3, 9, dtype=dtype, seed=2),
    )
    weights, chosen = mx.full((6,), 0.5), mx.zeros(6, mx.int32)
    beside = SharedOutput(shared, gates, 7) if gated else SharedOutput(shared)
    found = combine_experts(Emulator(), given, chosen, weights, 2, shared=beside)
    plain = combine_experts(Emulator(), given, chosen, weights, 2)
    assert off(found, plain + (mx.sigmoid(gates[:, 7:8]) * shared if gated else shared)) < BOUNDS[dtype]


def test_experts_without_a_slot_weigh_nothing_and_all_that_were_chosen_are_noted() -> None:
    chosen, weights = mx.array([2, 0, 3, 1], mx.int32), mx.array([0.5, 0.25, 0.75, 1.0])
    table = mx.array([7, 7, 7, 4, -1, 6, -1], mx.int32)  # of a layer of three experts, and of this one's four
    noted, begins = mx.full(6, 9, mx.int32), mx.array([3, 2, *[0] * 6], mx.int32)
    slots, kept = place_experts(Emulator(), chosen, weights, ExpertPlaces(table, begins, noted))
    assert slots.tolist() == [6, 4, 0, 0]
    assert kept.tolist() == [0.5, 0.25, 0.0, 0.0]
    assert noted.tolist() == [9, 9, 2, 0, 3, 1]
