"""Routing and combining: what a mixture of experts (MoE) computes besides products, for few tokens. Kernels are
compared with plain operations on the device at hand, once for each kind of layer: one that differs or does not compile
is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launched, Launcher, required_launcher
from ingot.kernels.measured import ROUTER
from ingot.kernels.selfcheck import BOUNDS, Case, Verdicts, check_cases

SOURCE = Path(__file__).parent / "source"
RouterScores = Literal["softmax", "sigmoid", "logits"]
RouterShares = Literal["none", "sum", "softmax"]
ROUTER_SCORES: tuple[RouterScores, ...] = ("softmax", "sigmoid", "logits")
_SHARES: tuple[RouterShares, ...] = ("none", "sum", "softmax")
MOST_EXPERTS = 1024
_MOST_WARPS = 16
_THREADS = 256
_ARRAYS = {
    "route": (("logits", "bias", "factors", "numbers", "slots"), ("chosen", "weights")),
    "place": (("chosen", "weights", "table", "begins", "noted"), ("places", "kept")),
    "combine": (("given", "chosen", "weights", "bias", "shared", "gates"), ("combined",)),
}


@cache
def moe_kernel(name: str) -> Kernel:
    return Kernel("moe", name, *_ARRAYS[name], "", read_source(SOURCE / f"{name}.h"))


@dataclass(frozen=True, slots=True)
class RouterShape:
    """How a router chooses experts and weighs them."""

    experts: int
    top: int
    """How many are a token's."""
    scores: RouterScores = "softmax"
    shares: RouterShares = "none"
    """What the weights are: scores as they are, their shares of the chosen ones' sum, or the softmax of those."""
    groups: int = 1
    top_groups: int = 1
    """Groups of neighbouring experts, and how many of them may be chosen from."""
    later: bool = False
    """Whether of experts with the same score the later ones are chosen."""
    factored: bool = False
    """Whether each expert has a number that its weight is multiplied by."""

    def unsupported(self) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        if not 0 < self.top <= min(self.experts, 32) or self.experts > MOST_EXPERTS:
            return f"{self.top} of {self.experts} experts: there are kernels for up to 32 of {MOST_EXPERTS}"
        if self.experts % self.groups or not 0 < self.top_groups <= self.groups <= 32:
            return f"{self.top_groups} of {self.groups} groups of {self.experts} experts: they are not alike"
        return None


