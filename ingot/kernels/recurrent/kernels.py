"""What the kernels of recurrent mixers have in common: the rows of a forward pass, where their states are, the causal
convolution before a recurrence, and the gated norm behind it.

A mixer's kernels take the joint output of its input projections and give what its output projection takes. On CUDA they
write a row's states in place, in the slot that they read them from, or in another one. MLX does not know of that; what
orders it is the device's queue: a layer's states are written once in a forward pass, a pass is queued as a whole before
anything of the next one, and whoever copies states queues that at once. Metal runs kernels side by side unless one
reads what another gave, so that there states are outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from ingot.kernels.gpu.kernel_source import Kernel, KernelTemplate, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launched, Launcher
from ingot.kernels.paged_attention.inputs import padded_count, paged_kernel

SOURCE = Path(__file__).parent / "source"
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SIZES = (16, 32, 64, 96, 128, 192, 256)
"""Numbers by which a column of a state is read. What a group of threads has to hold of 8 or 16 tokens is little enough
for Metal, too."""
_CONVOLVE = 128
"""Threads of a group."""
_STRETCH = 64
"""Tokens of a row that one thread convolves."""
_GATE_WARPS = 4
_MOST_HELD = 10
"""Numbers that a thread holds of what is normed together, if enough threads can be had."""

INPUTS = {
    "convolve": ("x", "filter", "columns", "spans"),
    "advance": ("convolved", "joint", "slowness", "numbers", "spans"),
    "scan": ("convolved", "joint", "numbers", "spans"),
    "gate": ("read", "gates", "weight", "eps"),
}
STATES = {"convolve": "tails", "advance": "states", "scan": "states"}
OUTPUTS = {"convolve": ("convolved",), "advance": ("y", "kept"), "scan": ("y", "kept"), "gate": ("gated",)}


@cache
def recurrent_kernel(name: str, *, by_address: bool = False, returned: bool = False) -> Kernel:
    """Over a layer's states, or with their addresses instead, in int32; `returned`: states are not written in place."""
    defined = "#define BY_ADDRESS\n" * by_address + "#define RETURNED\n" * returned
    header = defined + "".join(read_source(SOURCE / f"{part}.h") for part in ("states", "gates"))
    inputs: tuple[str, ...] = INPUTS[name]
    outputs: tuple[str, ...] = OUTPUTS[name]
    if name in STATES:
        inputs = (*inputs, "addresses" if by_address else STATES[name])
        outputs = (*outputs, "states_after") if returned else outputs
    return Kernel("recurrent", name, inputs, outputs, header, read_source(SOURCE / f"{name}.h"))


@dataclass(frozen=True, slots=True)
class RecurrentSpans:
    """The rows of a forward pass: made once for all layers."""

    spans: mx.array
    """int32 [rows, 6]: first token, how many, slot, whether nothing came before, where states are kept or -1, the slot
    that is written to. Padding rows have no tokens."""
    rows: int
    most: int
    """Tokens of the longest row."""
    kept: int
    """Tokens after which states are kept."""

    @classmethod
    def of(
        cls,
        pieces: Sequence[tuple[int, int, int, int]],
        targets: Sequence[int] | None = None,
        keep: Sequence[bool] | None = None,
    ) -> RecurrentSpans:
        """Of each row: the number of its first token, how many it has, its slot, and how many it had before. States are
        written to these slots, or to the `targets`. Where `keep` says so, kernels give the states after each of a row's
        tokens, one row's behind another's."""
        chosen, written = keep or [False] * len(pieces), targets or [slot for _, _, slot, _ in pieces]
        numbers, kept = [], 0
        for (first, count, slot, start), target, wanted in zip(pieces, written, chosen, strict=True):
            numbers.append((first, count, slot, int(start == 0), kept if wanted else -1, target))
            kept += count * wanted
        most = max(count for _, count, _, _ in pieces)
        numbers += [(0, 0, 0, 0, -1, 0)] * (max(2, padded_count(len(numbers))) - len(numbers))
        return cls(mx.array(np.array(numbers, np.int32)), len(pieces), most, kept)


