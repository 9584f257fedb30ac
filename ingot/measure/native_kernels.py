"""The native kernels of CPUs, at shapes that small models have. MLX's own are in float32, and products are by weights
that were dequantised: that is what a model is run with where the native ones are left out."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels import measured
from ingot.kernels.cpu import native
from ingot.kernels.recurrent.mixers import DeltaShape, Mamba2Shape, ShortConvShape
from ingot.kernels.recurrent.selfcheck import MixerShape, gate_columns, plain_gate
from ingot.measure.subjects import Pair, RecurrentInputs, Subject
from ingot.upstream import SwiGLU, SwitchGLU, import_upstream

OUTPUTS, COLUMNS = 2048, 1024
HEADS, KV_HEADS, SIZE, PAGE = 14, 2, 64, 512
EXPERTS, CHOSEN, HIDDEN, INNER = 8, 4, 512, 256
VOCAB = 49_152
ROUNDED, EXACT = 0.03, 2e-3
"""Largest differences allowed: where activations are rounded to 8 bits, and elsewhere, where KV has 16."""
DRAW = (0.7, 40, 0.9, 0.0, 0.5)
MIXERS: dict[str, MixerShape] = {
    "gated delta": DeltaShape(4, 8, 64, 64, 4),
    "Mamba 2": Mamba2Shape(16, 1, 64, 64, 4, 1024, biased=True),
    "short convolution": ShortConvShape(1024, 3),
}


def native_subjects() -> Iterator[Subject]:
    """None where there are no native kernels."""
    if not native.available():
        return
    part = measured.NATIVE_ATTENTION
    yield Subject("native attention, 1 token over 2,048", part, partial(_attention, 1, 2048))
    yield Subject("native attention, prompt of 256", part, partial(_attention, 256, 0))
    for name, bits, mode in (("4 bits", 4, "affine"), ("8 bits", 8, "affine"), ("mxfp4", 4, "mxfp4")):
        if native.covers_packing(bits=bits, group_size=_group(mode), mode=mode):
            part = measured.native_packed_part(bits, mode)
            for rows in (1, 8, 128):
                yield Subject(f"native product {name}, {rows} rows", part, partial(_packed, bits, mode, rows))
    for rows in (1, 8, 128):
        yield Subject(f"native product 16 bits, {rows} rows", measured.NATIVE_DENSE, partial(_dense, rows))
    for name, bits, mode in (("4 bits", 4, "affine"), ("8 bits", 8, "affine"), ("mxfp4", 4, "mxfp4")):
        if native.covers_packing(bits=bits, group_size=_group(mode), mode=mode):
            part = measured.native_experts_part(bits, mode)
            for tokens in (1, 64):
                yield Subject(f"native experts {name}, {tokens} tokens", part, partial(_experts, bits, mode, tokens))
    for name, shape in MIXERS.items():
        part = measured.native_recurrent_part(type(shape).__name__)
        for rows, tokens in ((8, 1), (1, 128)):
            yield Subject(f"native {name}, {rows} x {tokens} tokens", part, partial(_recurrent, shape, rows, tokens))
    yield Subject("native norm, 8 x 2,048", measured.NATIVE_NORMS, _norm)
    yield Subject("native gate of an MLP, 8 x 2,048", measured.NATIVE_GATES, _gate)
    yield Subject("native sampling, 8 rows", measured.SAMPLING, _sampling)


def _group(mode: str) -> int:
    return 32 if mode == "mxfp4" else 64


def _rows(*sizes: int, seed: int = 1) -> mx.array:
    x = mx.random.normal(sizes, key=mx.random.key(seed))
    mx.eval(x)
    return x


def _attention(tokens: int, depth: int) -> Pair:
    length = depth + tokens
    pages = -(-length // PAGE)
    operation = native.NativeAttention(
        **{"heads": HEADS, "kv_heads": KV_HEADS, "size": SIZE, "scale": SIZE**-0.5, "cap": None, "sinks": None},
        norms=(None, None),
        rotation=None,
        gated=False,
    )
    stored = [_rows(pages, KV_HEADS, PAGE, SIZE, seed=seed).astype(mx.float16) for seed in (1, 2)]
    q, k, v = (_rows(tokens, heads * SIZE, seed=3 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    spans = native.attention_spans([(0, tokens, 0, depth, depth)], [(0, array("i", range(pages)))])

    def heads_of(x: mx.array, count: int) -> mx.array:
        return x.reshape(tokens, count, SIZE).swapaxes(0, 1)[None]

    # As mlx-lm's cache has them, once this pass's are in it.
    seen = [part.swapaxes(0, 1).reshape(1, KV_HEADS, -1, SIZE)[:, :, :depth].astype(mx.float32) for part in stored]
    keys, values = (
        mx.concatenate([before, heads_of(own, KV_HEADS)], axis=2) for before, own in zip(seen, (k, v), strict=True)
    )
    mx.eval(stored, keys, values)

    def ours() -> mx.array:
        attended, stored[0], stored[1] = operation(q, k, v, stored[0], stored[1], spans)
        return attended

    def plain() -> mx.array:
        mask = "causal" if tokens > 1 else None
        attended = mx.fast.scaled_dot_product_attention(heads_of(q, HEADS), keys, values, scale=SIZE**-0.5, mask=mask)
        return attended[0].swapaxes(0, 1).reshape(tokens, -1)

    # On AMX, prompts attend in 16 bits.
    return Pair(ours, plain, bound=ROUNDED if tokens > 1 and native.has_wide() else EXACT)


def _quantized(bits: int, mode: str, *sizes: int, seed: int = 1) -> tuple[Any, mx.array]:
    """Weights as the native kernels take them, and dequantised."""
    options: dict[str, Any] = {"group_size": _group(mode), "bits": bits, "mode": mode}
    weight, scales, *others = mx.quantize(_rows(*sizes, seed=seed) * 0.02, **options)
    biases = others[0] if others else None
    plain = mx.dequantize(weight, scales, biases, **options).astype(mx.float32)
    mx.eval(plain)
    packed = native.packed_weights(weight, scales, biases, None, _group(mode), bits)
    return packed, plain


def _packed(bits: int, mode: str, rows: int) -> Pair:
    packed, plain = _quantized(bits, mode, OUTPUTS, COLUMNS)
    x = _rows(rows, COLUMNS, seed=2)
    return Pair(lambda: native.linear(x, packed), lambda: x @ plain.T, bound=ROUNDED)


def _dense(rows: int) -> Pair:
    weight, x = (_rows(OUTPUTS, COLUMNS) * 0.02).astype(mx.bfloat16), _rows(rows, COLUMNS, seed=2)
    weights, plain = native.plain_weights(weight, None), weight.astype(mx.float32)
    mx.eval(plain)
    return Pair(lambda: native.linear(x, weights), lambda: x @ plain.T, bound=ROUNDED)


def _experts(bits: int, mode: str, tokens: int) -> Pair:
    shapes = ((EXPERTS, INNER, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    both = [_quantized(bits, mode, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    module, x = SwitchGLU(HIDDEN, INNER, EXPERTS, SwiGLU()), _rows(tokens, HIDDEN, seed=5)
    for name, (_, plain) in zip(("gate_proj", "up_proj", "down_proj"), both, strict=True):
        module[name].weight = plain
    order = mx.argsort(_rows(tokens, EXPERTS, seed=6), axis=-1)
    chosen = mx.contiguous(order[:, :CHOSEN].astype(mx.uint32))
    mx.eval(chosen)
    curve, weights = native.GateCurve(), [packed for packed, _ in both]
    return Pair(
        lambda: native.gather_gated_experts(x, chosen, weights, curve), lambda: module(x, chosen), bound=2 * ROUNDED
    )


def _recurrent(shape: MixerShape, rows: int, tokens: int) -> Pair:
    given = RecurrentInputs(shape, rows, tokens, mx.float32)
    operation, inputs = _native_mixer(shape, given)
    pieces = [(row * tokens, tokens, row, 0) for row in range(rows)]
    parts = [*given.states]

    def ours() -> mx.array:
        y, *after = operation(*inputs, *parts, pieces, 0)
        parts[:] = after[: len(parts)]
        found: mx.array = y
        return found

    def plain() -> mx.array:
        read = given.theirs().reshape(rows * tokens, -1)
        if isinstance(shape, ShortConvShape):
            return read
        gates = given.joint[:, mx.array(gate_columns(shape.norm, read.shape[1]))]
        return plain_gate(shape.norm, read, gates, given.weights["norm"], EPS)

    return Pair(ours, plain, bound=ROUNDED)


EPS = 1e-6
"""Of norms."""


def _native_mixer(shape: MixerShape, given: RecurrentInputs) -> tuple[Callable[..., Any], list[mx.array]]:
    """The operation, and what it takes before states."""
    weights, joint = given.weights, given.joint
    if isinstance(shape, ShortConvShape):
        return native.short_convolution(weights["filter"], weights.get("filter_bias"), gated=True), [joint]
    own: dict[str, Any] = {name: weights[name] for name in ("filter", "a_log", "dt_bias", "norm")}
    if isinstance(shape, Mamba2Shape):
        operation = native.mamba_scan(
            heads=shape.heads,
            groups=shape.groups,
            head_size=shape.head_size,
            state_size=shape.state_size,
            dt_limit=(0.0, math.inf),
            eps=EPS,
            norm_size=shape.norm_size,
            norm_first=shape.norm_first,
            filter_bias=weights.get("filter_bias"),
            skip=weights["skip"],
            **own,
        )
        return operation, [joint]
    key, value, group = shape.key_size, shape.value_size, shape.in_group
    keys, values = shape.key_heads * key, shape.value_heads * value
    columns = {
        **{"q": (0, 0, key), "k": (keys, 0, key), "v": (2 * keys, value, group * value)},
        **{"z": (0, value, group * value), "b": (0, 1, group), "a": (0, 1, group)},
    }
    operation = native.gated_delta_layer(
        columns=columns,
        key_heads=shape.key_heads,
        value_heads=shape.value_heads,
        key_size=key,
        value_size=value,
        eps=EPS,
        **own,
    )
    ends = [2 * keys + values, 2 * keys + 2 * values, 2 * keys + 2 * values + shape.value_heads]
    qkv, *others = (mx.contiguous(part) for part in mx.split(joint, ends, axis=-1))
    return operation, [qkv, qkv, qkv, *others]


def _norm() -> Pair:
    x, weight = _rows(8, 2048), _rows(2048, seed=2)
    return Pair(lambda: native.rms_norm(x, weight, EPS), lambda: mx.fast.rms_norm(x, weight, EPS), bound=EXACT)


def _gate() -> Pair:
    gate, up = _rows(8, 2048), _rows(8, 2048, seed=2)

    def plain() -> mx.array:
        y: mx.array = nn.silu(gate) * up
        return y

    return Pair(lambda: native.gated_activation("silu", gate, up), plain, bound=EXACT)


def _sampling() -> Pair:
    """Whether tokens are right is not compared here, as random numbers are others."""
    logits = 2 * _rows(8, VOCAB)
    sampler = import_upstream("mlx_lm.sample_utils").make_sampler(temp=DRAW[0], top_p=DRAW[2], top_k=DRAW[1])
    return Pair(
        lambda: native.sample_tokens(logits, [DRAW] * 8),
        lambda: sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)),
        drawn=True,
    )