class ExpertRouter(Launched):
    """A layer's choice of experts."""

    def __init__(
        self,
        run: Launcher,
        shape: RouterShape,
        *,
        bias: mx.array | None = None,
        factors: mx.array | None = None,
        eps: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """`bias` [experts] is added to scores where experts are chosen, weights are multiplied by `scale` and by the
        experts' `factors` [experts], and `eps` is added to the sum that scores are divided by. Raises ValueError for
        what there is no kernel for."""
        if (reason := shape.unsupported()) is not None:
            raise ValueError(reason)
        self._run, self.shape, self._biased = run, shape, bias is not None
        self._numbers = mx.array([eps, scale, *[0.0] * 6], mx.float32)
        self._bias, self._factors = (
            self._numbers if each is None else each.astype(mx.float32) for each in (bias, factors)
        )
        mx.eval(self._numbers, self._bias, self._factors)

    def __call__(self, logits: mx.array, slots: mx.array) -> tuple[mx.array, mx.array]:
        """Of contiguous logits [tokens, experts or more], the numbers of each token's experts (int32) and their weights
        (float32), [tokens * top]. Tokens whose `slots` [tokens or more, 2] are negative are not there."""
        shape, (tokens, row) = self.shape, logits.shape
        warps = min(_MOST_WARPS, -(-shape.experts // 32))
        template = (
            *(("T", logits.dtype), ("EXPERTS", shape.experts), ("TOP", shape.top), ("ROW", row), ("WARPS", warps)),
            *(("SCORES", ROUTER_SCORES.index(shape.scores)), ("SHARES", _SHARES.index(shape.shares))),
            *(("GROUPS", shape.groups), ("TOP_GROUPS", shape.top_groups), ("LATER", shape.later)),
            *(("BIASED", self._biased), ("FACTORED", shape.factored)),
        )
        outputs = tuple(OutputSpec((tokens * shape.top,), dtype) for dtype in (mx.int32, mx.float32))
        work = LaunchConfig(template, (tokens, 1, 1), warps * 32, outputs)
        inputs = [logits, self._bias, self._factors, self._numbers, slots]
        chosen, weights = self._run(moe_kernel("route"), inputs, work)
        return chosen, weights


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlaces:
    """Where the experts of a layer lie that has slots for some of them."""

    table: mx.array
    """The slot of each expert of several layers (int32), below zero for none."""
    begins: mx.array
    """Where this layer begins in the table and in what is noted: [8] (int32)."""
    noted: mx.array
    """Takes the experts that were chosen (int32)."""


def place_experts(
    run: Launcher, chosen: mx.array, weights: mx.array, places: ExpertPlaces
) -> tuple[mx.array, mx.array]:
    """The slots (int32) of chosen experts [tokens * top], and their weights: nothing for those in none, which stand in
    some slot. The experts are noted, in place."""
    outputs = tuple(OutputSpec(chosen.shape, dtype) for dtype in (mx.int32, mx.float32))
    work = LaunchConfig((("THREADS", _THREADS),), (-(-chosen.size // _THREADS), 1, 1), _THREADS, outputs)
    slots, kept = run(moe_kernel("place"), [chosen, weights, places.table, places.begins, places.noted], work)
    return slots, kept


@dataclass(frozen=True, slots=True, eq=False)
class SharedOutput:
    """What an expert of all tokens gave, and where its gates are: [tokens, size]; [tokens, gates], `gate_at`."""

    output: mx.array
    gates: mx.array | None = None
    gate_at: int = 0


def combine_experts(
    run: Launcher,
    given: mx.array,
    chosen: mx.array,
    weights: mx.array,
    top: int,
    *,
    bias: mx.array | None = None,
    shared: SharedOutput | None = None,
) -> mx.array:
    """What each token's experts gave [tokens * top, size], with their `bias` [experts, size], times their weights,
    summed, and what is `shared` added: [tokens, size]."""
    tokens, size = given.shape[0] // top, given.shape[1]
    gates = None if shared is None else shared.gates
    template = (
        *(("T", given.dtype), ("SIZE", size), ("TOP", top), ("THREADS", _THREADS), ("BIASED", bias is not None)),
        *(("BESIDE", shared is not None), ("GATED", gates is not None)),
        *(("GATES", 1 if gates is None else gates.shape[1]), ("GATE_AT", 0 if shared is None else shared.gate_at)),
    )
    inputs = [
        *(given, chosen, weights, given if bias is None else bias),
        *(given if shared is None else shared.output, given if gates is None else gates),
    ]
    work = LaunchConfig(
        template, (-(-size // _THREADS), tokens, 1), _THREADS, (OutputSpec((tokens, size), given.dtype),)
    )
    return run(moe_kernel("combine"), inputs, work)[0]


TOKENS = 5
SIZE = 96
"""Numbers of a token that experts' outputs are combined of."""
RouterKey = tuple[RouterShape, mx.Dtype, bool]


class CheckedMoe(Verdicts[RouterKey, bool]):
    """The kernels of a device that route tokens to experts."""

    def of(
        self,
        shape: RouterShape,
        dtype: mx.Dtype,
        *,
        bias: mx.array | None,
        factors: mx.array | None = None,
        eps: float,
        scale: float,
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
        launcher = required_launcher(self._device)
        return ExpertRouter(launcher, shape, bias=bias, factors=factors, eps=eps, scale=scale)


def check_moe_kernels(device: Device, shape: RouterShape, dtype: mx.Dtype, biased: bool) -> str | None:
    """The first wrong kernel for such layers on this device; None where all are right."""
    bias = _random(shape.experts, seed=1) / 4 if biased else None
    factors = 1 + _random(shape.experts, seed=3) / 4 if shape.factored else None
    return check_cases(
        device,
        ("moe", shape, dtype, biased),
        lambda: ExpertRouter(required_launcher(device), shape, bias=bias, factors=factors, scale=1.5),
        lambda router: _cases(router, dtype, bias, factors),
    )


def _cases(router: ExpertRouter, dtype: mx.Dtype, bias: mx.array | None, factors: mx.array | None) -> Iterator[Case]:
    shape, logits = router.shape, 2 * _random(TOKENS, router.shape.experts).astype(dtype)
    chosen, weights = router(logits, mx.zeros((TOKENS, 2), mx.int32))
    scores, ranked = plain_scores(shape, logits, bias)
    numbers, best = chosen.reshape(TOKENS, -1), mx.sort(ranked, axis=-1)[:, -shape.top :]
    # Experts with the same score are as good as each other.
    found = mx.sort(mx.take_along_axis(ranked, numbers, axis=-1), axis=-1)
    yield Case(f"{shape.top} of {shape.experts} experts are others", found, best, BOUNDS[dtype])
    wanted = 1.5 * plain_weights(shape, mx.take_along_axis(scores, numbers, axis=-1))
    wanted = wanted if factors is None else wanted * factors[numbers]
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
