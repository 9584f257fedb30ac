from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.codecs.codec import pack_bits, packed_bytes, unpack_bits


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@given(eights=st.integers(1, 40), rows=st.integers(1, 4), data=st.data())
def test_codes_come_back_from_as_few_bytes_as_there_can_be(
    bits: int, eights: int, rows: int, data: st.DataObject
) -> None:
    size = 8 * eights
    flat = data.draw(st.binary(min_size=rows * size, max_size=rows * size))
    codes = (mx.array(list(flat), dtype=mx.uint8) & ((1 << bits) - 1)).reshape(rows, size)
    packed = pack_bits(codes, bits)
    assert packed.dtype == mx.uint8 and packed.shape == (rows, packed_bytes(size, bits))
    assert packed.nbytes * 8 == rows * size * bits
    assert mx.array_equal(unpack_bits(packed, bits), codes)
