"""The kernels of GPUs: all families that the current device uses, at shapes that models have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels import measured
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.decode_graph.kernels import JointNorm, NormWeights, ResidualNorm, gate_states
from ingot.kernels.dense_matmul.kernels import DenseWeights, check_dense_product, dense_product
from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.launcher import kernel_launcher, required_launcher
from ingot.kernels.lora import LoraMatrices, add_lora_products
from ingot.kernels.moe.kernels import ExpertRouter, RouterShape, check_moe_kernels, combine_experts, plain_scores
from ingot.kernels.packed_matmul.kernels import MXFP4, PackedFormat, PackedWeights, packed_product
from ingot.kernels.packed_matmul.selfcheck import check_packed_product
from ingot.kernels.paged_attention.inputs import MOST_QUERIES, token_slots
from ingot.kernels.paged_attention.rope import HeadRmsNorm, RopeShape, rope_angles, rope_kernel
from ingot.kernels.paged_attention.selfcheck import check_rope, slab_counts
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.kernels.recurrent.mixers import DeltaShape, Mamba2Shape, ShortConvShape
from ingot.kernels.recurrent.selfcheck import MixerShape, check_recurrent_kernels
from ingot.kernels.sampling import check_sampling, sample_tokens
from ingot.kernels.selfcheck import BOUNDS, first_wrong
from ingot.measure.subjects import (
    Mixture,
    MixtureTrial,
    PagedTrial,
    Pair,
    RecurrentTrial,
    Subject,
    WrongKernel,
    drawn_parts,
)
from ingot.upstream import import_upstream

DTYPE = mx.bfloat16
NO_KERNEL = "no kernel here: MLX's own are used"
DRAW = (0.7, 40, 0.9, 0.0, 0.5)
"""Temperature, top-k, top-p, min-p, and a number in [0, 1)."""


class Sizes(NamedTuple):
    """How large inputs are: tiny where kernels are emulated, whose times say nothing."""

    heads: dict[str, AttentionShape]
    lengths: tuple[tuple[int, ...], ...]  # of the rows that attend
    prompt: tuple[int, int]  # queries of a row, and its length
    matrix: int
    experts: tuple[int, int, int, int]  # how many, chosen, hidden, inner
    tokens: int  # of a prompt
    mixers: dict[str, MixerShape]
    vocab: int


REAL = Sizes(
    {
        "64": AttentionShape(32, 8, 64, 64),
        "128": AttentionShape(32, 8, 128, 128),
        "256": AttentionShape(16, 4, 256, 256),
        "512": AttentionShape(16, 2, 512, 512),
        "latent 576": AttentionShape(16, 1, 512, 64, latent=True),
    },
    ((4096,), (2048,) * 8),
    (512, 2048),
    4096,
    (64, 8, 2048, 768),
    512,
    {
        "gated delta": DeltaShape(16, 32, 128, 128, 4),
        "Mamba 2": Mamba2Shape(128, 8, 80, 128, 4, 1280, biased=True),
        "short convolution": ShortConvShape(2048, 3),
    },
    128_256,
)
TINY = Sizes(
    {
        **{str(size): AttentionShape(2, 1, size, size) for size in (64, 128, 256, 512)},
        "latent 576": AttentionShape(2, 1, 512, 64, latent=True),
    },
    ((40,), (40, 70)),
    (2 * MOST_QUERIES, 100),
    128,
    (4, 2, 128, 64),
    20,
    {
        "gated delta": DeltaShape(1, 2, 32, 32, 4),
        "Mamba 2": Mamba2Shape(2, 1, 16, 32, 4, 32, biased=True),
        "short convolution": ShortConvShape(40, 3),
    },
    500,
)


def gpu_subjects(device: Device) -> Iterator[Subject]:
    """None where the device has no kernels. The ones that people need most come first, and those last that MLX takes
    longest to compile its own for."""
    run = kernel_launcher(device)
    if run is None:
        return
    sizes = TINY if isinstance(run, Emulator) else REAL
    kernels = CheckedKernels(device)
    yield from _attention(kernels, device, sizes)
    yield from _rope(device, sizes)
    yield from _recurrent(device, sizes)
    if device.kind == "cuda":
        yield from _dense(device, sizes)
        yield from _routing(device, sizes)
        yield from _graph_parts(device, sizes)
        yield _sampling(device, sizes)
        yield from _packed(device, sizes)
        yield from _experts(kernels, device, sizes)


def _rows(count: int, size: int, dtype: mx.Dtype = DTYPE, seed: int = 1) -> mx.array:
    x = mx.random.normal((count, size), key=mx.random.key(seed)).astype(dtype)
    mx.eval(x)
    return x


def _attention(kernels: CheckedKernels, device: Device, sizes: Sizes) -> Iterator[Subject]:
    def trial_of(shape: AttentionShape, lengths: Sequence[int]) -> PagedTrial:
        scale = shape.query_size**-0.5
        found = kernels.attention(shape, DTYPE, scale=scale)
        if found is None:
            raise WrongKernel(first_wrong(kernels.wrong.values()) or NO_KERNEL)
        trial = PagedTrial(device, shape, list(lengths))
        trial.attention = found
        return trial

    def decode(shape: AttentionShape, lengths: Sequence[int]) -> Pair:
        trial = trial_of(shape, lengths)
        return Pair(trial.paged, trial.gathered)

    def prompt(shape: AttentionShape) -> Pair | str:
        width, length = sizes.prompt
        trial = trial_of(shape, [length])
        if not trial.attention.takes_prompts:
            return NO_KERNEL
        trial.ask(width)
        return Pair(trial.paged, trial.gathered)

    for name, shape in sizes.heads.items():
        part = measured.attention_part(shape.key_size, latent=shape.latent)
        for lengths in sizes.lengths:
            label = f"attention {name}, {len(lengths)} x {max(lengths):,}"
            yield Subject(label, part, partial(decode, shape, lengths))
    for name, shape in sizes.heads.items():
        part = measured.prompt_attention_part(shape.key_size, latent=shape.latent)
        yield Subject(f"attention {name}, prompt of {sizes.prompt[0]:,}", part, partial(prompt, shape))


def _require_right(wrong: str | None) -> None:
    if wrong is not None:
        raise WrongKernel(wrong)


def _rope(device: Device, sizes: Sizes) -> Iterator[Subject]:
    def make(tokens: int) -> Pair:
        heads = sizes.heads["128"]
        shape = RopeShape(heads, dims=heads.key_size, normed=True)
        norms: list[HeadRmsNorm] = [(mx.ones(heads.key_size, DTYPE), 1e-6)] * 2
        _require_right(first_wrong(check_rope(device, shape, DTYPE, norms, slabs) for slabs in slab_counts(device)))
        trial, kernel = PagedTrial(device, heads, [tokens] * 2), rope_kernel(device, shape, DTYPE, norms)
        projected, positions = _rows(tokens, shape.row), mx.arange(tokens)
        angles = rope_angles(positions, 10000.0 ** (-mx.arange(heads.key_size // 2) / (heads.key_size // 2)))
        slots = token_slots([(trial.tables[0][number // heads.page], number % heads.page) for number in range(tokens)])
        mx.eval(angles, slots)

        def plain() -> Sequence[mx.array]:
            """MLX's norms and RoPE, and the kernel that only writes."""
            ends = [heads.heads * heads.key_size, (heads.heads + heads.kv_heads) * heads.key_size]
            parts = [part.reshape(tokens, -1, heads.key_size) for part in mx.split(projected, ends, axis=-1)]
            turned = [
                mx.fast.rope(
                    mx.fast.rms_norm(part, norms[0][0], 1e-6).swapaxes(0, 1)[None],
                    *(heads.key_size,),
                    traditional=False,
                    base=10000.0,
                    scale=1.0,
                    offset=0,
                )[0].swapaxes(0, 1)
                for part in parts[:2]
            ]
            written = trial.attention.write(turned[1], parts[2], slots, trial.slabs, trial.after)
            return turned[0], written

        return Pair(lambda: kernel(projected, angles, slots, trial.slabs, trial.after), plain)

    for tokens in (8, sizes.tokens):
        yield Subject(f"norms, RoPE and append, {tokens} tokens", measured.ROPE, partial(make, tokens))


