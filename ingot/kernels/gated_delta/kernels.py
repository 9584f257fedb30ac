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
from ingot.kernels.paged_attention.inputs import padded_count, paged_kernel

SOURCE = Path(__file__).parent / "source"
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SIZES = (16, 32, 64, 96, 128, 192, 256)
"""Of keys. What a group of threads has to hold of 8 or 16 tokens is little enough for Metal, too."""
_CONVOLVE, _ADVANCE = 128, 256
"""Threads of a group."""

INPUTS = {
    "convolve": ("x", "filter", "spans"),
    "advance": ("convolved", "decays", "strengths", "numbers", "spans"),
}
STATES = {"convolve": "tails", "advance": "states"}
OUTPUTS = {"convolve": ("convolved",), "advance": ("y", "kept")}


@cache
def delta_kernel(name: str, *, by_address: bool = False) -> Kernel:
    """Over a layer's states, or with their addresses instead, in int32."""
    header = (read_source(SOURCE / "addresses.h") if by_address else "") + read_source(SOURCE / "gates.h")
    inputs = (*INPUTS[name], "addresses" if by_address else STATES[name])
    return Kernel("delta", name, inputs, OUTPUTS[name], header, read_source(SOURCE / f"{name}.h"))


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

    @property
    def columns(self) -> tuple[int, int, int]:
        """Where gates, strengths and decays begin behind the channels, where one product gives all of them."""
        strengths = self.channels + self.value_heads * self.value_size
        return self.channels, strengths, strengths + self.value_heads

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
    """int32 [rows, 5]: first token, how many, slot, whether nothing came before, where states are kept or -1. Padding
    rows have no tokens."""
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
        numbers += [(0, 0, 0, 0, -1)] * (max(2, padded_count(len(numbers))) - len(numbers))
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
        """x [tokens, channels, or more behind these], in contiguous memory, filtered along each row and gated; `tails`
        of the rows' slots are then their last tokens. These may also be addresses, as `locate_states` gives them."""
        groups = (-(-self.shape.channels // _CONVOLVE), spans.rows, 1)
        template = (*self._convolve, ("X_ROW", x.shape[1]))
        output = OutputSpec((x.shape[0], self.shape.channels), self._dtype)
        [convolved] = self._run(
            delta_kernel("convolve", by_address=tails.dtype == mx.int32),
            [x, self._filter, spans.spans, tails],
            LaunchConfig(template, groups, _CONVOLVE, (output,)),
        )
        return convolved

    def advance(
        self,
        convolved: mx.array,
        decays: mx.array,
        strengths: mx.array,
        spans: DeltaSpans,
        states: mx.array,
        begins: tuple[int, int] = (0, 0),
    ) -> tuple[mx.array, mx.array]:
        """What each token reads, [tokens, value heads, value size], of states that pass over all of its row's tokens up
        to it; and the states after each token of the rows that keep them. `begins`: where a token's decays and
        strengths begin, of which there may be more numbers."""
        shape, tokens = self.shape, convolved.shape[0]
        lanes = 8 if shape.key_size % 32 == 0 else 4
        groups = (-(-shape.value_size // (_ADVANCE // lanes)), shape.value_heads, spans.rows)
        kept = (spans.kept, *shape.state) if spans.kept else (1,)
        outputs = (OutputSpec((tokens, shape.value_heads, shape.value_size), self._dtype), OutputSpec(kept, mx.float32))
        template = (
            *self._advance,
            *(("DECAY_ROW", decays.shape[1]), ("DECAY_AT", begins[0])),
            *(("STRENGTH_ROW", strengths.shape[1]), ("STRENGTH_AT", begins[1])),
        )
        y, after = self._run(
            delta_kernel("advance", by_address=states.dtype == mx.int32),
            [convolved, decays, strengths, self._numbers, spans.spans, states],
            LaunchConfig(template, groups, _ADVANCE, outputs),
        )
        return y, after


def locate_states(run: Launcher, tails: mx.array, states: mx.array) -> mx.array:
    """Where they are, as the kernels take it instead of them. They must stay there."""
    work = LaunchConfig((("T", tails.dtype),), (1, 1, 1), 32, (OutputSpec((4,), mx.int32),))
    return run(paged_kernel("locate"), [tails, states], work)[0]


def delta_kernels(
    device: Device, shape: DeltaShape, dtype: mx.Dtype, *, filter: mx.array, a_log: mx.array, dt_bias: mx.array
) -> DeltaKernels:
    """Raises ValueError where there are none."""
    return DeltaKernels(required_launcher(device), shape, dtype, filter=filter, a_log=a_log, dt_bias=dt_bias)
