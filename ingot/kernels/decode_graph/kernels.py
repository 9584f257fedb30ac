"""What a stack of layers needs besides products and attention, and what carries arrays into and out of the memory of
graphs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import mlx.core as mx

from ingot.kernels.gpu.launchers import Launcher
from ingot.kernels.gpu.texts import Kernel, Output, Work, read

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
def stack_kernel(name: str) -> Kernel:
    text = name.removesuffix("_adapted")
    header = "" if text == name else "#define ADAPTED\n"
    return Kernel("stack", name, *_ARRAYS[name], header, read(SOURCE / f"{text}.h"))


class Norm:
    """An RMS norm."""

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.weight, self.eps = weight, mx.full(8, eps, mx.float32)
        mx.eval(self.weight, self.eps)

    def __call__(self, run: Launcher, states: mx.array, added: mx.array | None) -> tuple[mx.array, mx.array]:
        """States [tokens, size] with what a layer gave added to them, and these sums normed."""
        sums, normed = _normed(run, states, added, self)
        return (states if added is None else sums), normed


def add(run: Launcher, states: mx.array, added: mx.array, like: Norm) -> mx.array:
    """Their sum, rounded as plain operations round."""
    return _normed(run, states, added, like, normed=False)[0]


def _normed(
    run: Launcher, states: mx.array, added: mx.array | None, norm: Norm, *, normed: bool = True
) -> tuple[mx.array, mx.array]:
    tokens, size = states.shape
    whole, none = Output((tokens, size), states.dtype), Output((1,), states.dtype)
    template = (("T", states.dtype), ("SIZE", size), ("WARPS", _WARPS), ("ADDED", added is not None))
    outputs = (none if added is None else whole, whole if normed else none)
    work = Work((*template, ("NORMED", normed)), (tokens, 1, 1), _WARPS * 32, outputs)
    sums, result = run(stack_kernel("norm"), [states, states if added is None else added, norm.weight, norm.eps], work)
    return sums, result


def gate(run: Launcher, both: mx.array) -> mx.array:
    """silu(x) * y of [tokens, x and y]."""
    tokens, size = both.shape[0], both.shape[1] // 2
    template = (("T", both.dtype), ("SIZE", size), ("THREADS", _THREADS))
    work = Work(template, (-(-size // _THREADS), tokens, 1), _THREADS, (Output((tokens, size), both.dtype),))
    return run(stack_kernel("gate"), [both], work)[0]


def shift(run: Launcher, product: mx.array, bias: mx.array) -> mx.array:
    tokens, size = product.shape
    template = (("T", product.dtype), ("SIZE", size), ("THREADS", _THREADS))
    work = Work(template, (-(-size // _THREADS), tokens, 1), _THREADS, (Output((tokens, size), product.dtype),))
    return run(stack_kernel("shift"), [product, bias], work)[0]


# For graphs.


def post(run: Launcher, given: list[mx.array], after: mx.array, memory: mx.array, spots: mx.array) -> mx.array:
    """Put states, angles, slots, table, rows and, where there are some, adapters where a graph reads them."""
    count = max(array.size for array in given)
    groups = min(64, -(-count // (8 * _THREADS)))
    template = (("T", given[0].dtype), ("THREADS", _THREADS))
    inputs = [*(array.reshape(-1) for array in given), after, memory, spots]
    name = "post" if len(given) == 5 else "post_adapted"
    return run(stack_kernel(name), inputs, Work(template, (groups, 1, 1), _THREADS, (_word(),)))[0]


def lay(run: Launcher, addresses: mx.array, place: mx.array, after: mx.array) -> mx.array:
    """Put addresses where graphs read them, once the device has `after`; gives a token."""
    return run(stack_kernel("lay"), [addresses, after, place], Work((), (1, 1, 1), 32, (_word(),)))[0]


def take(run: Launcher, done: mx.array, memory: mx.array, spot: mx.array, made: Output) -> mx.array:
    """What a graph made."""
    count = made.shape[0] * made.shape[1]
    groups = min(64, -(-count // (8 * _THREADS)))
    template = (("T", made.dtype), ("THREADS", _THREADS))
    return run(stack_kernel("take"), [done, memory, spot], Work(template, (groups, 1, 1), _THREADS, (made,)))[0]


def _word() -> Output:
    return Output((1,), mx.int32)