def _recurrent(device: Device, sizes: Sizes) -> Iterator[Subject]:
    def make(shape: MixerShape, rows: int, tokens: int) -> Pair:
        _require_right(shape.unsupported() or check_recurrent_kernels(device, shape, DTYPE))
        trial = RecurrentTrial(device, shape, rows, tokens)
        return Pair(trial.ours, trial.theirs)

    for name, shape in sizes.mixers.items():
        for rows, tokens in ((8, 1), (1, sizes.tokens)):
            label = f"{name}, {rows} x {tokens} tokens"
            yield Subject(label, measured.recurrent_part(shape), partial(make, shape, rows, tokens))


def _dense(device: Device, sizes: Sizes) -> Iterator[Subject]:
    def make(rows: int) -> Pair:
        weights = DenseWeights(_rows(sizes.matrix, sizes.matrix) * 0.02, None)
        _require_right(check_dense_product(device, weights))
        product, x = dense_product(device), _rows(rows, sizes.matrix)
        return Pair(lambda: product(x, weights.weight), lambda: x @ weights.weight.T)

    for rows in (1, 8):
        yield Subject(f"dense product 16 bits, {rows} rows", measured.DENSE, partial(make, rows))


PACKINGS = {"4 bits": PackedFormat(4, 64), "8 bits": PackedFormat(8, 64), "mxfp4": MXFP4}


