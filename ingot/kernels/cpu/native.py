"""The native kernels: `ingot_native`, the C++ extension for Linux CPUs. Without it everything works, slower.

Whether it is installed and enabled (`available`); attention fused with norms and RoPE; KV pages; weight matrices and
products; recurrent layers; all layers of a Llama-like model as one operation; norms and gates; sampling; convolutions;
and the KV codecs. Importing this imports neither mlx nor the extension; calling it does.

One set of kernels is compiled for each instruction set (portable, NEON with dot products, the same with half precision,
AVX2, AVX-512 with and without VNNI; AMX for many rows) and chosen when the library is loaded; `INGOT_ISA` asks for a
slower one. Products and sums are fused explicitly, never by the compiler's choice, because sums that must agree to the
last bit are computed in several places. Buffers borrowed from Python are returned without Python's lock
(`native/src/lent.h`): a computing thread would otherwise wait for it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot.kernels.cpu import fastblas
from ingot.kernels.cpu.fastblas import missing_kernels_advice
from ingot.kernels.device import acting_as
from ingot.quantities import counted

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    Integers = array[int] | memoryview | np.ndarray[Any, np.dtype[np.int32]]
    """Of 32 bits."""

INTERFACE = 6
"""The version of `ingot_native`'s interface; an extension of another version is not used."""
ROTATED_SIZES = (16, 32, 64, 128, 256, 512)
"""Sizes of vectors that its KV codecs rotate."""


@cache
def native_extension() -> Any:
    """The extension, with the fast BLAS set, or None."""
    if importlib.util.find_spec("ingot_native") is None:
        return None
    try:
        import ingot_native
    except ImportError:  # built for another mlx
        return None
    if getattr(ingot_native, "INTERFACE", 1) != INTERFACE:
        return None
    address = fastblas.single_threaded_sgemm()
    if address is not None:
        ingot_native.use_blas(address)
    return ingot_native


def _disabled() -> bool:
    """INGOT_KERNELS=mlx leaves everything to mlx, and blas all but matrix products. GPUs do not use CPU kernels."""
    return os.environ.get("INGOT_KERNELS") in ("mlx", "blas") or acting_as() is not None


def installed() -> bool:
    """Whether they will probably be used, without importing them or mlx."""
    return sys.platform == "linux" and not _disabled() and importlib.util.find_spec("ingot_native") is not None


def available() -> bool:
    return not _disabled() and native_extension() is not None


def advice() -> str | None:
    """What would make this faster; None when nothing would."""
    if available() or sys.platform != "linux" or _disabled():
        return None
    if importlib.util.find_spec("ingot_native") is None:
        return f"no native kernels: {missing_kernels_advice()}"
    return f"the native kernels were built for another mlx or ingot: {missing_kernels_advice()}"


def describe() -> str | None:
    """The instruction sets and the threads in use, such as "avx512vnni and amx, 2 threads"; None without them."""
    if not available():
        return None
    native = native_extension()
    sets = [name for name in (native.instruction_set(), native.wide()) if name]
    return f"{' and '.join(sets)}, {counted(native.threads(), 'thread')}"


def use_one_path(one: bool = True) -> None:
    """Compute a row the same way whatever the batch size, or, where there are AMX's register tiles, the fastest way
    for that size. CPUs without AMX know one way only."""
    if (native := native_extension()) is not None:
        native.use_one_path(one)


def arithmetic(*, deterministic: bool) -> str:
    """What the bits of results depend on here, besides the versions: the instruction sets that are used, and the
    extension's build."""
    if not available():
        return "mlx"
    native = native_extension()
    wide = None if deterministic else native.wide()
    return f"{' and '.join(name for name in (native.instruction_set(), wide) if name)}, build {_build()}"


@cache
def _build() -> str:
    """A digest of the extension's files."""
    whole = blake2b(digest_size=8)
    for file in sorted(Path(native_extension().__file__).parent.glob("*.so")):
        whole.update(file.read_bytes())
    return whole.hexdigest()


def has_wide() -> bool:
    """Whether many rows are multiplied by matrix instructions, as bfloat16."""
    return available() and native_extension().wide() is not None


