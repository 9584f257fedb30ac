"""Norms, rotary positions and the write to pages as one kernel, as a GPU would run it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from ingot.kernels.paged_attention import rope as module
from ingot.kernels.paged_attention.inputs import PAGE_LIMIT, KVSlabs, page_number, token_slots
from ingot.kernels.paged_attention.rope import HeadRmsNorm, LatentRopeShape, RopeKernel, RopeShape, rope_angles
from ingot.kernels.paged_attention.selfcheck import check_latent_rope, check_rope, plain_rope
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape
from tests.engines import GPU
from tests.kernels.paged_attention.memory import START, emulated

pytestmark = emulated
SHAPES = [
    RopeShape(AttentionShape(4, 2, 64, 64), dims=64),
    RopeShape(AttentionShape(4, 1, 128, 48), dims=128, neighbours=True),
    RopeShape(AttentionShape(3, 3, 80, 96), dims=32),
    RopeShape(AttentionShape(6, 2, 256, 256), dims=64, normed=True, gated=True),
    RopeShape(AttentionShape(2, 1, 16, 16), dims=10, neighbours=True, normed=True),
    RopeShape(AttentionShape(5, 1, 96, 32)),
    RopeShape(AttentionShape(2, 2, 32, 32), normed=True),
    RopeShape(AttentionShape(3, 1, 512, 512), dims=512, normed=True, values_normed=True, keys_as_values=True),
    RopeShape(AttentionShape(2, 1, 32, 48), dims=16, values_normed=True),
    RopeShape(AttentionShape(4, 2, 320, 320), dims=64, normed=True, queries_only=True),
]


def norms_of(shape: RopeShape) -> list[HeadRmsNorm]:
    own: list[HeadRmsNorm] = [(mx.random.normal((shape.heads.key_size,)), 1e-6), (None, 0.25)] if shape.normed else []
    return [*own, (None, 0.125)] if shape.values_normed else own


def projected(shape: RopeShape, tokens: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((tokens, shape.row)).astype(dtype)


def slabs_of(shape: RopeShape, dtype: mx.Dtype, count: int) -> KVSlabs:
    heads = shape.heads
    return KVSlabs(
        *(
            [mx.full((2, heads.kv_heads, 64, size), mx.nan, dtype) for _ in range(count)]
            for size in (heads.key_size, heads.value_size)
        )
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["cuda", "metal"])
def test_queries_keys_and_values_are_what_plain_operations_give(shape: RopeShape, kind: str) -> None:
    norms, given, slabs = norms_of(shape), projected(shape, 9, mx.float32), slabs_of(shape, mx.float32, 3)
    angles = rope_angles(mx.arange(9) * 1000 + 7, 1.0 / (100.0 ** mx.linspace(0, 1, shape.dims // 2)), 0.7)
    places = [(number % 3, number % 2, number * 7) for number in range(9)]
    slots = [(page_number(slab, page) if number != 4 else -1, at) for number, (slab, page, at) in enumerate(places)]
    run = RopeKernel(Emulator(3), TUNINGS[kind], shape, mx.float32, norms)  # type: ignore[index]
    turned, done = run(given, angles, token_slots(slots), slabs, START + 4)
    queries, *expected = plain_rope(shape, given, angles, norms)
    assert done.item() == 5
    assert np.allclose(np.array(turned), np.array(queries), atol=2e-6, rtol=1e-5)
    if shape.queries_only:
        assert all(mx.isnan(slab).all().item() for slab in (*slabs.keys, *slabs.values)), "nothing is written"
        return
    for kept, wanted in zip((slabs.keys, slabs.values), expected, strict=True):
        for number, (page, at) in enumerate(slots):
            if page >= 0:
                found = kept[page // PAGE_LIMIT][page % PAGE_LIMIT, :, at]
                assert np.allclose(np.array(found), np.array(wanted[number]), atol=2e-6, rtol=1e-5)
        assert sum(int(mx.sum(~mx.isnan(slab)).item()) for slab in kept) == 8 * wanted[0].size, "and nothing else"


@given(st.integers(1, 6), st.integers(0, 5), st.sampled_from(SHAPES), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_a_tokens_bits_do_not_depend_on_who_is_beside_it(tokens: int, at: int, shape: RopeShape, seed: int) -> None:
    at, norms, given = at % tokens, norms_of(shape), projected(shape, tokens, mx.bfloat16)
    angles = rope_angles(mx.arange(tokens) + 3, mx.ones(shape.dims // 2))
    run = RopeKernel(Emulator(seed), TUNINGS["cuda"], shape, mx.bfloat16, norms)
    found = []
    for some in (slice(0, tokens), slice(at, at + 1)):
        slabs = slabs_of(shape, mx.bfloat16, 1)
        slots = token_slots([(0, place) for place in range(tokens)][some])
        turned, _ = run(given[some] + 0, angles[some] if shape.dims else angles, slots, slabs, START)
        mine = turned[at if some.start == 0 else 0]
        found.append([np.array(x.view(mx.uint16)) for x in (mine, slabs.keys[0][0, :, at], slabs.values[0][0, :, at])])
    assert all(map(np.array_equal, *found))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["cuda", "metal"])
def test_a_kernel_that_is_right_passes(kind: Any, dtype: mx.Dtype) -> None:
    for shape in SHAPES[1], SHAPES[3]:
        assert check_rope(Device(kind, "a GPU", 1), shape, dtype, norms_of(shape), 4) is None


LATENTS = [
    LatentRopeShape(AttentionShape(20, 1, 512, 64, latent=True), 192, 20 * 256, 768 + 576, 768, 64, neighbours=True),
    LatentRopeShape(AttentionShape(3, 1, 48, 16, latent=True), 32, 208, 208, 144, dims=10),
    LatentRopeShape(AttentionShape(2, 1, 32, 32, latent=True), 16, 96, 64, 0),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["cuda", "metal"])
@pytest.mark.parametrize("shape", LATENTS, ids=str)
def test_latents_are_normed_turned_and_written(shape: LatentRopeShape, kind: Any, dtype: mx.Dtype) -> None:
    norm = mx.random.normal((shape.heads.key_size,)), 0.125
    assert check_latent_rope(Device(kind, "a GPU", 1), shape, dtype, norm, 4) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [("- y * sine", "+ y * sine"), ("squares / float(KEY_SIZE)", "squares"), ("+ KV_AT", ""), (" + UNROTATED;", ";")],
)
def test_a_kernel_for_latents_that_is_wrong_is_named(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            assert "_turn_latent_" not in text.name or old in text.body
            return text._replace(body=text.body.replace(old, new))

    monkeypatch.setattr(module, "required_launcher", lambda device: Broken())
    found = check_latent_rope(GPU, LATENTS[1], mx.float32, (None, 1e-3), 3)
    assert found is not None and found.startswith("turn differs by")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("- y * sine", "+ y * sine", "turn differs by"),
        (": KV_HEADS * KEY_SIZE + head * VALUE_SIZE", ": head * VALUE_SIZE", "turn differs by"),
        ("squares / float(KEY_SIZE)", "squares", "turn differs by"),
        ("T(x * cosine", "T(x * cosinus", "does not run: a kernel does not compile"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            return text._replace(body=text.body.replace(old, new))

    monkeypatch.setattr(module, "required_launcher", lambda device: Broken())
    found = check_rope(GPU, SHAPES[3], mx.float32, norms_of(SHAPES[3]), 3)
    assert found is not None and found.startswith(said)


def test_what_there_is_no_kernel_for_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="66 of 64 dimensions are rotated"):
        RopeKernel(Emulator(), TUNINGS["cuda"], RopeShape(AttentionShape(4, 2, 64, 64), dims=66), mx.float32)
    with pytest.raises(ValueError, match="int32: there are kernels for"):
        RopeKernel(Emulator(), TUNINGS["cuda"], SHAPES[0], mx.int32)
    run = RopeKernel(Emulator(), TUNINGS["cuda"], SHAPES[0], mx.float16)
    with pytest.raises(ValueError, match=r"float32 where .*float16 was said"):
        run(
            projected(SHAPES[0], 1, mx.float32),
            mx.zeros((1, 64)),
            token_slots([(0, 0)]),
            slabs_of(SHAPES[0], mx.float16, 1),
            START,
        )