class RecurrentShape(Protocol):
    """What a mixer looks like."""

    @property
    def inner(self) -> int:
        """Numbers of a token that are read of its states."""

    @property
    def convolution(self) -> Convolution: ...

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a slot's tails and, where it has them, states."""

    @property
    def width(self) -> int:
        """Columns of the joint output of its input projections."""

    @property
    def norm(self) -> GatedNorm:
        """Behind the recurrence, where there is one."""

    @property
    def apart(self) -> tuple[int, ...]:
        """Columns of what further projections give, behind one another."""
        return ()

    def gates(self, joint: mx.array, *apart: mx.array) -> mx.array:
        """The projection that has the gates among its columns."""
        return joint

    def unsupported(self) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        return self.convolution.unsupported()


class Convolution(NamedTuple):
    """A causal convolution. Its tails are [slots, taps - 1, channels]."""

    channels: int
    taps: int
    silu: bool = True
    gated: bool = False  # what enters is the product of the first and the last third, and the second one gates it
    biased: bool = False

    @property
    def tail(self) -> tuple[int, int]:
        return self.taps - 1, self.channels

    def unsupported(self) -> str | None:
        return None if 2 <= self.taps <= 8 else f"a convolution over {self.taps} tokens: 2 to 8"


class GateColumns(NamedTuple):
    """Which columns of a projection gate what is read: `span` of them together, every `step` columns."""

    begin: int
    span: int
    step: int


class GatedNorm(NamedTuple):
    """What is read of the states, gated and normed."""

    size: int  # numbers that are normed together; 0: they are not normed
    first: bool  # the norm comes before the gate
    gates: GateColumns
    sigmoid: bool = False  # not SiLU, gates


