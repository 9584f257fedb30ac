"""The kernels over pages are compared with plain MLX operations on the device at hand: attention, attention over coded
pages, and RoPE. One that differs is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.paged_attention.inputs import (
    MOST_QUERIES,
    PAGE_LIMIT,
    KernelRows,
    KVSlabs,
    page_copies,
    page_number,
    token_slots,
)
from ingot.kernels.paged_attention.kernels import PagedAttention, has_paged_kernels, paged_attention
from ingot.kernels.paged_attention.rope import HeadRmsNorm, RopeKernel, RopeShape, rope_angles, rope_kernel
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, AttentionTuning, CodedPages, CodedShape
from ingot.kernels.selfcheck import BOUNDS, Case, check_cases

_BEYOND_A_SPLIT = (1, 65)
"""Tokens beyond a KV split: so few that any window reaches over its end."""


def slab_counts(device: Device) -> tuple[int, ...]:
    """The numbers of slabs with which all kernels of a device run."""
    return TUNINGS[device.kind].slabs or (3,)


def check_paged_attention(
    device: Device,
    shape: AttentionShape,
    dtype: mx.Dtype,
    *,
    slabs: int = 2,
    tuning: AttentionTuning | None = None,
    **options: Any,
) -> str | None:
    """The first wrong kernel for such layers on this device, over so many slabs; None where all are right.
    `options` they attend is as `PagedAttention` takes it."""
    if not has_paged_kernels(device):
        return f"no kernels for {device.name}"
    kinds = frozenset((name, value is not None if name == "sinks" else value) for name, value in options.items())
    return check_cases(
        device,
        ("attention", shape, dtype, slabs, tuning, kinds),
        lambda: paged_attention(device, shape, dtype, tuning=tuning, **options),
        lambda attention: _AttentionTrial(attention, slabs).cases(options),
    )


class _AttentionTrial:
    """Rows of awkward lengths in randomly placed pages."""

    def __init__(self, attention: PagedAttention, slabs: int) -> None:
        shape = attention.shape
        self._attention, self._shape, self._dtype = attention, shape, attention.dtype
        self._random = np.random.default_rng(7)
        self._sizes = (shape.key_size, shape.value_size)
        self._lengths = [8, shape.page, shape.page + 9, *(attention.split + beyond for beyond in _BEYOND_A_SPLIT)]
        needed = [-(-length // shape.page) for length in self._lengths]
        each = (sum(needed) + 1) // slabs + 1
        free = [page_number(int(at) // each, int(at) % each) for at in self._random.permutation(each * slabs)]
        self._tables = [[free.pop() for _ in range(count)] for count in needed]
        self._spare = free.pop()
        blank = (each, shape.kv_heads, shape.page)
        slab_arrays = [[mx.zeros((*blank, size), self._dtype) for _ in range(slabs)] for size in self._sizes]
        mx.eval(slab_arrays)
        self._slabs = KVSlabs(*slab_arrays)
        self._token = mx.zeros(1, mx.int32)

    def cases(self, options: dict[str, Any]) -> Iterator[Case]:
        yield from self._writing()
        yield from self._copying()
        for width in self._attention.widths:
            # All rows at once, and those within one KV split, which are not merged.
            for rows in (len(self._lengths), len(self._lengths) - len(_BEYOND_A_SPLIT)):
                yield from self._attending(width, rows, options)

    def _writing(self) -> Iterator[Case]:
        slots = [
            (table[offset // self._shape.page], offset % self._shape.page)
            for table, length in zip(self._tables, self._lengths, strict=True)
            for offset in range(length)
        ]
        written = self._write(slots)
        mx.eval(self._token)
        for slabs, tokens in zip((self._slabs.keys, self._slabs.values), written, strict=True):
            expected = [np.zeros(slab.shape, np.float32) for slab in slabs]
            for numbers, (page, offset) in zip(np.array(tokens.astype(mx.float32)), slots, strict=True):
                expected[page // PAGE_LIMIT][page % PAGE_LIMIT, :, offset] = numbers
            for slab, numbers in zip(slabs, expected, strict=True):
                yield Case("write differs", slab, mx.array(numbers).astype(self._dtype))

    def _copying(self) -> Iterator[Case]:
        source, places = self._tables[-1][0], self._shape.page - 3
        self._token = self._attention.copy(page_copies([(source, self._spare, places)]), self._slabs, self._token)
        mx.eval(self._token)
        for slabs in (self._slabs.keys, self._slabs.values):
            copied = _page(slabs, self._spare)
            yield Case("copy differs", copied[:, :places], _page(slabs, source)[:, :places])
            yield Case("copy differs", copied[:, places:], mx.zeros_like(copied[:, places:]))

    def _attending(self, width: int, rows: int, options: dict[str, Any]) -> Iterator[Case]:
        """The first `rows` rows, of up to `width` queries each, after a write that is still pending."""
        shape, tables, lengths = self._shape, self._tables[:rows], self._lengths[:rows]
        counts = [min(width, lengths[0]), *[1, width] * rows][:rows]
        queries = self._random_array(sum(counts), shape.heads, shape.query_size)
        self._write([(table[-1], (length - 1) % shape.page) for table, length in zip(tables, lengths, strict=True)])
        kernel_rows = KernelRows.of(tables, lengths, counts=counts)
        outputs = self._attention.attend(queries, kernel_rows, self._slabs, self._token)
        yield from attended_cases(outputs, queries, counts, self._seen, options)

    def _seen(self, row: int) -> list[mx.array]:
        """Keys and values of a row."""
        keys, values = (
            mx.concatenate([_page(slabs, page) for page in self._tables[row]], axis=1)[:, : self._lengths[row]]
            for slabs in (self._slabs.keys, self._slabs.values)
        )
        return [mx.concatenate([keys, values], axis=-1), keys] if self._shape.latent else [keys, values]

    def _write(self, slots: list[tuple[int, int]]) -> list[mx.array]:
        """Returns the keys and values that are written."""
        keys, values = (self._random_array(len(slots), self._shape.kv_heads, size) for size in self._sizes)
        self._token = self._attention.write(keys, values, token_slots(slots), self._slabs, self._token)
        return [keys, values]

    def _random_array(self, *sizes: int) -> mx.array:
        return mx.array(self._random.standard_normal(sizes, np.float32)).astype(self._dtype)


def attended_cases(
    outputs: mx.array,
    queries: mx.array,
    counts: Sequence[int],
    seen: Callable[[int], Sequence[mx.array]],
    options: dict[str, Any],
    suffix: str = "",
) -> Iterator[Case]:
    """Row by row, of so many queries each, which see keys and values [kv_heads, tokens, size]."""
    mx.eval(outputs)
    begin = 0
    for row, count in enumerate(counts):
        mine, (keys, values) = slice(begin, begin + count), seen(row)
        begin += count
        message = f"attend differs by {{off}} for {count} queries over {keys.shape[1]} tokens{suffix}"
        expected = plain_attention(queries[mine], keys, values, **options)
        yield Case(message, outputs[mine], expected, BOUNDS[outputs.dtype])


def _page(slabs: Sequence[mx.array], page: int) -> mx.array:
    return slabs[page // PAGE_LIMIT][page % PAGE_LIMIT]


def plain_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    cap: float | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
) -> mx.array:
    """One row's attention by plain operations, in float32: queries [count, heads, size] are of the last tokens of keys
    and values [kv_heads, tokens, size]. Products are summed one by one, as matrix products of GPUs round their
    inputs."""
    count, heads, _ = queries.shape
    group, length = heads // keys.shape[0], keys.shape[1]
    q, k, v = (x.astype(mx.float32) for x in (queries, mx.repeat(keys, group, 0), mx.repeat(values, group, 0)))
    scores = mx.sum(q.transpose(1, 0, 2)[:, :, None] * k[:, None], axis=-1) * scale
    scores = scores if cap is None else cap * mx.tanh(scores / cap)
    limits, places = mx.arange(length - count + 1, length + 1)[:, None], mx.arange(length)
    seen = places < limits if window is None else (places < limits) & (places >= limits - window)
    scores = mx.where(seen, scores, -mx.inf)
    if sinks is not None:
        extra = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (heads, count, 1))
        scores = mx.concatenate([scores, extra], axis=-1)
    weights = mx.softmax(scores, axis=-1)[:, :, :length]
    return mx.sum(weights[..., None] * v[:, None], axis=2).transpose(1, 0, 2)


SAMPLED_PAGES = 10
"""Pages: one is read by itself, and the others reach over the end of a KV split."""
_RAW_TAIL = 50
"""Raw tokens behind them: more than a row has queries."""
_PROMPT_QUERIES = 3 * MOST_QUERIES


class CodedSample(NamedTuple):
    """Coded pages, and what they decode to."""

    shape: CodedShape
    pages: mx.array  # int32 [SAMPLED, kv_heads, words]
    keys: mx.array  # [SAMPLED, kv_heads, page, size]
    values: mx.array

    def suits(self, attention: PagedAttention) -> bool:
        """Whether such an attention could read these pages."""
        shape, (_, heads, _, size) = attention.shape, self.keys.shape
        sizes = (heads, size, self.values.shape[3], self.keys.dtype)
        return sizes == (shape.kv_heads, shape.key_size, shape.value_size, attention.dtype)


def check_coded(
    device: Device, attention: PagedAttention, sample: CodedSample, *, prompts: bool = False, **options: Any
) -> str | None:
    """The first wrong kernel of an attention that reads such pages, or decodes them for prompts; None where all are
    right."""
    widths = [_PROMPT_QUERIES] if prompts else attention.coded_widths(sample.shape)
    return check_cases(
        device,
        ("coded", sample.shape, attention.shape, attention.dtype, attention.tuning, *widths, *options.items()),
        lambda: attention,
        lambda attention: _CodedTrial(attention, sample).cases(widths, options),
    )


class _CodedTrial:
    """Two rows of coded pages with raw ones behind them: one within a KV split, one beyond it."""

    def __init__(self, attention: PagedAttention, sample: CodedSample) -> None:
        self._attention, self._sample, self._shape = attention, sample, attention.shape
        self._random = np.random.default_rng(7)
        places = self._random.permutation(SAMPLED_PAGES)
        each = -(-SAMPLED_PAGES // 2)
        self._numbers = [page_number(int(place) // each, int(place) % each) for place in places]
        self._coded = [mx.zeros((each, *sample.pages.shape[1:]), mx.int32) for _ in range(2)]
        self._expected = mx.zeros((2 * each, *sample.pages.shape[1:]), mx.int32)
        self._expected[mx.array(places.astype(np.int32))] = sample.pages
        shape = self._shape
        self._raw = [
            self._random_array(2, shape.kv_heads, shape.page, size) for size in (shape.key_size, shape.value_size)
        ]
        self._slabs = KVSlabs([self._raw[0]], [self._raw[1]])
        mx.eval(self._coded, self._raw, self._expected)
        addresses = attention.locate(self._coded)
        self._token = attention.store(sample.pages, mx.array(self._numbers, mx.int32), addresses, mx.zeros(1, mx.int32))
        self._pages = CodedPages(sample.shape, sample.shape.constants(shape.value_size), addresses)
        self._rows = (range(1), range(1, SAMPLED_PAGES))  # of the sample, what each row has

    def cases(self, widths: Sequence[int], options: dict[str, Any]) -> Iterator[Case]:
        mx.eval(self._token)
        yield Case("store differs", mx.concatenate(self._coded), self._expected)
        tables = [[*(~self._numbers[page] for page in own), raw] for raw, own in enumerate(self._rows)]
        lengths = [len(own) * self._shape.page + _RAW_TAIL for own in self._rows]
        for width in widths:
            for rows in (1, 2):
                queries = self._random_array(rows * width, self._shape.heads, self._shape.key_size)
                kernel_rows = KernelRows.of(tables[:rows], lengths[:rows], counts=[width] * rows, coded=True)
                outputs = self._attention.attend(queries, kernel_rows, self._slabs, self._token, self._pages)
                yield from attended_cases(outputs, queries, [width] * rows, self._seen, options, " in coded pages")

    def _seen(self, row: int) -> list[mx.array]:
        """A row's decoded keys and values, and those behind them: [kv_heads, tokens, size]."""
        return [
            mx.concatenate([*(decoded[page] for page in self._rows[row]), raw[row, :, :_RAW_TAIL]], axis=1)
            for decoded, raw in zip((self._sample.keys, self._sample.values), self._raw, strict=True)
        ]

    def _random_array(self, *sizes: int) -> mx.array:
        return mx.array(self._random.standard_normal(sizes, np.float32)).astype(self._attention.dtype)


