"""One kernel for what precedes attention: norms of queries and keys, RoPE, and writing keys and values to their
pages; and one for what precedes latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gpu.kernel_source import KernelTemplate, LaunchConfig, OutputSpec
from ingot.kernels.gpu.launcher import Launched, Launcher, required_launcher
from ingot.kernels.paged_attention.inputs import KVSlabs, paged_kernel
from ingot.kernels.paged_attention.kernels import DTYPES
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, AttentionTuning

ROPE_WARPS = 4
"""Of a group of threads, each for one head of a token."""

HeadRmsNorm = tuple[mx.array | None, float]
"""An RMS norm of heads: its weight [size] and eps."""


@dataclass(frozen=True, slots=True)
class RopeShape:
    """The norms and RoPE of a layer. With `gated`, each query head is followed by a gate of the same size. With
    `queries_only`, keys and values are those that an earlier layer has written."""

    heads: AttentionShape
    dims: int = 0  # rotated dimensions of a head; 0: none
    neighbours: bool = False  # pairs are neighbours (traditional), not half of `dims` apart
    normed: bool = False
    gated: bool = False
    values_normed: bool = False  # without a weight
    keys_as_values: bool = False  # before they are normed and rotated
    queries_only: bool = False

    @property
    def query_step(self) -> int:
        """Numbers from one head of queries to the next."""
        return self.heads.key_size * (2 if self.gated else 1)

    @property
    def row(self) -> int:
        """Numbers that are projected for a token."""
        heads, values = self.heads, 0 if self.keys_as_values else self.heads.value_size
        return heads.heads * self.query_step + (0 if self.queries_only else heads.kv_heads * (heads.key_size + values))

    @property
    def norms(self) -> int:
        """Of queries and keys, and of values."""
        return 2 * self.normed + self.values_normed

    def unsupported(self) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        if self.dims % 2 or not 0 <= self.dims <= self.heads.key_size:
            return f"{self.dims} of {self.heads.key_size} dimensions are rotated: it must be an even number of them"
        if self.keys_as_values and self.heads.key_size != self.heads.value_size:
            return f"keys of {self.heads.key_size} as values of {self.heads.value_size}"
        return self.heads.unsupported()


class RopeKernel(Launched):
    """The kernel of one layer, or of all layers with the same shape."""

    def __init__(
        self,
        run: Launcher,
        tuning: AttentionTuning,
        shape: RopeShape,
        dtype: mx.Dtype,
        norms: Sequence[HeadRmsNorm] = (),
    ) -> None:
        """`norms` are those of queries and of keys, where they are `normed`, and then that of values. Raises ValueError
        where there is no kernel for it."""
        if (reason := shape.unsupported()) is not None:
            raise ValueError(reason)
        if dtype not in DTYPES:
            raise ValueError(f"{dtype}: there are kernels for {', '.join(map(str, DTYPES))}")
        assert len(norms) == shape.norms
        self._run, self._tuning, self._shape, self._dtype = run, tuning, shape, dtype
        self._norms = _pack_norms(shape, norms)
        heads = shape.heads
        self._groups = -(-(heads.heads + (0 if shape.queries_only else 2 * heads.kv_heads)) // ROPE_WARPS)
        self._template: KernelTemplate = (
            *(("T", dtype), ("VALUE_SIZE", heads.value_size), ("KV_HEADS", heads.kv_heads)),
            *(("KEY_SIZE", heads.key_size), ("PAGE", heads.page), ("GROUP", heads.group), ("WARPS", ROPE_WARPS)),
            *(("DIMS", shape.dims), ("NEIGHBOURS", shape.neighbours), ("NORMED", shape.normed)),
            *(("Q_STEP", shape.query_step), ("VALUES_NORMED", shape.values_normed)),
            *(("KEYS_AS_VALUES", shape.keys_as_values), ("QUERIES_ONLY", shape.queries_only)),
        )

    def __call__(
        self, projected: mx.array, angles: mx.array, slots: mx.array, slabs: KVSlabs, after: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Queries [tokens, heads, key_size] as they attend, and a token, as `PagedAttention.write` gives.

        `projected` [tokens, row] are queries, keys and values one behind another, as products with weights give them,
        in contiguous memory; `angles` [tokens, dims] as `rope_angles` gives them; `slots` are `token_slots`. A token's
        bits depend on nobody else's.
        """
        for dtype in (projected.dtype, slabs.dtype):
            if dtype != self._dtype:
                raise ValueError(f"{dtype} where {self._dtype} was said")
        heads, tokens, taken = self._shape.heads, projected.shape[0], self._tuning.taken(len(slabs.keys))
        turned, done = self._run(
            paged_kernel("turn", taken),
            [projected, angles, self._norms, slots, after, *slabs.found(taken, self._run)],
            LaunchConfig(
                template=self._template,
                groups=(tokens, self._groups, 1),
                threads=ROPE_WARPS * 32,
                outputs=(OutputSpec((tokens, heads.heads, heads.key_size), self._dtype), OutputSpec((1,), mx.int32)),
            ),
        )
        return turned, done


