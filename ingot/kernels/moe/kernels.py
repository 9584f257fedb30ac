"""Routing and combining: what a mixture of experts (MoE) computes besides products, for few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import mlx.core as mx

from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launched, Launcher

SOURCE = Path(__file__).parent / "source"
RouterScores = Literal["softmax", "sigmoid", "logits"]
RouterShares = Literal["none", "sum", "softmax"]
_SCORES: tuple[RouterScores, ...] = ("softmax", "sigmoid", "logits")
_SHARES: tuple[RouterShares, ...] = ("none", "sum", "softmax")
MOST_EXPERTS = 1024
_MOST_WARPS = 16
_THREADS = 256
_ARRAYS = {
    "route": (("logits", "bias", "numbers", "slots"), ("chosen", "weights")),
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
        eps: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """`bias` [experts] is added to scores where experts are chosen, weights are multiplied by `scale`, and `eps` is
        added to the sum that scores are divided by. Raises ValueError for what there is no kernel for."""
        if (reason := shape.unsupported()) is not None:
            raise ValueError(reason)
        self._run, self.shape, self._biased = run, shape, bias is not None
        self._numbers = mx.array([eps, scale, *[0.0] * 6], mx.float32)
        self._bias = self._numbers if bias is None else bias.astype(mx.float32)
        mx.eval(self._numbers, self._bias)

    def __call__(self, logits: mx.array, slots: mx.array) -> tuple[mx.array, mx.array]:
        """Of contiguous logits [tokens, experts or more], the numbers of each token's experts (int32) and their weights
        (float32), [tokens * top]. Tokens whose `slots` [tokens or more, 2] are negative are not there."""
        shape, (tokens, row) = self.shape, logits.shape
        warps = min(_MOST_WARPS, -(-shape.experts // 32))
        template = (
            *(("T", logits.dtype), ("EXPERTS", shape.experts), ("TOP", shape.top), ("ROW", row), ("WARPS", warps)),
            *(("SCORES", _SCORES.index(shape.scores)), ("SHARES", _SHARES.index(shape.shares))),
            *(("GROUPS", shape.groups), ("TOP_GROUPS", shape.top_groups), ("LATER", shape.later)),
            ("BIASED", self._biased),
        )
        outputs = tuple(OutputSpec((tokens * shape.top,), dtype) for dtype in (mx.int32, mx.float32))
        work = LaunchConfig(template, (tokens, 1, 1), warps * 32, outputs)
        chosen, weights = self._run(moe_kernel("route"), [logits, self._bias, self._numbers, slots], work)
        return chosen, weights


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
