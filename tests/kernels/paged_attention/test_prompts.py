"""Attention of many queries a row over pages, by matrix units as a GPU would run it, against float64."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig
from ingot.kernels.paged_attention import kernels
from ingot.kernels.paged_attention.inputs import KernelRows
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape
from tests.kernels.paged_attention.memory import START, Memory, Variant, check, emulated

pytestmark = emulated
CUDA = replace(TUNINGS["cuda"], prompts=2)


class CountingEmulator(Emulator):
    """Notes what it runs."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kernels: list[str] = []

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        self.kernels.append(kernel.name)
        return super().__call__(kernel, inputs, work)


def attended(memory: Memory, variant: Variant, seed: int = 0, *, trimmed: bool = False) -> mx.array:
    rows = memory.rows(trimmed=trimmed)
    return variant.attention(Emulator(seed)).attend(memory.queries, rows, memory.slabs, START)


@pytest.mark.parametrize("size", [16, 48, 64, 80, 128, 256])
def test_heads_of_any_size(size: int) -> None:
    variant = Variant(AttentionShape(4, 2, size, size), tuning=CUDA)
    memory = Memory(variant, [40, 130], counts=[40, 17])
    check(memory, attended(memory, variant))


@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_any_number_of_queries_shares_a_head_of_keys(group: int) -> None:
    variant = Variant(AttentionShape(2 * group, 2, 64, 64), mx.float16, tuning=CUDA)
    memory = Memory(variant, [17, 99], counts=[17, 21])
    check(memory, attended(memory, variant))


@pytest.mark.parametrize("warps", [1, 4, 8])
def test_caps_sinks_and_windows_together_however_the_work_is_cut(warps: int) -> None:
    variant = Variant(AttentionShape(4, 1, 64, 32), mx.float16, 5.0, True, 50, replace(CUDA, prompts=warps))
    memory = Memory(variant, [30, 50, 200], counts=[30, 50, 70])
    check(memory, attended(memory, variant, trimmed=True))


spans = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), min_size=1, max_size=3)


@given(spans, st.sampled_from([None, 1, 33, 100]), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_rows_of_any_lengths_and_widths_in_any_order_of_threads(
    spans: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    spans = [*spans, (5, 20)]
    variant = Variant(AttentionShape(4, 2, 32, 32), window=window, tuning=CUDA)
    memory = Memory(variant, [before + count for before, count in spans], counts=[count for _, count in spans])
    check(memory, attended(memory, variant, seed, trimmed=True))


def test_a_querys_bits_depend_on_its_row_alone() -> None:
    variant = Variant(AttentionShape(4, 2, 64, 64), window=90, tuning=CUDA)
    memory = Memory(variant, [200], counts=[100])
    attention, whole = variant.attention(), np.array(attended(memory, variant).astype(mx.float32))
    for begin, end in ((0, 17), (17, 60), (33, 100)):
        rows = KernelRows.of(memory.tables, [100 + end], counts=[end - begin])
        part = attention.attend(memory.queries[begin:end], rows, memory.slabs, START)
        assert np.array_equal(np.array(part.astype(mx.float32)), whole[begin:end])


@pytest.mark.parametrize("sinks", [False, True])
def test_few_queries_of_long_rows_are_cut_into_splits_that_are_merged(
    sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LEAST_PROMPT_SPLIT", 48)
    monkeypatch.setattr(kernels, "PROMPT_GROUPS", 40)
    variant = Variant(AttentionShape(4, 2, 64, 32), mx.float16, 5.0, sinks, None, CUDA)
    memory = Memory(variant, [70, 20, 300], counts=[30, 20, 17])  # there is nothing in most splits of the second
    launches = variant.attention(launcher := CountingEmulator(5))
    check(memory, launches.attend(memory.queries, memory.rows(), memory.slabs, START))
    assert launcher.kernels[-2:] == ["attend_prompt", "merge"]


def test_queries_enough_for_the_device_are_not_cut() -> None:
    variant = Variant(AttentionShape(4, 2, 64, 64), tuning=CUDA)
    memory = Memory(variant, [kernels.LEAST_PROMPT_SPLIT], counts=[40])
    launches = variant.attention(launcher := CountingEmulator(5))
    check(memory, launches.attend(memory.queries, memory.rows(), memory.slabs, START))
    assert launcher.kernels[-1] == "attend_prompt"


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(4, 2, 512, 512),
        AttentionShape(20, 1, 512, 64, latent=True),
        AttentionShape(3, 1, 48, 16, latent=True),
    ],
    ids=str,
)
def test_large_heads_and_latents(shape: AttentionShape) -> None:
    variant = Variant(shape, mx.bfloat16, 5.0, True, 60, CUDA)
    memory = Memory(variant, [18, 130], counts=[18, 17])
    check(memory, attended(memory, variant, 3, trimmed=True))


def test_a_querys_bits_over_latents_depend_on_its_row_alone() -> None:
    variant = Variant(AttentionShape(6, 1, 64, 16, latent=True), tuning=CUDA)
    memory = Memory(variant, [200], counts=[100])
    attention, whole = variant.attention(), np.array(attended(memory, variant).astype(mx.float32))
    for begin, end in ((0, 17), (33, 100)):
        rows = KernelRows.of(memory.tables, [100 + end], counts=[end - begin])
        part = attention.attend(memory.queries[begin:end], rows, memory.slabs, START)
        assert np.array_equal(np.array(part.astype(mx.float32)), whole[begin:end])