def _packed(device: Device, sizes: Sizes) -> Iterator[Subject]:
    def weights_of(packing: PackedFormat, experts: int | None) -> PackedWeights:
        lines = (sizes.matrix,) if experts is None else (experts, sizes.matrix)
        weights = PackedWeights.of(packing, *drawn_parts(packing, lines, sizes.matrix), dtype=DTYPE)
        _require_right(weights.unsupported() or check_packed_product(device, weights))
        return weights

    def make(packing: PackedFormat, rows: int) -> Pair:
        weights = weights_of(packing, None)
        product, x = packed_product(device, packing, DTYPE), _rows(rows, sizes.matrix)
        return Pair(lambda: product(x, weights), lambda: weights.by_mlx(x))

    def by_experts(packing: PackedFormat) -> Pair:
        weights = weights_of(packing, 8)
        product, x = packed_product(device, packing, DTYPE), _rows(4, sizes.matrix)
        chosen = mx.array([[0, 5], [3, 5], [7, 1], [2, 6]], mx.int32)
        words = weights.weight.view(mx.uint32)
        options: dict[str, Any] = {"group_size": packing.group, "bits": packing.bits, "mode": packing.mode}
        return Pair(
            lambda: product.gather(x, weights, chosen.reshape(-1)),
            lambda: mx.gather_qmm(
                x[:, None, None], words, weights.scales, weights.biases, rhs_indices=chosen, transpose=True, **options
            ),
        )

    for rows in (1, 8):
        for name, packing in PACKINGS.items():
            label = f"packed product {name}, {rows} rows"
            yield Subject(label, measured.packed_part(packing.bits, packing.mode), partial(make, packing, rows))
    for name, packing in PACKINGS.items():
        label = f"packed product {name} by experts, 4 x 2"
        yield Subject(label, measured.packed_experts_part(packing.bits, packing.mode), partial(by_experts, packing))


def _experts(kernels: CheckedKernels, device: Device, sizes: Sizes) -> Iterator[Subject]:
    def make(mixture: Mixture) -> Pair:
        trial = MixtureTrial(mixture, sizes.tokens)
        module = trial.theirs()

        def plainly(gate: mx.array, up: mx.array) -> mx.array:
            y: mx.array = module.activation(up, gate)
            return y

        activation: Any = "swiglu_oai" if mixture.clipped else "silu"
        grouped = kernels.experts.of((trial.gate, trial.up, trial.down), DTYPE, activation, plainly)
        if grouped is None:
            raise WrongKernel(first_wrong(kernels.experts.wrong.values()) or NO_KERNEL)
        chosen = trial.chosen
        return Pair(lambda: grouped(trial.x, chosen), lambda: module(trial.x, chosen))

    count, chosen, hidden, inner = sizes.experts
    for name, packing in PACKINGS.items():
        mixture = Mixture(packing, count, chosen, hidden, inner, packing.mode == "mxfp4")
        label = f"experts {name}, prompt of {sizes.tokens}"
        yield Subject(label, measured.experts_part(packing.bits, packing.mode), partial(make, mixture))