FEW_QUERIES = 47
"""Up to so many queries, times the heads that share keys, attention uses its decode path (native/src/attend.cpp)."""
HeadNorm = tuple["mx.array", float, bool, bool]
"""(weight, eps, whether all heads of a token are normed as one, whether the mean is subtracted) of queries or keys."""


def rope_rotation(angles: mx.array, *, dims: int, neighbours: bool, gain: float) -> Any:
    """RoPE: `angles` [dims / 2] are the rotations of pairs from one position to the next.

    Layers with the same RoPE should share one: it computes the angles of a forward batch once.
    """
    return native_extension().Rotation(angles, dims=dims, neighbours=neighbours, gain=gain)


class NativeAttention:
    """Attention over KV pages in one operation, fused with norms and RoPE; only where `available`."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        size: int,
        scale: float,
        cap: float | None,
        sinks: mx.array | None,
        norms: tuple[HeadNorm | None, HeadNorm | None],
        rotation: Any,
        gated: bool,
    ) -> None:
        """With `cap`, a score s becomes cap * tanh(s / cap). `gated`: each query head is followed by a gate."""
        self._attention = native_extension().Attention(
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            scale=scale,
            cap=cap or 0.0,
            sinks=sinks,
            q_norm=norms[0],
            k_norm=norms[1],
            rotation=rotation,
            gated=gated,
        )

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        keys: mx.array,
        values: mx.array,
        spans: Any,
        window: int = 0,
        coded: tuple[mx.array, Any] | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The attention output of queries [..., heads * size], and the new keys and values [pages, kv_heads, page,
        size].

        `spans` are from `attention_spans`. A token sees the `window` newest tokens including itself, or all where that
        is 0. Keys and values are written in place: the arguments must not be used any more. `coded` are coded pages and
        their layout, where tables have some.
        """
        attended, keys, values = self._attention(q, k, v, keys, values, spans, window, coded)
        return attended, keys, values


def can_attend_segments() -> bool:
    """Whether `attend_segments` can be used: it needs a BLAS."""
    return available() and fastblas.single_threaded_sgemm() is not None


