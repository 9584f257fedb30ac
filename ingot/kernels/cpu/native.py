"""The native kernels: `ingot_native`, the C++ extension for Linux CPUs. Without it everything works, slower.

Whether it is there and wanted (`available`), attention as one operation with what comes right before it, keys and
values in pages, matrices as the kernels hold them and products with them, recurrent layers, all layers of a model of
Llama's kind as one operation, norms and gates token by token, sampling, filters over time, and the codecs of keys and
values. Importing this imports neither mlx nor the extension; calling it does.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot.kernels.cpu import fastblas
from ingot.kernels.cpu.fastblas import missing_kernels_advice
from ingot.kernels.device import acting_as

INTERFACE = 5
"""Of `ingot_native`, as it numbers it; kernels of another one are left alone."""
ROTATED_SIZES = (16, 32, 64, 128, 256, 512)
"""Sizes of vectors that its codecs of kept keys and values rotate."""


@cache
def native_extension() -> Any:
    """The extension, with the fast BLAS made known to it, or None."""
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


def _unwanted() -> bool:
    """`mlx` leaves everything to mlx, `blas` all but its matrix product. GPUs have no use for kernels of CPUs."""
    return os.environ.get("INGOT_KERNELS") in ("mlx", "blas") or acting_as() is not None


def installed() -> bool:
    """Whether they are likely to be used here, told without importing them, and so mlx."""
    return sys.platform == "linux" and not _unwanted() and importlib.util.find_spec("ingot_native") is not None


def available() -> bool:
    return not _unwanted() and native_extension() is not None


def advice() -> str | None:
    """What would make this faster; None when there is nothing to do."""
    if available() or sys.platform != "linux" or _unwanted():
        return None
    if importlib.util.find_spec("ingot_native") is None:
        return f"no native kernels: {missing_kernels_advice()}"
    return f"the native kernels do not fit this mlx, or this ingot: {missing_kernels_advice()}"


def describe() -> str | None:
    """The instruction sets and the threads in use, such as "avx512vnni and amx, 2 threads"; None without them."""
    if not available():
        return None
    native = native_extension()
    sets = [name for name in (native.instruction_set(), native.wide()) if name]
    return f"{' and '.join(sets)}, {native.threads()} threads"


def use_one_path(one: bool = True) -> None:
    """Compute a row the same way however many there are, or else the fastest way for so many."""
    if (native := native_extension()) is not None:
        native.use_one_path(one)


def has_wide() -> bool:
    """Whether many rows at once are multiplied by instructions of their own, as bfloat16."""
    return available() and native_extension().wide() is not None


def has_narrow() -> bool:
    """Whether many queries at once attend in numbers of 16 bits."""
    return available() and bool(native_extension().narrow())


if TYPE_CHECKING:
    import mlx.core as mx

FEW_QUERIES = 47
"""Queries, times the heads that share keys, that attention still takes as it takes one (native/src/attend.cpp)."""
HeadNorm = tuple["mx.array", float, bool, bool]
"""(weight, eps, whether all heads of a token are normed as one, whether the mean is taken off) of queries or keys."""


def rope_rotation(angles: mx.array, *, dims: int, neighbours: bool, gain: float) -> Any:
    """Rotary positions: `angles` [dims / 2] are what pairs turn by from one position to the next.

    Attention of a model that turns alike should share one: it computes a launch's angles once.
    """
    return native_extension().Rotation(angles, dims=dims, neighbours=neighbours, gain=gain)


class NativeAttention:
    """Attention over live states in one operation, with what comes right before it; only where `available`."""

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
        """With `cap` a score s counts as cap * tanh(s / cap). `gated`: each head of a query brings a gate behind it."""
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
        """What queries [..., heads * size] attend to, and the states [pages, kv_heads, page, size] after it.

        `spans` are what `spans()` made. A token sees the `window` newest ones, itself among them, or all where it is 0.
        The states are written in place: what is given must not be used any more. `coded` are pages in fewer bits, where
        tables have some, and their form.
        """
        attended, keys, values = self._attention(q, k, v, keys, values, spans, window, coded)
        return attended, keys, values


def can_attend_segments() -> bool:
    """Whether `attend_segments` is there, and a BLAS for it."""
    return available() and fastblas.single_threaded_sgemm() is not None


def attend_segments(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """What queries [segments, rows, heads, size] find in the keys and values [segments, keys, heads, size] of their own
    segment, as float32. Few scores exist at a time. Only where `can_attend_segments`."""
    found: mx.array = native_extension().attend_segments(queries, keys, values, scale)
    return found


if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    Integers = array[int] | memoryview | np.ndarray[Any, np.dtype[np.int32]]
    """Of 32 bits."""

NativeSpan = tuple[int, int, int, int, int]
"""(first token of the launch, tokens, row of the tables, place of the first, its position) of one sequence."""
NativePageTable = tuple[int, "Integers"] | tuple[int, "Integers", "Integers"]
"""(how many pages at the front were forgotten, the pages after them) of one sequence; and pages in fewer bits, which
stand in place of those that were forgotten."""
PageChoiceLimits = tuple[int, int, int]
"""(full pages that tokens see, the newest of them, tokens of which one asks for the others)."""


def attention_spans(
    spans: Sequence[NativeSpan],
    tables: Sequence[NativePageTable],
    positions: Integers | None = None,
    choice: PageChoiceLimits | None = None,
) -> Any:
    """Which tokens of a launch belong to which sequence, and in which pages; for all layers that share tables.

    The token at a place lies in the page `pages[place // page - forgotten]`, at `place % page`; a page has 64, 128, 256
    or 512 tokens. Tables are copied. Rows may share pages that hold what they have in common; what a span writes, no
    other row sees. `positions`, one for each token of the launch, are what tokens are turned by instead of consecutive
    ones. With a `choice` the tokens of a single span see some of the pages before them, which each layer chooses by
    what they ask, as `cache.page_choice` says. Raises ValueError for spans that are out of order; the operations do for
    pages and places that there are not.
    """
    none = array("i")
    whole = [table if len(table) == 3 else (*table, none) for table in tables]
    return native_extension().Spans(spans, whole, positions, choice)


NativeCodedSide = tuple[int, int, int, int, Sequence[float], Sequence[float]]
"""(bits of a code, numbers that share a scale, where codes and scales begin, levels, signs) of a page's keys or values.
No bits: they are as they were computed; numbers that share none: they are rotated."""


def native_coded_layout(
    *, size: int, halves: bool, centre: int | None, head_bytes: int, keys: NativeCodedSide, values: NativeCodedSide
) -> Any:
    """How pages of 64 tokens lie in bytes [pages, kv_heads, 1, head_bytes], for attention that reads them as they are.

    `centre` is where what the keys of a page have in common begins. What is not coded is `halves`, or floats. Raises
    ValueError for what attention cannot read.
    """
    return native_extension().CodedForm(
        size=size, halves=halves, centre=centre, head_bytes=head_bytes, keys=keys, values=values
    )


def reserve_memory(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Zeros that take memory only where they are written; all of it is given back when the array dies.

    It is no part of what mlx counts as active memory.
    """
    reserved: mx.array = native_extension().reserve(shape, dtype)
    return reserved