def _routing(device: Device, sizes: Sizes) -> Iterator[Subject]:
    experts, top, hidden, _ = sizes.experts
    shape, tokens = RouterShape(experts, top, shares="sum"), 8

    def route() -> Pair:
        _require_right(check_moe_kernels(device, shape, DTYPE, biased=False))
        router = ExpertRouter(required_launcher(device), shape)
        logits, slots = _rows(tokens, experts), mx.zeros((tokens, 2), mx.int32)

        def plain() -> mx.array:
            scores, _ = plain_scores(shape, logits, None)
            chosen = mx.argpartition(-scores, kth=top - 1, axis=-1)[:, :top]
            weights = mx.take_along_axis(scores, chosen, axis=-1)
            return mx.sort((weights / weights.sum(axis=-1, keepdims=True)), axis=-1)

        return Pair(lambda: mx.sort(router(logits, slots)[1].reshape(tokens, -1), axis=-1), plain)

    def combine() -> Pair:
        given, weights = _rows(tokens * top, hidden), mx.softmax(_rows(tokens, top, mx.float32), axis=-1).reshape(-1)
        chosen, run = mx.zeros(tokens * top, mx.int32), required_launcher(device)
        return Pair(
            lambda: combine_experts(run, given, chosen, weights, top),
            lambda: (given.reshape(tokens, top, -1) * weights.reshape(tokens, top, 1).astype(DTYPE)).sum(axis=1),
            bound=2 * BOUNDS[DTYPE],
        )

    yield Subject(f"choice of {top} of {experts} experts, {tokens} tokens", measured.ROUTER, route)
    yield Subject(f"sum of {top} experts, {tokens} tokens", None, combine)


def _graph_parts(device: Device, sizes: Sizes) -> Iterator[Subject]:
    """They only run in decode graphs, and are left out with these."""
    run, tokens, size = required_launcher(device), 8, sizes.matrix

    def residual() -> Pair:
        norm = ResidualNorm(NormWeights(mx.ones(size, DTYPE), 1e-6))
        states, added, weight = _rows(tokens, size), _rows(tokens, size, seed=2), mx.ones(size, DTYPE)
        return Pair(
            lambda: norm(run, states, added)[1],
            lambda: mx.fast.rms_norm(states + added, weight, 1e-6),
            bound=4 * BOUNDS[DTYPE],
        )

    def joint() -> Pair:
        keys = size // 4
        queries_norm, keys_norm = (NormWeights(mx.ones(each, DTYPE), 1e-6) for each in (size, keys))
        norm, x = JointNorm(queries_norm, keys_norm), _rows(tokens, size + 2 * keys)

        def plain() -> mx.array:
            parts = mx.split(x, [size, size + keys], axis=-1)
            weights = (queries_norm.weight, keys_norm.weight)
            normed = [mx.fast.rms_norm(part, own, 1e-6) for part, own in zip(parts[:2], weights, strict=True)]
            return mx.concatenate([*normed, parts[2]], axis=-1)

        return Pair(lambda: norm(run, x), plain, bound=4 * BOUNDS[DTYPE])

    def gate() -> Pair:
        both = _rows(tokens, 2 * size)

        @partial(mx.compile, shapeless=True)
        def plain(one: mx.array, other: mx.array) -> mx.array:
            y: mx.array = nn.silu(one) * other
            return y

        return Pair(lambda: gate_states(run, both), lambda: plain(*mx.split(both, 2, axis=-1)), bound=4 * BOUNDS[DTYPE])

    def lora() -> Pair:
        into, out = (mx.random.normal(shape).astype(DTYPE) * 0.05 for shape in ((3, 16, size), (3, size, 16)))
        matrices, x, product = LoraMatrices(into, out, (size,)), _rows(tokens, size), _rows(tokens, size, seed=3)
        places = mx.array([1, 2] * (tokens // 2), mx.int32)
        mx.eval(into, out, places)

        def plain() -> mx.array:
            inner = x[:, None] @ into[places].swapaxes(1, 2)
            return product + (inner @ out[places].swapaxes(1, 2))[:, 0]

        return Pair(lambda: add_lora_products(run, x, product, matrices, places), plain, bound=4 * BOUNDS[DTYPE])

    for name, make in {
        "sum and norm": residual,
        "joint norm of heads": joint,
        "gate of an MLP": gate,
        "LoRA of rank 16": lora,
    }.items():
        yield Subject(f"{name}, {tokens} tokens", None, make)


def _sampling(device: Device, sizes: Sizes) -> Subject:
    def make() -> Pair | str:
        run = required_launcher(device)
        if isinstance(run, Emulator):
            return "an emulated GPU samples by plain operations"
        _require_right(check_sampling(partial(sample_tokens, run)))
        logits = 2 * _rows(8, sizes.vocab, mx.float32)
        sampler = import_upstream("mlx_lm.sample_utils").make_sampler(temp=DRAW[0], top_p=DRAW[2], top_k=DRAW[1])
        return Pair(
            lambda: sample_tokens(run, logits, [DRAW] * 8),
            lambda: sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)),
            drawn=True,
        )

    return Subject("sampling, 8 rows", measured.SAMPLING, make)
