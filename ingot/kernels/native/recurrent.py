"""Recurrent layers, each as one operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ingot.kernels.native.extension import extension

if TYPE_CHECKING:
    import mlx.core as mx


def convolution(weight: mx.array, bias: mx.array | None, *, silu: bool = False, gated: bool = False) -> Any:
    """A causal filter for each channel: weight [channels, taps, 1]. Only where `available`, like the next two.

    Called with x [..., channels], tails [slots, taps - 1, channels] and pieces, it gives y and the tails. A piece is
    (first token, tokens, slot, position of the first) of one sequence; one that starts at position 0 finds no state.
    Tails, and states below, are written in place: what is given must not be used any more. With gates x is [b, c, x]
    side by side, and y = c * filtered(b * x).

    With `earlier=n` it also gives copies [n, pieces, ...] of each state, as it was without the last token of a piece,
    without the last two, and so on; zeros where a piece is not that long. Guessed tokens are taken back with these.

    `through(x, inputs, output, ...)` does the layer's projections too: `inputs` are the weights that make each of its
    inputs, `output` those that take what it gives.
    """
    return extension().Convolution(weight, bias, silu=silu, gated=gated)


def gated_delta(
    *,
    key_heads: int,
    value_heads: int,
    key_size: int,
    value_size: int,
    eps: float,
    columns: Mapping[str, tuple[int, int, int]],
    filter: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm: mx.array,
) -> Any:
    """All that a gated delta layer does between its projections.

    Called with qkv, z, b and a [..., width], tails, states [slots, value_heads, value_size, key_size] and pieces, it
    gives y [..., value_heads * value_size], tails and states, and earlier ones if asked for. `columns` say where "q",
    "k", "v", "z", "b" and "a" stand in their rows: the first head's column, the way to the next head with the same key,
    and to the next such group.
    """
    return extension().GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=key_size,
        value_size=value_size,
        eps=eps,
        **columns,
        filter=filter,
        a_log=a_log,
        dt_bias=dt_bias,
        norm=norm,
    )


def scan(
    *,
    heads: int,
    groups: int,
    head_size: int,
    state_size: int,
    dt_limit: tuple[float, float],
    filter: mx.array,
    filter_bias: mx.array | None,
    a_log: mx.array,
    dt_bias: mx.array,
    skip: mx.array,
    norm: mx.array | None,
    eps: float = 0.0,
    norm_size: int = 0,
    norm_first: bool = False,
) -> Any:
    """All that a mixer of Mamba 2's kind does between its projections.

    Called with x [..., width], which is [gate, x, b, c, dt] side by side, tails, states [slots, heads, head_size,
    state_size] and pieces, it gives y [..., heads * head_size], tails and states, and earlier ones if asked for.
    `norm_size` neighbours of the output are normed together, before or after it is gated.
    """
    return extension().Scan(
        heads=heads,
        groups=groups,
        head_size=head_size,
        state_size=state_size,
        dt_least=dt_limit[0],
        dt_most=dt_limit[1],
        eps=eps,
        norm_size=norm_size,
        norm_first=norm_first,
        filter=filter,
        filter_bias=filter_bias,
        a_log=a_log,
        dt_bias=dt_bias,
        skip=skip,
        norm=norm,
    )
