"""Routing and combining are compared with plain operations on the device at hand: a kernel that differs or does not
compile is not used. Each kind of layer is compared once.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import required_launcher
from ingot.kernels.measured import ROUTER
from ingot.kernels.moe.kernels import ExpertRouter, RouterShape, SharedOutput, combine_experts
from ingot.kernels.selfcheck import BOUNDS, Case, Verdicts, check_cases

TOKENS = 5
SIZE = 96
"""Numbers of a token that experts' outputs are combined of."""
RouterKey = tuple[RouterShape, mx.Dtype, bool]


class CheckedMoe(Verdicts[RouterKey, bool]):
    """The kernels of a device that route tokens to experts."""

    def of(
        self, shape: RouterShape, dtype: mx.Dtype, *, bias: mx.array | None, eps: float, scale: float
    ) -> ExpertRouter | None:
        """Of logits in this format. None where there is no right kernel for such a layer."""
        key = (shape, dtype, bias is not None)
        if (
            self._device.kind != "cuda"
            or self._slower_parts.leave_out(ROUTER)
            or not self._first_right(
                key, [True], lambda _: shape.unsupported() or check_moe_kernels(self._device, *key)
            )
        ):
            return None
        return ExpertRouter(required_launcher(self._device), shape, bias=bias, eps=eps, scale=scale)


def check_moe_kernels(device: Device, shape: RouterShape, dtype: mx.Dtype, biased: bool) -> str | None:
    """The first wrong kernel for such layers on this device; None where all are right."""
    bias = _random(shape.experts, seed=1) / 4 if biased else None
    return check_cases(
        device,
        ("moe", shape, dtype, biased),
        lambda: ExpertRouter(required_launcher(device), shape, bias=bias, scale=1.5),
        lambda router: _cases(router, dtype, bias),
    )


def _cases(router: ExpertRouter, dtype: mx.Dtype, bias: mx.array | None) -> Iterator[Case]:
    shape, logits = router.shape, 2 * _random(TOKENS, router.shape.experts).astype(dtype)
    chosen, weights = router(logits, mx.zeros((TOKENS, 2), mx.int32))
    scores, ranked = plain_scores(shape, logits, bias)
    numbers, best = chosen.reshape(TOKENS, -1), mx.sort(ranked, axis=-1)[:, -shape.top :]
    # Experts with the same score are as good as each other.
    found = mx.sort(mx.take_along_axis(ranked, numbers, axis=-1), axis=-1)
    yield Case(f"{shape.top} of {shape.experts} experts are others", found, best, BOUNDS[dtype])
    wanted = 1.5 * plain_weights(shape, mx.take_along_axis(scores, numbers, axis=-1))
    yield Case("weights of experts differ by {off}", weights.reshape(TOKENS, -1), wanted, BOUNDS[dtype])
    given, shared = _random(TOKENS * shape.top, SIZE, seed=2).astype(dtype), _random(TOKENS, SIZE).astype(dtype)
    output = combine_experts(router.launcher, given, chosen, weights, shape.top, shared=SharedOutput(shared, logits))
    summed = (given.reshape(TOKENS, -1, SIZE).astype(mx.float32) * weights.reshape(TOKENS, -1, 1)).sum(axis=1)
    gate = mx.sigmoid(logits[:, :1].astype(mx.float32))
    yield Case("combined experts differ by {off}", output, summed + gate * shared, 2 * BOUNDS[dtype])


def plain_scores(shape: RouterShape, logits: mx.array, bias: mx.array | None) -> tuple[mx.array, mx.array]:
    """Scores of experts, and those by which they are chosen: [tokens, experts], in float32."""
    scores = logits.astype(mx.float32)
    if shape.scores == "softmax":
        scores = mx.softmax(logits, axis=-1, precise=True).astype(mx.float32)
    elif shape.scores == "sigmoid":
        scores = mx.sigmoid(scores)
    ranked = scores if bias is None else scores + bias
    if shape.groups > 1:
        members = mx.unflatten(ranked, -1, (shape.groups, -1))
        of_groups = mx.sort(members, axis=-1)[..., -2:].sum(axis=-1)
        least = mx.sort(of_groups, axis=-1)[:, -shape.top_groups, None]
        ranked = mx.where((of_groups >= least)[..., None], members, 0).reshape(ranked.shape)
    return scores, ranked


def plain_weights(shape: RouterShape, scores: mx.array) -> mx.array:
    """Of chosen scores [tokens, top]."""
    if shape.shares == "softmax":
        return mx.softmax(scores, axis=-1)
    return scores / scores.sum(axis=-1, keepdims=True) if shape.shares == "sum" else scores


def _random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))