class RecurrentKernels(Launched):
    """One layer's: keeps what does not change from pass to pass."""

    rule: ClassVar[str] = ""
    """The kernel of its recurrence, where there is one: a convolution has none."""
    _weight: mx.array
    _eps: mx.array

    def __init__(
        self,
        run: Launcher,
        shape: RecurrentShape,
        dtype: mx.Dtype,
        weights: Mapping[str, mx.array],
        columns: mx.array,
        *,
        in_place: bool,
    ) -> None:
        """`weights` has the `filter` [channels, taps, 1] and the `filter_bias`, if there is one; `columns` says from
        which column of the joint projection each channel enters. Raises ValueError for what there is no kernel for."""
        if (reason := shape.unsupported()) is not None:
            raise ValueError(reason)
        if dtype not in DTYPES:
            raise ValueError(f"{dtype}: there are kernels for {', '.join(map(str, DTYPES))}")
        self._run, self._dtype, self._convolution, self.in_place = run, dtype, shape.convolution, in_place
        self.shape, self.state_shapes = shape, shape.states
        filters = [weights["filter"].reshape(-1).astype(mx.float32)]
        if self._convolution.biased:
            filters.append(weights["filter_bias"].astype(mx.float32))
        self._filter, self._columns = mx.concatenate(filters), columns.astype(mx.int32)
        mx.eval(self._filter, self._columns)

    def mix(
        self, joint: mx.array, spans: RecurrentSpans, states: Sequence[mx.array], *apart: mx.array
    ) -> tuple[mx.array, list[mx.array]]:
        """What the output projection takes, [tokens, ...], of joint projections [tokens, ...] and of those that are
        `apart` from them, in contiguous memory; and the rows' states after that, unless these are written in place.
        `states` are those of all slots, or their addresses alone, as `locate_states` gives them."""
        convolved, after = self.convolve(joint, spans, states[0])
        if not self.rule:
            return convolved, after
        read, _, after_states = self.advance(convolved, joint, spans, states[-1], *apart)
        return self.gate(read, joint, *apart), [*after, *after_states]

    def advance(
        self, convolved: mx.array, joint: mx.array, spans: RecurrentSpans, states: mx.array, *apart: mx.array
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """What each token reads, [tokens, inner], of states that pass over all of its row's tokens up to it; the states
        after each token of the rows that keep them; and the rows' states, as `mix` gives them."""
        raise NotImplementedError

    def gate(self, read: mx.array, joint: mx.array, *apart: mx.array) -> mx.array:
        """What is read [tokens, inner], gated and normed."""
        return self._gate(self.shape.norm, read, self.shape.gates(joint, *apart), self._weight, self._eps)

    def convolve(self, joint: mx.array, spans: RecurrentSpans, tails: mx.array) -> tuple[mx.array, list[mx.array]]:
        """What enters, filtered along each row; and the tails after that, likewise."""
        own = self._convolution
        template: KernelTemplate = (
            *(("T", self._dtype), ("CHANNELS", own.channels), ("TAPS", own.taps), ("THREADS", _CONVOLVE)),
            *(("SILU", own.silu), ("GATED", own.gated), ("BIASED", own.biased), ("X_ROW", joint.shape[1])),
        )
        groups = (-(-own.channels // _CONVOLVE), spans.rows, -(-spans.most // _STRETCH))
        inputs = [joint, self._filter, self._columns, spans.spans]
        output = OutputSpec((joint.shape[0], own.channels), self._dtype)
        [convolved], after = self._over_states("convolve", inputs, tails, template, groups, _CONVOLVE, [output], spans)
        return convolved, after

    def _advance(
        self,
        inputs: list[mx.array],
        states: mx.array,
        template: KernelTemplate,
        groups: tuple[int, int, int],
        threads: int,
        spans: RecurrentSpans,
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """By the kernel of its rule, of what was convolved first."""
        kept = (spans.kept, *self.state_shapes[1]) if spans.kept else (1,)
        outputs = [OutputSpec((inputs[0].shape[0], self.shape.inner), self._dtype), OutputSpec(kept, mx.float32)]
        (y, earlier), after = self._over_states(self.rule, inputs, states, template, groups, threads, outputs, spans)
        return y, earlier, after

    def _over_states(
        self,
        name: str,
        inputs: list[mx.array],
        states: mx.array,
        template: KernelTemplate,
        groups: tuple[int, int, int],
        threads: int,
        outputs: list[OutputSpec],
        spans: RecurrentSpans,
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Outputs, and the rows' states where they are not written in place."""
        kernel = recurrent_kernel(name, by_address=states.dtype == mx.int32, returned=not self.in_place)
        after = [] if self.in_place else [OutputSpec((spans.rows, *states.shape[1:]), mx.float32)]
        work = LaunchConfig(template, groups, threads, (*outputs, *after))
        found = self._run(kernel, [*inputs, states], work)
        return found[: len(outputs)], found[len(outputs) :]

    def _gate(self, norm: GatedNorm, read: mx.array, gates: mx.array, weight: mx.array, eps: mx.array) -> mx.array:
        tokens, size = read.shape
        together = norm.size or 1024
        warps = _GATE_WARPS
        while together > warps * 32 * _MOST_HELD and warps < 32:
            warps *= 2
        shared = 1 if together <= 32 * _MOST_HELD else warps
        template: KernelTemplate = (
            *(("T", read.dtype), ("SIZE", size), ("NORM", together), ("ROW", gates.shape[1])),
            *(("GATE_AT", norm.gates.begin), ("GATE_SPAN", norm.gates.span), ("GATE_STEP", norm.gates.step)),
            *(("NORMED", bool(norm.size)), ("NORM_FIRST", norm.first), ("SIGMOID", norm.sigmoid)),
            *(("WEIGHTS", weight.size), ("WARPS", warps), ("TOGETHER", shared)),
        )
        groups = (-(-size // (together * (warps // shared))), tokens, 1)
        work = LaunchConfig(template, groups, warps * 32, (OutputSpec(read.shape, read.dtype),))
        return self._run(recurrent_kernel("gate"), [read, gates, weight, eps], work)[0]


def locate_states(run: Launcher, arrays: Sequence[mx.array]) -> mx.array:
    """Where a layer's tails and states are, as the kernels take it instead of them. They must stay there."""
    tails, states = arrays[0], arrays[-1]
    work = LaunchConfig((("T", tails.dtype),), (1, 1, 1), 32, (OutputSpec((4,), mx.int32),))
    return run(paged_kernel("locate"), [tails, states], work)[0]