@dataclass(frozen=True, slots=True)
class LatentRopeShape:
    """The norm of latents, and RoPE, of a layer with latent attention. A head of queries has `unrotated` numbers, which
    are multiplied into the space of latents, and those that are rotated behind them."""

    heads: AttentionShape
    unrotated: int
    query_row: int  # numbers of a token where its queries are
    latent_row: int  # the same where its latent is
    latent_at: int  # where that begins
    dims: int = 0  # rotated dimensions; 0: none
    neighbours: bool = False  # pairs are neighbours (traditional), not half of `dims` apart

    def unsupported(self) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        if not self.heads.latent or self.heads.kv_heads != 1:
            return "latents are one for all heads"
        if self.dims % 2 or not 0 <= self.dims <= self.heads.value_size:
            return f"{self.dims} of {self.heads.value_size} dimensions are rotated: it must be an even number of them"
        return self.heads.unsupported()


class LatentRopeKernel(Launched):
    """The kernel of one layer, or of all layers with the same shape."""

    def __init__(
        self, run: Launcher, tuning: AttentionTuning, shape: LatentRopeShape, dtype: mx.Dtype, norm: HeadRmsNorm
    ) -> None:
        """`norm` is that of latents. Raises ValueError where there is no kernel for it."""
        if (reason := shape.unsupported()) is not None:
            raise ValueError(reason)
        if dtype not in DTYPES:
            raise ValueError(f"{dtype}: there are kernels for {', '.join(map(str, DTYPES))}")
        self._run, self._tuning, self._shape, self._dtype = run, tuning, shape, dtype
        heads, (weight, eps) = shape.heads, norm
        factors = mx.ones(heads.key_size) if weight is None else weight.astype(mx.float32)
        self._norms = mx.concatenate([factors, mx.array([eps], mx.float32)])
        mx.eval(self._norms)
        self._template: KernelTemplate = (
            *(("T", dtype), ("KEY_SIZE", heads.key_size), ("VALUE_SIZE", heads.value_size), ("KV_HEADS", 1)),
            *(("PAGE", heads.page), ("HEADS", heads.heads), ("UNROTATED", shape.unrotated), ("WARPS", ROPE_WARPS)),
            *(("Q_ROW", shape.query_row), ("KV_ROW", shape.latent_row), ("KV_AT", shape.latent_at)),
            *(("DIMS", shape.dims), ("NEIGHBOURS", shape.neighbours)),
        )

    def __call__(
        self,
        queries: mx.array,
        latents: mx.array,
        embedded: mx.array,
        angles: mx.array,
        slots: mx.array,
        slabs: KVSlabs,
        after: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Queries [tokens, heads, query_size] as they attend, and a token, as `PagedAttention.write` gives.

        `queries` [tokens, query_row] and `latents` [tokens, latent_row] are as they are projected, and `embedded`
        [heads, tokens, rank] are queries in the space of latents: all of them in contiguous memory. `angles` and
        `slots` are as for a `RopeKernel`. A token's bits depend on nobody else's.
        """
        for dtype in (queries.dtype, latents.dtype, embedded.dtype, slabs.dtype):
            if dtype != self._dtype:
                raise ValueError(f"{dtype} where {self._dtype} was said")
        heads, tokens, taken = self._shape.heads, queries.shape[0], self._tuning.taken(len(slabs.keys))
        turned, done = self._run(
            paged_kernel("turn_latent", taken),
            [queries, latents, embedded, angles, self._norms, slots, after, *slabs.found(taken, self._run)],
            LaunchConfig(
                template=self._template,
                groups=(tokens, -(-(heads.heads + 1) // ROPE_WARPS), 1),
                threads=ROPE_WARPS * 32,
                outputs=(OutputSpec((tokens, heads.heads, heads.query_size), self._dtype), OutputSpec((1,), mx.int32)),
            ),
        )
        return turned, done


def rope_angles(positions: mx.array, speeds: mx.array, gain: float = 1.0) -> mx.array:
    """How tokens at `positions` [tokens], or [tokens, speeds] where each speed has its own, turn when number i turns by
    position * speeds[i], and grows by `gain`."""
    if not speeds.size:
        return mx.zeros(8)  # which nobody reads
    angles = (positions if positions.ndim == 2 else positions[:, None]).astype(mx.float32) * speeds
    turned = mx.concatenate([mx.cos(angles), mx.sin(angles)], axis=-1)
    return turned if gain == 1 else turned * gain


def _pack_norms(shape: RopeShape, norms: Sequence[HeadRmsNorm]) -> mx.array:
    if not norms:
        return mx.zeros(8)
    of_heads = norms[:2] if shape.normed else [(None, 0.0)] * 2
    factors = [mx.ones(shape.heads.key_size) if weight is None else weight.astype(mx.float32) for weight, _ in of_heads]
    value_eps = norms[-1][1] if shape.values_normed else 0.0
    packed = mx.concatenate([*factors, mx.array([*(eps for _, eps in of_heads), value_eps], mx.float32)])
    mx.eval(packed)
    return packed


def rope_kernel(device: Device, shape: RopeShape, dtype: mx.Dtype, norms: Sequence[HeadRmsNorm] = ()) -> RopeKernel:
    """By this device's kernels. Raises ValueError where there are none, and as `RopeKernel` does."""
    return RopeKernel(required_launcher(device), TUNINGS[device.kind], shape, dtype, norms)


def latent_rope_kernel(device: Device, shape: LatentRopeShape, dtype: mx.Dtype, norm: HeadRmsNorm) -> LatentRopeKernel:
    """Likewise."""
    return LatentRopeKernel(required_launcher(device), TUNINGS[device.kind], shape, dtype, norm)