def attend_segments(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attention of queries [segments, rows, heads, size] over the keys and values [segments, keys, heads, size] of
    their own segment, as float32, with few scores in memory at a time. Only where `can_attend_segments`."""
    return native_extension().attend_segments(queries, keys, values, scale)


NativeSpan = tuple[int, int, int, int, int]
"""(first token in the forward batch, tokens, row of the tables, index of the first, its position) of one sequence."""
NativePageTable = tuple[int, "Integers"] | tuple[int, "Integers", "Integers"]
"""(how many leading pages were dropped, the pages after them) of one sequence; or with the coded pages that stand in
their place."""
PageChoiceLimits = tuple[int, int, int]
"""(full pages that tokens see, the newest of them, tokens of which one is sampled to select the others)."""


def attention_spans(
    spans: Sequence[NativeSpan],
    tables: Sequence[NativePageTable],
    positions: Integers | None = None,
    choice: PageChoiceLimits | None = None,
) -> Any:
    """Which tokens of a forward batch belong to which sequence, and in which pages; for all layers that share tables.

    Token i of a sequence is in the page `pages[i // page - dropped]`, at `i % page`; a page has 64, 128, 256 or 512
    tokens. Tables are copied. Rows may share pages of a common prefix; no other row may see what a span writes.
    `positions`, one for each token, replace consecutive ones in RoPE. With a `choice`, the tokens of a single span see
    only some of the earlier pages, which each layer selects (`cache.attention_state.PageSelection`). Raises ValueError
    for spans that are out of order; the operations do for pages and offsets out of range.
    """
    no_pages = array("i")
    padded = [table if len(table) == 3 else (*table, no_pages) for table in tables]
    return native_extension().Spans(spans, padded, positions, choice)


NativeCodedSide = tuple[int, int, int, int, Sequence[float], Sequence[float]]
"""(bits of a code, numbers that share a scale, offsets of codes and scales, levels, signs) of a page's keys or values.
0 bits: raw; 0 numbers that share a scale: rotated."""


def native_coded_layout(
    *, size: int, halves: bool, centre: int | None, head_bytes: int, keys: NativeCodedSide, values: NativeCodedSide
) -> Any:
    """The layout of coded pages of 64 tokens in bytes [pages, kv_heads, 1, head_bytes].

    `centre` is the offset of the keys' centre. What is not coded is `halves`, or floats. Raises ValueError for what
    attention cannot read.
    """
    return native_extension().CodedForm(
        size=size, halves=halves, centre=centre, head_bytes=head_bytes, keys=keys, values=values
    )


def reserve_memory(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Zeros that take memory only where they are written, until the array is freed. mlx does not count it as active."""
    return native_extension().reserve(shape, dtype)


def discard_pages(array: mx.array, pages: Sequence[int]) -> None:
    """Free the memory of these rows of the first axis, which then read as zeros, where it is whole memory pages.

    Waits for the array; no pending operation may read those rows.
    """
    native_extension().discard(array, pages)


def copy_tokens(arrays: Sequence[mx.array], copies: Sequence[tuple[int, int, int]]) -> list[mx.array]:
    """For each copy (source page, target page, tokens), in order: copy the first tokens to the target.

    In place, in all arrays [pages, kv_heads, page, size] at once: the arguments must not be used any more.
    """
    return native_extension().copy_tokens(arrays, copies)


def write_tokens(array: mx.array, page: int, begin: int, tokens: mx.array) -> mx.array:
    """Write tokens [kv_heads, count, size] to a page of the array, from its token `begin` on.

    In place: the argument must not be used any more.
    """
    return native_extension().write_tokens(array, page, begin, tokens)


BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
MXFP4 = {"mode": "mxfp4", "bits": 4, "group_size": 32}


class GateCurve(NamedTuple):
    """gate * sigmoid(slope * gate) * (up + offset), with gate clipped above `limit`, and up on both sides."""

    slope: float = 1.0
    limit: float = math.inf
    offset: float = 0.0


def covers_packing(*, bits: int, group_size: int, mode: str) -> bool:
    """Whether there are kernels for weights quantised so."""
    if {"mode": mode, "bits": bits, "group_size": group_size} == MXFP4:
        return available()
    return available() and mode == "affine" and bits in BITS and group_size in GROUPS


def packed_weights(
    quanta: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    bias: mx.array | None,
    group_size: int,
    bits: int,
) -> Any:
    """A quantised matrix, reordered for this machine's kernels; with one more axis, one for each expert. Only where
    `covers_packing`. Its `arrays` (quanta, scales, biases) replace the arguments. Without biases, the mode is mxfp4."""
    if biases is None:
        return native_extension().Weights.mxfp4(quanta, scales, bias)
    return native_extension().Weights.packed(quanta, scales, biases, bias, group_size=group_size, bits=bits)


def expert_arrival() -> Any | None:
    """What brings experts that a thread has read into the kernels' memory (native/src/arrive.h); None without them."""
    return native_extension().Arrival() if available() else None


def arrives(*, group_size: int, bits: int, mode: str) -> bool:
    """Whether an arrival knows such weights."""
    return mode == "mxfp4" or (mode == "affine" and bits in (4, 8))


def becomes(stored: mx.Dtype, wanted: mx.Dtype) -> bool:
    """Whether an arrival can bring numbers from one format to another."""
    import mlx.core as mx

    return stored == wanted or (stored in (mx.bfloat16, mx.float16, mx.float32) and wanted in (mx.float16, mx.float32))


def number_format(dtype: mx.Dtype | None) -> Any:
    """As an arrival knows it; None for plain bytes."""
    import mlx.core as mx

    numbers = native_extension().Numbers
    known = {mx.bfloat16: numbers.bfloat16, mx.float16: numbers.float16, mx.float32: numbers.float32}
    return numbers.bytes if dtype is None else known.get(dtype, numbers.bytes)


def block_weights(blocks: mx.array, bias: mx.array | None, bits: int) -> Any:
    """A matrix uint8 [rows, bytes of a row] in the blocks of GGUF's K format with so many bits; with one more axis, one
    for each expert. Its `arrays` (quanta, factors) replace the argument, in as many bytes."""
    return native_extension().Weights.blocks(blocks, bias, bits=bits)


def plain_weights(weight: mx.array, bias: mx.array | None) -> Any:
    """A matrix [rows, columns], or [experts, rows, columns]. bfloat16 and float16 stay as they are."""
    return native_extension().Weights.plain(weight, bias)


def gguf_file(path: str, size: int, changed_ns: int) -> Any:
    """A GGUF file to read tensors from; None without kernels. Raises RuntimeError unless it has that size and time of
    change."""
    native = native_extension()
    return None if native is None else native.GgufFile(path, size=size, changed_ns=changed_ns)


def file_bytes(pieces: Sequence[tuple[Any, int]], rows: int, row_bytes: int, head: int) -> mx.array:
    """Rows of pieces (file, offset), `rows` of each, as uint8, read lazily. Of each `head` rows, unless that is 0, even
    ones come first."""
    native = native_extension()
    return native.file_bytes(pieces, rows=rows, row_bytes=row_bytes, head=head)


def file_packed(
    pieces: Sequence[tuple[Any, int]], rows: int, row_bytes: int, head: int, bits: int, *, minima: bool
) -> list[mx.array]:
    """The same of blocks of 32 weights, as MLX packs them: quanta, scales and biases."""
    layout = {"rows": rows, "row_bytes": row_bytes, "head": head, "bits": bits, "minima": minima}
    return native_extension().file_packed(pieces, **layout)


def linear(x: mx.array, weights: Any) -> mx.array:
    """x [..., columns] times the transpose of weights [rows, columns], with their bias."""
    return native_extension().linear(x, weights)


def lookup_rows(ids: mx.array, weights: Any) -> mx.array:
    """The rows of packed weights by their ids."""
    return native_extension().lookup(ids, weights)


def gather_experts(x: mx.array, indices: mx.array, weights: Any) -> mx.array:
    """x [..., columns] times the weights of the experts `indices` [..., k]: [..., k, rows]."""
    return native_extension().gather(x, indices, weights)


def gather_gated_experts(x: mx.array, indices: mx.array, experts: Sequence[Any], gating: GateCurve) -> mx.array:
    """The MLPs of the experts `indices` [..., k], whose weights are `experts` (gate, up, down): [..., k, rows]."""
    return native_extension().gather_gated(x, indices, *experts, **gating._asdict())


def short_convolution(weight: mx.array, bias: mx.array | None, *, silu: bool = False, gated: bool = False) -> Any:
    """A causal convolution for each channel: weight [channels, taps, 1]. Only where `available`, like the next two.

    Called with x [..., channels], tails [slots, taps - 1, channels] and pieces, it returns y and the tails. A piece is
    (first token, tokens, slot, index of the first) of one sequence; one that starts at 0 has no state. Tails, and
    states below, are written in place: the arguments must not be used any more. With gates, x is the concatenation of
    b, c and x, and y = c * filtered(b * x).

    With `earlier=n` it also returns copies [n, pieces, ...] of each state, as it was without the last token of a piece,
    without the last two, and so on; zeros where a piece is shorter. Rejected draft tokens are rewound with these.

    `through(x, inputs, output, ...)` includes the layer's projections: `inputs` are the weights that make each of its
    inputs, a list of those behind one another, `output` those of its output.
    """
    return native_extension().Convolution(weight, bias, silu=silu, gated=gated)


def gated_delta_layer(*, columns: Mapping[str, tuple[int, int, int]], **parameters: Any) -> Any:
    """A gated delta layer between its projections.

    Called with q, k, v, z, b and a [..., width], some of which may be the same, tails, states [slots, value_heads,
    value_size, key_size] and pieces, it returns y [..., value_heads * value_size], tails and states, and earlier ones
    on request. `columns` say where "q", "k", "v", "z", "b" and "a" are in their rows: the first head's column, the
    stride to the next head with the same key, and to the next such group. `parameters` are key_heads, value_heads,
    key_size, value_size and eps, and the arrays filter, a_log, dt_bias and norm; where not the default,
    decays_by_key (each number of a key has a decay of its own, and a bias), bound (decays are exp(bound * sigmoid(
    exp(a_log) * (a + dt_bias)))), most_strength and sigmoid_gate.
    """
    return native_extension().GatedDelta(**columns, **parameters)


def mamba_scan(
    *,
    dt_limit: tuple[float, float],
    eps: float = 0.0,
    norm_size: int = 0,
    norm_first: bool = False,
    **parameters: Any,
) -> Any:
    """A Mamba 2 mixer between its projections.

    Called with x [..., width], the concatenation of gate, x, b, c and dt, tails, states [slots, heads, head_size,
    state_size] and pieces, it returns y [..., heads * head_size], tails and states, and earlier ones on request.
    `norm_size` neighbours of the output are normed together, before or after gating. `parameters` are heads, groups,
    head_size and state_size, and the arrays filter, filter_bias, a_log, dt_bias, skip and norm.
    """
    parameters |= {"eps": eps, "norm_size": norm_size, "norm_first": norm_first}
    return native_extension().Scan(dt_least=dt_limit[0], dt_most=dt_limit[1], **parameters)


class NativeLayerStack:
    """Llama-like layers in one operation over KV pages; only where `available`."""

    def __init__(self, angles: mx.array, *, head_size: int, **parameters: Any) -> None:
        """`angles` [rope_dims / 2] are the rotations of pairs from one position to the next. `parameters` are heads,
        kv_heads, scale, eps, rope_dims, rope_neighbours and rope_gain."""
        self._stack = native_extension().Stack(angles, head_dim=head_size, **parameters)
        self._size = 0

    def add(self, *, norms: Sequence[mx.array], matrices: Sequence[Any], head_norms: Sequence[mx.array | None]) -> None:
        """Add a layer: its two norms; q, k, v, o, gate, up and down; the norms of queries and keys, if any."""
        names = ("attention_norm", "mlp_norm", "q", "k", "v", "o", "gate", "up", "down", "q_norm", "k_norm")
        self._stack.add(**dict(zip(names, (*norms, *matrices, *head_norms), strict=True)))
        self._size += 1

    def __call__(
        self,
        x: mx.array,
        keys: Sequence[mx.array],
        values: Sequence[mx.array],
        spans: Any,
        coded: Sequence[tuple[mx.array, Any]] = (),
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        """x [..., hidden] through all layers, and each one's new keys and values [pages, heads, page, size].

        `spans` are from `attention_spans`. Keys and values are written in place: the arguments must not be used any
        more. `coded` are each layer's coded pages and their layout.
        """
        y, *states = self._stack(x, keys, values, spans, list(coded))
        return y, states[: self._size], states[self._size :]


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return native_extension().rms_norm(x, weight, eps)


def layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    return native_extension().layer_norm(x, weight, bias, eps)


def gated_activation(kind: str, gate: mx.array, up: mx.array | None = None) -> mx.array:
    """act(gate) * up, where act is silu, gelu, gelu_tanh or sigmoid; without `up` of the halves of gate's last axis."""
    native = native_extension()
    return native.gated(native.Gate[kind], gate, up)


def sample_tokens(logits: mx.array, draws: Sequence[tuple[float, int, float, float, float]]) -> mx.array:
    """A token for each row of logits [rows, vocab]; a draw is (temperature, top_k, top_p, min_p, number in [0, 1))."""
    return native_extension().draw(logits, draws)


def can_convolve() -> bool:
    """Whether `convolve_rows` and `snake_activation` can be used: they need a BLAS."""
    return available() and fastblas.single_threaded_sgemm() is not None


def convolve_rows(
    x: mx.array, weight: mx.array, bias: mx.array, *, dilation: int = 1, front: int = 0, count: int
) -> mx.array:
    """A convolution over time with `count` output rows: row r sees x[r + tap * dilation - front] by weight[tap], and
    zeros outside x [rows, inputs]; weight is [taps, inputs, outputs]. Only where `can_convolve`."""
    return native_extension().convolve(x, weight, bias, dilation, front, count)


def snake_activation(x: mx.array, scale: mx.array, shift: mx.array, alpha: mx.array) -> mx.array:
    """v + sin(alpha * v)^2 / alpha for v = x * scale + shift. Only where `can_convolve`."""
    return native_extension().snake(x, scale, shift, alpha)