def discard_pages(array: mx.array, pages: Sequence[int]) -> None:
    """Give back the memory of these rows of the first axis, where it is whole memory pages: they read as zeros then.

    Waits for the array; nothing that was not waited for may still read those rows.
    """
    native_extension().discard(array, pages)


def copy_tokens(arrays: Sequence[mx.array], copies: Sequence[tuple[int, int, int]]) -> list[mx.array]:
    """For each copy (source page, target page, tokens), in order: the target's first tokens become the source's.

    In place, in all arrays [pages, kv_heads, page, size] at once: what is given must not be used any more.
    """
    copied: list[mx.array] = native_extension().copy_tokens(arrays, copies)
    return copied


def write_tokens(array: mx.array, page: int, begin: int, tokens: mx.array) -> mx.array:
    """Tokens [kv_heads, count, size] into a page of the array, from its token `begin` on.

    In place: what is given must not be used any more.
    """
    written: mx.array = native_extension().write_tokens(array, page, begin, tokens)
    return written


if TYPE_CHECKING:
    import mlx.core as mx

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
MXFP4 = {"mode": "mxfp4", "bits": 4, "group_size": 32}


class GateCurve(NamedTuple):
    """gate * sigmoid(slope * gate) * (up + offset), with gate cut off above `limit`, up on both sides."""

    slope: float = 1.0
    limit: float = math.inf
    offset: float = 0.0


def covers_packing(*, bits: int, group_size: int, mode: str) -> bool:
    """Whether a packed layer of this form can be multiplied as it is."""
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
    """A packed matrix, put into the order that this machine's kernels want. Only where `covers_packing`.

    With an axis more, there is one for each of several experts. Its `arrays` (quanta, scales, biases) take the place of
    those given, which need not be kept. Without biases, the mode is mxfp4.
    """
    if biases is None:
        return native_extension().Weights.mxfp4(quanta, scales, bias)
    return native_extension().Weights.packed(quanta, scales, biases, bias, group_size=group_size, bits=bits)


def block_weights(blocks: mx.array, bias: mx.array | None, bits: int) -> Any:
    """A matrix uint8 [rows, bytes of a row] in the blocks of a GGUF file's K format with so many bits.

    With an axis more, there is one for each of several experts. Its `arrays` (quanta, factors) take the place of what
    was given, in as many bytes.
    """
    return native_extension().Weights.blocks(blocks, bias, bits=bits)


def plain_weights(weight: mx.array, bias: mx.array | None) -> Any:
    """A matrix [rows, columns], or [experts, rows, columns]. bfloat16 and float16 are kept as they are."""
    return native_extension().Weights.plain(weight, bias)


