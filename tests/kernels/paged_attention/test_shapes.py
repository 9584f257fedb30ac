"""How kernels are cut: always so that a GPU can run them."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.paged import WAYS
from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig
from ingot.kernels.paged_attention.inputs import MOST_QUERIES, KernelRows, KVSlabs
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, AttentionTuning, KVSplits
from tests.kernels.paged_attention.memory import START

SHARED = 48 * 1024
"""Bytes that a group of threads may share on any CUDA device."""
BY_MATRICES = [tuning for tuning in WAYS.values() if tuning.matrix is not None]


class Noted:
    """Notes what is launched, and launches nothing."""

    def __init__(self) -> None:
        self.work: dict[str, LaunchConfig] = {}

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        self.work[kernel.name] = work
        return [mx.zeros(output.shape, output.dtype) for output in work.outputs]


def _launched(shape: AttentionShape, tuning: AttentionTuning, count: int) -> LaunchConfig:
    noted = Noted()
    attention = PagedAttention(noted, tuning, shape, mx.bfloat16, scale=1.0)
    slabs = KVSlabs(*([mx.zeros((1, shape.kv_heads, shape.page, size), mx.bfloat16)] for size in (16, 16)))
    queries = mx.zeros((count, shape.heads, shape.key_size), mx.bfloat16)
    attention.attend(queries, KernelRows.of([[0]], [shape.page], counts=[count]), slabs, START)
    return noted.work["attend_wide"]


sizes = st.integers(1, 16).map(lambda number: number * 16)


@pytest.mark.parametrize("tuning", BY_MATRICES, ids=repr)
@given(sizes, sizes, st.integers(1, 16), st.integers(1, MOST_QUERIES))
def test_pieces_of_any_heads_fit_in_shared_memory(
    tuning: AttentionTuning, key_size: int, value_size: int, group: int, count: int
) -> None:
    cut = dict(_launched(AttentionShape(group, 1, key_size, value_size), tuning, count).template)
    keys, slots, part, first = (int(cut[name]) for name in ("KEYS", "SLOTS", "PART", "SPLIT"))  # type: ignore[call-overload]
    split = 4 * first if cut["GROW"] else first
    line = 16 * (max(key_size, value_size) // 8 | 1)
    weights, of_warps, factors, units = part * 16 * (keys // 8 | 1), 16 * part, 4 * part, split // 64 * 16
    assert keys * line * slots + weights + of_warps + factors + units <= SHARED
    assert slots >= 2, "one to be multiplied while the next is on its way"
    assert keys in (32, 64) and part in (16, 32, 64)


def test_all_queries_of_a_head_of_keys_share_what_is_read() -> None:
    widths = {
        width: _launched(AttentionShape(32, 8, 128, 128), BY_MATRICES[0], width).groups for width in (1, 4, 8, 16)
    }
    assert set(widths.values()) == {(1, 8, 1)}, "one group, however many queries"
    assert _launched(AttentionShape(64, 8, 128, 128), BY_MATRICES[0], 16).groups == (2, 8, 1)
    assert _launched(AttentionShape(16, 2, 256, 256), BY_MATRICES[0], 8).groups == (2, 2, 1), "registers hold no more"


@pytest.mark.parametrize(
    ("size", "window", "splits"),
    [
        (128, None, KVSplits(128, True)),
        (256, None, KVSplits(128, True)),
        (512, None, KVSplits(64, True)),
        (128, 5, KVSplits(128, False)),
        (128, 1024, KVSplits(128, False)),
        (128, 3000, KVSplits(256, False)),
        (128, 32768, KVSplits(512, False)),
    ],
)
def test_kv_splits_grow_unless_there_is_a_window(size: int, window: int | None, splits: KVSplits) -> None:
    shape = AttentionShape(16, 2, size, size)
    assert PagedAttention(Noted(), TUNINGS["cuda"], shape, mx.bfloat16, scale=1.0, window=window).splits == splits
