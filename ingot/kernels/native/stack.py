"""All layers of a model of Llama's kind as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ingot.kernels.native.extension import extension

if TYPE_CHECKING:
    import mlx.core as mx


class Stack:
    """Layers of Llama's kind in one operation over live states; only where `available`."""

    def __init__(
        self,
        angles: mx.array,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        scale: float,
        eps: float,
        rope_dims: int,
        rope_neighbours: bool,
        rope_gain: float,
    ) -> None:
        """`angles` [rope_dims / 2] are what pairs turn by from one position to the next."""
        self._stack = extension().Stack(
            angles,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_size,
            scale=scale,
            eps=eps,
            rope_dims=rope_dims,
            rope_neighbours=rope_neighbours,
            rope_gain=rope_gain,
        )
        self._size = 0

    def add(self, *, norms: Sequence[mx.array], matrices: Sequence[Any], head_norms: Sequence[mx.array | None]) -> None:
        """Put a layer on top: its two norms; q, k, v, o, gate, up and down; the norms of queries and keys, if any."""
        q, k, v, o, gate, up, down = matrices
        self._stack.add(
            attention_norm=norms[0],
            mlp_norm=norms[1],
            **{"q": q, "k": k, "v": v, "o": o, "gate": gate, "up": up, "down": down},
            q_norm=head_norms[0],
            k_norm=head_norms[1],
        )
        self._size += 1

    def __call__(
        self,
        x: mx.array,
        keys: Sequence[mx.array],
        values: Sequence[mx.array],
        spans: Any,
        coded: Sequence[tuple[mx.array, Any]] = (),
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        """x [..., hidden] through all layers, and each one's keys and values [pages, heads, page, size] after it.

        `spans` are what `spans()` made. The states are written in place: what is given must not be used any more.
        `coded` are each layer's pages in fewer bits, and their form.
        """
        y, *states = self._stack(x, keys, values, spans, list(coded))
        return y, states[: self._size], states[self._size :]
