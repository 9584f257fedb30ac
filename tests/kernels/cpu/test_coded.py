"""Attention over pages in fewer bits, read as they lie, against attention over what plain operations decode them to."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_pages import CodedPageLayout, join_pages
from ingot.cache.pages import PAGE
from ingot.kernels.cpu import native
from tests.kernels.cpu.attention_reference import Reference
from tests.kernels.cpu.paging import empty

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

MOST = {mx.float32: 2e-5, mx.float16: 2e-3}
"""As far as outputs may be off; what pages decode to is rounded to 16 bits itself."""


@dataclass
class CodedRow:
    """A sequence whose first pages are coded, which has other tokens behind them."""

    reference: Reference
    codec: str
    coded: int
    dtype: mx.Dtype = mx.float32

    def __post_init__(self) -> None:
        kv_heads, size = self.reference.kv_heads, self.reference.size
        self.form = CodedPageLayout(PairCodec(CodecName.parse(self.codec)), kv_heads, (size, size), self.dtype)
        dice = np.random.default_rng(size + self.coded)
        keys, values = (dice.standard_normal((self.coded, kv_heads, PAGE, size)) for _ in range(2))
        keys += 3 * dice.standard_normal((1, kv_heads, 1, size))
        self.bytes = self.form.encode(mx.array(keys, self.dtype), mx.array(values, self.dtype))
        assert self.form.native is not None, "the native kernels read such pages"
        # Pages lie scattered.
        self.order = [int(page) for page in dice.permutation(self.coded)]
        self.pages = mx.zeros_like(self.bytes)
        self.pages[mx.array(self.order)] = self.bytes

    def tokens(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dice = np.random.default_rng(count)
        widths = (self.reference.heads, self.reference.kv_heads, self.reference.kv_heads)
        q, k, v = (dice.standard_normal((count, each * self.reference.size)).astype(np.float32) for each in widths)
        return q, k, v

    def attended(self, pieces: list[int]) -> np.ndarray:
        """What the tokens behind the coded pages find, so many of them at a time."""
        q, k, v = self.tokens(sum(pieces))
        operation = self.reference.native()
        behind = -(-len(q) // PAGE)
        keys, values = empty(behind, self.reference.kv_heads, PAGE, self.reference.size, self.dtype)
        table = (self.coded, array("i", range(behind)), array("i", self.order))
        found, done = [], 0
        for count in pieces:
            place = self.coded * PAGE + done
            given = [mx.array(x[done : done + count]) for x in (q, k, v)]
            attended, keys, values = operation(
                given[0],
                given[1],
                given[2],
                keys,
                values,
                native.attention_spans([(0, count, 0, place, place)], [table]),
                0,
                (self.pages[:, :, None], self.form.native),
            )
            found.append(np.array(attended))
            done += count
        return np.concatenate(found)

    def expected(self, count: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
        with monkeypatch.context() as plain:
            plain.setenv("INGOT_KERNELS", "mlx")
            decoded = [np.array(join_pages(side)[0].astype(mx.float32)) for side in self.form.decode(self.bytes)]
        q, k, v = self.tokens(count)
        before = [side.swapaxes(0, 1).reshape(self.coded * PAGE, -1) for side in decoded]
        k, v = (np.concatenate(pair) for pair in zip(before, (k, v), strict=True))
        return self.reference(q, k, v)


@pytest.mark.parametrize(("group", "dtype"), [(1, mx.float32), (3, mx.float16), (9, mx.float32)])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    "codec", ["k8v4", "affine8", "affine4", "turbo4", "turbo3/turbo2", "raw/turbo4", "affine8/raw"]
)
def test_coded_pages_are_read_as_what_they_are_decoded_to(
    codec: str, size: int, group: int, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference(2 * group, 2, size, halves=dtype == mx.float16)
    row = CodedRow(reference, codec, coded=9, dtype=dtype)
    assert np.abs(row.attended([1]) - row.expected(1, monkeypatch)).max() < MOST[dtype]


@pytest.mark.parametrize(("codec", "size"), [("affine8", 96), ("affine4/affine8", 80), ("k8v4", 16), ("k8v4", 256)])
@pytest.mark.parametrize("count", [1, 7])
def test_heads_of_any_size_and_many_queries(codec: str, size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = CodedRow(Reference(4, 2, size, cap=20.0), codec, coded=17)
    assert np.abs(row.attended([count]) - row.expected(count, monkeypatch)).max() < MOST[mx.float32]


@pytest.mark.parametrize("codec", ["k8v4", "affine8", "affine4", "turbo4"])
@pytest.mark.parametrize("size", [64, 128])
def test_how_many_queries_come_together_changes_no_bit(codec: str, size: int) -> None:
    row = CodedRow(Reference(6, 2, size), codec, coded=10)
    one_by_one = row.attended([1] * 15)
    for pieces in ([15], [2, 3, 10], [4, 4, 7]):
        assert np.array_equal(row.attended(pieces), one_by_one)
