"""The kernels of a decode graph besides products and attention, and those that copy its inputs and its result."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import mlx.core as mx

from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launcher

SOURCE = Path(__file__).parent / "source"
_WARPS = 32
_THREADS = 256
_ARRAYS = {
    "norm": (("states", "added", "weight", "eps"), ("sums", "normed")),
    "gate": (("both",), ("gated",)),
    "shift": (("product", "bias"), ("shifted",)),
    "post": (("states", "angles", "slots", "table", "rows", "after", "memory", "spots"), ("posted",)),
    "post_adapted": (
        ("states", "angles", "slots", "table", "rows", "adapters", "after", "memory", "spots"),
        ("posted",),
    ),
    "lay": (("addresses", "after", "place"), ("laid",)),
    "take": (("done", "memory", "spot"), ("taken",)),
}


@cache
def decode_kernel(name: str) -> Kernel:
    text = name.removesuffix("_adapted")
    header = "" if text == name else "#define ADAPTED\n"
    return Kernel("stack", name, *_ARRAYS[name], header, read_source(SOURCE / f"{text}.h"))


class RmsNormKernel:
    """An RMS norm."""

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.weight, self.eps = weight, mx.full(8, eps, mx.float32)
        mx.eval(self.weight, self.eps)

    def __call__(self, run: Launcher, states: mx.array, added: mx.array | None) -> tuple[mx.array, mx.array]:
        """Hidden states [tokens, size] plus a layer's output, and the sums normed."""
        sums, normed = _launch_norm(run, states, added, self)
        return (states if added is None else sums), normed


def add_residual(run: Launcher, states: mx.array, added: mx.array, like: RmsNormKernel) -> mx.array:
    """The sum, rounded like plain operations."""
    return _launch_norm(run, states, added, like, normed=False)[0]


def _launch_norm(
    run: Launcher, states: mx.array, added: mx.array | None, norm: RmsNormKernel, *, normed: bool = True
) -> tuple[mx.array, mx.array]:
    tokens, size = states.shape
    whole, none = OutputSpec((tokens, size), states.dtype), OutputSpec((1,), states.dtype)
    template = (("T", states.dtype), ("SIZE", size), ("WARPS", _WARPS), ("ADDED", added is not None))
    outputs = (none if added is None else whole, whole if normed else none)
    work = LaunchConfig((*template, ("NORMED", normed)), (tokens, 1, 1), _WARPS * 32, outputs)
    sums, result = run(decode_kernel("norm"), [states, states if added is None else added, norm.weight, norm.eps], work)
    return sums, result


def gate_states(run: Launcher, both: mx.array) -> mx.array:
    """silu(x) * y of [tokens, x and y]."""
    tokens, size = both.shape[0], both.shape[1] // 2
    template = (("T", both.dtype), ("SIZE", size), ("THREADS", _THREADS))
    work = LaunchConfig(
        template, (-(-size // _THREADS), tokens, 1), _THREADS, (OutputSpec((tokens, size), both.dtype),)
    )
    return run(decode_kernel("gate"), [both], work)[0]


def add_bias(run: Launcher, product: mx.array, bias: mx.array) -> mx.array:
    tokens, size = product.shape
    template = (("T", product.dtype), ("SIZE", size), ("THREADS", _THREADS))
    work = LaunchConfig(
        template, (-(-size // _THREADS), tokens, 1), _THREADS, (OutputSpec((tokens, size), product.dtype),)
    )
    return run(decode_kernel("shift"), [product, bias], work)[0]


# Inputs and results of graphs


def post_inputs(run: Launcher, given: list[mx.array], after: mx.array, memory: mx.array, spots: mx.array) -> mx.array:
    """Copy states, angles, slots, table, rows and, where there are some, adapters to a graph's memory."""
    count = max(array.size for array in given)
    groups = min(64, -(-count // (8 * _THREADS)))
    template = (("T", given[0].dtype), ("THREADS", _THREADS))
    inputs = [*(array.reshape(-1) for array in given), after, memory, spots]
    name = "post" if len(given) == 5 else "post_adapted"
    return run(decode_kernel(name), inputs, LaunchConfig(template, (groups, 1, 1), _THREADS, (_token_output(),)))[0]


def store_addresses(run: Launcher, addresses: mx.array, place: mx.array, after: mx.array) -> mx.array:
    """Copy addresses to a graph's memory, behind `after`; returns a token."""
    return run(decode_kernel("lay"), [addresses, after, place], LaunchConfig((), (1, 1, 1), 32, (_token_output(),)))[0]


def take_result(run: Launcher, done: mx.array, memory: mx.array, spot: mx.array, made: OutputSpec) -> mx.array:
    """Copy a graph's result out."""
    count = made.shape[0] * made.shape[1]
    groups = min(64, -(-count // (8 * _THREADS)))
    template = (("T", made.dtype), ("THREADS", _THREADS))
    return run(decode_kernel("take"), [done, memory, spot], LaunchConfig(template, (groups, 1, 1), _THREADS, (made,)))[
        0
    ]


def _token_output() -> OutputSpec:
    return OutputSpec((1,), mx.int32)
