"""The gated delta rule behind a convolution, for rows of any number of tokens each: one kernel source for GPUs.

Two kernels for a layer: `convolve`, then `advance`. Both write a row's states in place, in the slot that its span
names. MLX does not know of that; what orders it is the device's queue: a layer's states are written once in a forward
pass, a pass is queued as a whole before anything of the next one, and whoever copies states queues that at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.kernel_source import Kernel, KernelTemplate, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launched, Launcher, required_launcher

SOURCE = Path(__file__).parent / "source"
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SIZES = (16, 32, 64, 96, 128, 192, 256)
"""Of keys. What a group of threads has to hold of 8 or 16 tokens is little enough for Metal, too."""
_CONVOLVE, _ADVANCE = 128, 256
"""Threads of a group."""

INPUTS = {
    "convolve": ("x", "filter", "tails", "spans"),
    "advance": ("convolved", "decays", "strengths", "numbers", "spans", "states"),
}
OUTPUTS = {"convolve": ("convolved",), "advance": ("y", "kept")}


@cache
def delta_kernel(name: str) -> Kernel:
    return Kernel(
        "delta", name, INPUTS[name], OUTPUTS[name], read_source(SOURCE / "gates.h"), read_source(SOURCE / f"{name}.h")
    )


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """What a layer looks like. Its states are [slots, taps - 1, channels] and [slots, value heads, value, key size]."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values, head by head."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def tail(self) -> tuple[int, int]:
        return self.taps - 1, self.channels

    @property
    def state(self) -> tuple[int, int, int]:
        return self.value_heads, self.value_size, self.key_size

    def unsupported(self) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        if self.key_size not in SIZES:
            return f"keys of {self.key_size}: they may be {', '.join(map(str, SIZES))}"
        if self.value_heads % self.key_heads:
            return f"{self.value_heads} value heads over {self.key_heads} key heads"
        if not 2 <= self.taps <= 8:
            return f"a convolution over {self.taps} tokens: 2 to 8"
        return None


@dataclass(frozen=True, slots=True)
class DeltaSpans:
    """The rows of a forward pass: made once for all layers."""

    spans: mx.array
    """int32 [rows, 5]: first token, how many, slot, whether nothing came before, where states are kept or -1."""
    rows: int
    kept: int
    """Tokens after which states are kept."""

    @classmethod
    def of(cls, pieces: Sequence[tuple[int, int, int, int]], keep: Sequence[bool] | None = None) -> DeltaSpans:
        """Of each row: the number of its first token, how many it has, its slot, and how many it had before. Where
        `keep` says so, `advance` gives the states after each of its tokens, one row's behind another's."""
        chosen = keep or [False] * len(pieces)
        numbers, kept = [], 0
        for (first, count, slot, start), wanted in zip(pieces, chosen, strict=True):
            numbers.append((first, count, slot, int(start == 0), kept if wanted else -1))
            kept += count * wanted
        # No fewer than eight numbers, for which Metal would compile another kernel.
        numbers += [(0, 0, 0, 0, -1)] * (2 - len(numbers))
        return cls(mx.array(np.array(numbers, np.int32)), len(pieces), kept)


class DeltaKernels(Launched):
    """One layer's: keeps what does not change from pass to pass."""

    def __init__(
        self,
        run: Launcher,
        shape: DeltaShape,
        dtype: mx.Dtype,
        *,
        filter: mx.array,
        a_log: mx.array,
        dt_bias: mx.array,
        eps: float = 1e-6,
    ) -> None:
        """`filter` [channels, taps, 1]; `eps` is added to the squares of queries and of keys. Raises ValueError for
        what there is no kernel for."""
        if (reason := shape.unsupported()) is not None:
            raise ValueError(reason)
        if dtype not in DTYPES:
            raise ValueError(f"{dtype}: there are kernels for {', '.join(map(str, DTYPES))}")
        self._run, self.shape, self._dtype = run, shape, dtype
        self._filter = mx.contiguous(filter.reshape(-1)).astype(mx.float32)
        decay = -mx.exp(a_log.astype(mx.float32)) * math.log2(math.e)
        self._numbers = mx.concatenate([decay, dt_bias.astype(mx.float32), mx.array([eps])])
        mx.eval(self._filter, self._numbers)
        sizes = (("KEY_SIZE", shape.key_size), ("VALUE_SIZE", shape.value_size))
        heads = (("KEY_HEADS", shape.key_heads), ("VALUE_HEADS", shape.value_heads))
        channels = (("CHANNELS", shape.channels), ("TAPS", shape.taps))
        self._convolve: KernelTemplate = (("T", dtype), *channels, ("THREADS", _CONVOLVE))
        self._advance: KernelTemplate = (("T", dtype), *sizes, *heads, ("THREADS", _ADVANCE))

    def convolve(self, x: mx.array, spans: DeltaSpans, tails: mx.array) -> mx.array:
        """x [tokens, channels], filtered along each row and gated; `tails` of the rows' slots are then their last
        tokens."""
        groups = (-(-self.shape.channels // _CONVOLVE), spans.rows, 1)
        given = [mx.contiguous(x), self._filter, tails, spans.spans]
        [convolved] = self._run(
            delta_kernel("convolve"),
            given,
            LaunchConfig(self._convolve, groups, _CONVOLVE, (OutputSpec(x.shape, self._dtype),)),
        )
        return convolved

    def advance(
        self, convolved: mx.array, decays: mx.array, strengths: mx.array, spans: DeltaSpans, states: mx.array
    ) -> tuple[mx.array, mx.array]:
        """What each token reads, [tokens, value heads, value size], of states that pass over all of its row's tokens up
        to it; and the states after each token of the rows that keep them."""
        shape, tokens = self.shape, convolved.shape[0]
        lanes = 8 if shape.key_size % 32 == 0 else 4
        groups = (-(-shape.value_size // (_ADVANCE // lanes)), shape.value_heads, spans.rows)
        kept = (spans.kept, *shape.state) if spans.kept else (1,)
        outputs = (OutputSpec((tokens, shape.value_heads, shape.value_size), self._dtype), OutputSpec(kept, mx.float32))
        given = [convolved, mx.contiguous(decays), mx.contiguous(strengths), self._numbers, spans.spans, states]
        y, after = self._run(delta_kernel("advance"), given, LaunchConfig(self._advance, groups, _ADVANCE, outputs))
        return y, after


def delta_kernels(
    device: Device, shape: DeltaShape, dtype: mx.Dtype, *, filter: mx.array, a_log: mx.array, dt_bias: mx.array
) -> DeltaKernels:
    """Raises ValueError where there are none."""
    return DeltaKernels(required_launcher(device), shape, dtype, filter=filter, a_log=a_log, dt_bias=dt_bias)
