"""Gated delta nets by the kernels of a GPU, for all sequences of a forward pass at once.

mlx-lm's own code runs a prompt's tokens one after another there, each as a handful of operations. What stands in here
reads and writes the live states in place, in mixed launches and others alike.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.recurrent_state import RecurrentState
from ingot.kernels.delta.checked import CheckedDelta
from ingot.kernels.gated_delta.kernels import DeltaKernels, DeltaShape, Spans
from ingot.models.families.description import GatedDelta
from ingot.models.families.registry import recurrence_of
from ingot.models.layers.modules import adopt

Projected = tuple[mx.array, mx.array, mx.array, mx.array]


class KernelDelta(nn.Module):
    """Stands in for a gated delta net, which it extends."""

    _kernels: DeltaKernels
    _joint: bool

    def __call__(self, *given: Any, **named: Any) -> mx.array:
        values = (*given, *named.values())
        state = next((value for value in values if isinstance(value, RecurrentState)), None)
        if state is None:
            own: mx.array = super().__call__(*given, **named)
            return own
        x: mx.array = values[0]
        heads, size, _ = self._kernels.shape.state
        channels, z, strengths, decays = (self._joined if self._joint else self._apart)(x)
        read = self._advanced(channels, strengths, decays, state)
        gated: mx.array = self.norm(read.reshape(*x.shape[:2], heads, size), z.reshape(*x.shape[:2], heads, size))
        projected: mx.array = self.out_proj(gated.reshape(*x.shape[:2], -1))
        return projected

    def _advanced(self, channels: mx.array, strengths: mx.array, decays: mx.array, state: RecurrentState) -> mx.array:
        """What all tokens read of their sequences' states, which move on."""
        shape, spans = self._kernels.shape, _spans(state)
        channels, strengths, decays = (part.flatten(0, 1) for part in (channels, strengths, decays))
        tails, states = state.lend(shape.tail, shape.state)
        convolved = self._kernels.convolve(channels, spans, tails)
        read, _ = self._kernels.advance(convolved, decays, strengths, spans, states)
        state.regain([tails, states])
        return read

    def _apart(self, x: mx.array) -> Projected:
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def _joined(self, x: mx.array) -> Projected:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        return mx.concatenate([part.reshape(*x.shape[:2], -1) for part in (q, k, v)], axis=-1), z, b, a


def _spans(state: RecurrentState) -> Spans:
    memo = state.opened.memo
    if "delta" not in memo:
        memo["delta"] = Spans.of(state.pieces)
    spans: Spans = memo["delta"]
    return spans


@cache
def _extended(theirs: type[nn.Module]) -> type:
    return type(f"Kernel{theirs.__name__}", (KernelDelta, theirs), {})


def kernel_delta(module: Any, kernels: CheckedDelta) -> KernelDelta | None:
    """The same by a GPU's kernels; None where it is something else, or where they are not right for it."""
    known = recurrence_of(module)
    if not isinstance(known, GatedDelta):
        return None
    key_size, value_size = module.head_k_dim, module.head_v_dim
    taps = module.conv1d.weight.shape[1]
    found = kernels.of(
        DeltaShape(module.num_k_heads, module.num_v_heads, key_size, value_size, taps),
        module.conv1d.weight.dtype,
        filter=module.conv1d.weight,
        a_log=module.A_log,
        dt_bias=module.dt_bias,
    )
    if found is None:
        return None
    theirs: type[nn.Module] = type(module)
    taken: KernelDelta = adopt(module, _extended(theirs))
    taken._kernels, taken._joint = found, known.joint
    return taken