def gguf_file(path: str, size: int, changed_ns: int) -> Any:
    """A GGUF file to read tensors from; None without kernels. Raises RuntimeError unless it is of that size and was
    last changed then."""
    native = native_extension()
    return None if native is None else native.GgufFile(path, size=size, changed_ns=changed_ns)


def file_bytes(pieces: Sequence[tuple[Any, int]], rows: int, row_bytes: int, head: int) -> mx.array:
    """Rows of pieces (file, offset), so many of each, as they lie there: uint8, read when they are needed. Of each
    `head` rows, unless it is 0, those that are even come first."""
    made: mx.array = native_extension().file_bytes(pieces, rows=rows, row_bytes=row_bytes, head=head)
    return made


def file_packed(
    pieces: Sequence[tuple[Any, int]], rows: int, row_bytes: int, head: int, bits: int, *, minima: bool
) -> list[mx.array]:
    """The same of blocks of 32 weights, as MLX packs them: quanta, scales and biases."""
    native = native_extension()
    made: list[mx.array] = native.file_packed(
        pieces, rows=rows, row_bytes=row_bytes, head=head, bits=bits, minima=minima
    )
    return made


def linear(x: mx.array, weights: Any) -> mx.array:
    """x [..., columns] times the transpose of weights [rows, columns], with their bias."""
    product: mx.array = native_extension().linear(x, weights)
    return product


def lookup_rows(ids: mx.array, weights: Any) -> mx.array:
    """The rows of packed weights that `ids` name."""
    rows: mx.array = native_extension().lookup(ids, weights)
    return rows


def gather_experts(x: mx.array, indices: mx.array, weights: Any) -> mx.array:
    """x [..., columns] times the weights of the experts `indices` [..., k]: [..., k, rows]."""
    product: mx.array = native_extension().gather(x, indices, weights)
    return product


def gather_gated_experts(x: mx.array, indices: mx.array, experts: Sequence[Any], gating: GateCurve) -> mx.array:
    """The MLPs of the experts `indices` [..., k], whose weights are `experts` (gate, up, down): [..., k, rows]."""
    gate, up, down = experts
    slope, limit, offset = gating
    made: mx.array = native_extension().gather_gated(
        x, indices, gate, up, down, slope=slope, limit=limit, offset=offset
    )
    return made


if TYPE_CHECKING:
    import mlx.core as mx


def short_convolution(weight: mx.array, bias: mx.array | None, *, silu: bool = False, gated: bool = False) -> Any:
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
    return native_extension().Convolution(weight, bias, silu=silu, gated=gated)


def gated_delta_layer(
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
    return native_extension().GatedDelta(
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


def mamba_scan(
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
    return native_extension().Scan(
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


if TYPE_CHECKING:
    import mlx.core as mx


class NativeLayerStack:
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
        self._stack = native_extension().Stack(
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


if TYPE_CHECKING:
    import mlx.core as mx


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    normed: mx.array = native_extension().rms_norm(x, weight, eps)
    return normed


def layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    normed: mx.array = native_extension().layer_norm(x, weight, bias, eps)
    return normed


def gated_activation(kind: str, gate: mx.array, up: mx.array | None = None) -> mx.array:
    """act(gate) * up, where act is silu, gelu, gelu_tanh or sigmoid; without `up` of the halves of gate's last axis."""
    native = native_extension()
    product: mx.array = native.gated(native.Gate[kind], gate, up)
    return product


def sample_tokens(logits: mx.array, draws: Sequence[tuple[float, int, float, float, float]]) -> mx.array:
    """A token for each row of logits [rows, vocab]; a draw is (temperature, top_k, top_p, min_p, number in [0, 1))."""
    tokens: mx.array = native_extension().draw(logits, draws)
    return tokens


if TYPE_CHECKING:
    import mlx.core as mx


def can_convolve() -> bool:
    """Whether `convolve_rows` and `snake_activation` are there, and a BLAS for them."""
    return available() and fastblas.single_threaded_sgemm() is not None


def convolve_rows(
    x: mx.array, weight: mx.array, bias: mx.array, *, dilation: int = 1, front: int = 0, count: int
) -> mx.array:
    """`count` rows over time, each from its neighbours: row r sees x[r + tap * dilation - front] by weight[tap], and
    zeros where x [rows, inputs] has none; weight is [taps, inputs, outputs]. Only where `can_convolve`."""
    found: mx.array = native_extension().convolve(x, weight, bias, dilation, front, count)
    return found


def snake_activation(x: mx.array, scale: mx.array, shift: mx.array, alpha: mx.array) -> mx.array:
    """v + sin(alpha * v)^2 / alpha for v = x * scale + shift. Only where `can_convolve`."""
    found: mx.array = native_extension().snake(x, scale, shift, alpha)
    return found