TRIAL_TOKENS, TRIAL_PAGES = 11, 3


def check_rope(
    device: Device, shape: RopeShape, dtype: mx.Dtype, norms: Sequence[HeadRmsNorm], slabs: int
) -> str | None:
    """How the kernel for such layers over so many slabs is wrong; None where it is right."""
    if not has_paged_kernels(device):
        return f"no kernels for {device.name}"
    return check_cases(
        device,
        ("rope", shape, dtype, slabs),
        lambda: rope_kernel(device, shape, dtype, norms),
        lambda turn: _cases(turn, shape, dtype, norms, slabs),
    )


def _cases(
    kernel: RopeKernel, shape: RopeShape, dtype: mx.Dtype, norms: Sequence[HeadRmsNorm], slabs: int
) -> Iterator[Case]:
    heads, random = shape.heads, np.random.default_rng(5)
    sizes = (heads.key_size, heads.value_size)
    slab_arrays = [
        [mx.zeros((TRIAL_PAGES, heads.kv_heads, heads.page, size), dtype) for _ in range(slabs)] for size in sizes
    ]
    targets = [(number % slabs, number % TRIAL_PAGES, (7 * number) % heads.page) for number in range(1, TRIAL_TOKENS)]
    slots = token_slots([*((page_number(slab, page), offset) for slab, page, offset in targets), (-1, 0)])
    row = heads.heads * shape.query_step + heads.kv_heads * sum(sizes)
    projected = mx.array(random.standard_normal((TRIAL_TOKENS, row), np.float32)).astype(dtype)
    positions, speeds = mx.arange(TRIAL_TOKENS) * 97, 10000.0 ** (-mx.arange(shape.dims // 2) / max(1, shape.dims // 2))
    angles = rope_angles(positions, speeds, 1.25)
    mx.eval(slab_arrays)
    queries_out, done = kernel(projected, angles, slots, KVSlabs(*slab_arrays), mx.zeros(1, mx.int32))
    mx.eval(queries_out, done)
    written = [mx.stack([own[slab][page, :, offset] for slab, page, offset in targets]) for own in slab_arrays]
    queries, *expected = plain_rope(shape, projected, angles, norms)
    yield Case("turn differs by {off} in queries", queries_out, queries, BOUNDS[dtype])
    for name, found, all_tokens in zip(("keys", "values"), written, expected, strict=True):
        yield Case(f"turn differs by {{off}} in {name}", found, all_tokens[: TRIAL_TOKENS - 1], BOUNDS[dtype])


def plain_rope(
    shape: RopeShape, projected: mx.array, angles: mx.array, norms: Sequence[HeadRmsNorm]
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values [tokens, heads, size] by plain operations, in float32."""
    heads, tokens = shape.heads, projected.shape[0]
    ends = [heads.heads * shape.query_step, heads.heads * shape.query_step + heads.kv_heads * heads.key_size]
    queries, keys, values = mx.split(projected.astype(mx.float32), ends, axis=-1)
    queries = queries.reshape(tokens, heads.heads, -1)[:, :, : heads.key_size]
    keys, values = (part.reshape(tokens, heads.kv_heads, -1) for part in (keys, values))
    if norms:
        queries, keys = (_plain_norm(part, *norm) for part, norm in zip((queries, keys), norms, strict=True))
    if shape.dims:
        queries, keys = (_plain_rotation(part, shape, angles) for part in (queries, keys))
    return queries, keys, values


def _plain_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    normed = x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight.astype(mx.float32)


def _plain_rotation(x: mx.array, shape: RopeShape, angles: mx.array) -> mx.array:
    cosine, sine = mx.split(angles[:, None], 2, axis=-1)
    inner, rest = x[..., : shape.dims], x[..., shape.dims :]
    one, two = (inner[..., 0::2], inner[..., 1::2]) if shape.neighbours else mx.split(inner, 2, axis=-1)
    pair = [one * cosine - two * sine, one * sine + two * cosine]
    turned = mx.stack(pair, axis=-1).reshape(inner.shape) if shape.neighbours else mx.concatenate(pair, axis=-1)
    return mx.concatenate([turned, rest], axis=-1)
