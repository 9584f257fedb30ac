"""The native codecs against plain MLX: the same bytes but where rounding decides, and the same numbers back."""

from __future__ import annotations

import mlx.core as mx
import pytest

from ingot.cache.codecs.codec import SIGN_BIT, VectorCodec
from ingot.cache.codecs.pair import CODEC_FACTORIES
from ingot.kernels.cpu import native
from tests.cache.codecs.vectors import drawn

pytestmark = pytest.mark.skipif(not native.available(), reason="no native codecs here")
NAMES = [name for name in CODEC_FACTORIES if name != "raw"]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_KERNELS", "mlx")


def close(one: mx.array, other: mx.array, dtype: mx.Dtype) -> bool:
    most = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    off = mx.abs(one.astype(mx.float32) - other.astype(mx.float32))
    return bool(mx.all(off <= most * (1 + mx.abs(other.astype(mx.float32)))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_codes_and_numbers_are_those_of_plain_operations(
    name: str, size: int, dtype: mx.Dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec: VectorCodec = CODEC_FACTORIES[name]()
    x = (drawn(1, 3, 70, size) * 3).astype(dtype)
    centres = [drawn(1, 3, 1, size, seed=5).astype(dtype), x[:, :, :1] * 0.9][:count]
    codes, scales = codec.encode(x, *centres)
    again = codec.decode((codes, scales), dtype, *centres)
    mx.eval(codes, scales, again)
    assert bool(mx.any(scales[..., :1].view(mx.uint16) >= SIGN_BIT)) == (count == 2), (
        "some are nearer to the other centre"
    )
    plain(monkeypatch)
    expected, lengths = codec.encode(x, *centres)
    differ = float(mx.mean((codes != expected).astype(mx.float32)))
    assert differ < 2e-3, "only what lies on a border"
    assert close(scales, lengths, mx.bfloat16)
    assert close(again, codec.decode((codes, scales), dtype, *centres), dtype)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_zeros_and_of_one_number_come_back(name: str) -> None:
    codec = CODEC_FACTORIES[name]()
    x = mx.concatenate([mx.zeros((1, 1, 5, 64)), mx.full((1, 1, 5, 64), 7.0)], axis=2)
    again = codec.decode(codec.encode(x), mx.float32)
    assert bool(mx.all(again[:, :, :5] == 0)) and bool(mx.all(mx.isfinite(again)))


def test_what_has_no_kernel_is_left_to_plain_operations() -> None:
    for size in (8, 80, 96):
        codec = CODEC_FACTORIES["turbo4"]()
        x = drawn(1, 1, 9, size)
        assert codec.decode(codec.encode(x), mx.float32).shape == x.shape


def test_wrong_shapes_are_refused() -> None:
    codec = native.native_extension().Codec.affine(64, 64, 8)
    with pytest.raises(ValueError, match="codec's size"):
        codec.encode(mx.zeros((1, 4, 32)))
    with pytest.raises(ValueError, match="centre"):
        codec.encode(mx.zeros((2, 4, 64)), mx.zeros((1, 1, 64)))
    with pytest.raises(ValueError, match="another"):
        codec.encode(mx.zeros((1, 4, 64)), None, mx.zeros((1, 1, 64)))
    with pytest.raises(ValueError, match="bits"):
        native.native_extension().Codec.affine(64, 64, 3)
    with pytest.raises(ValueError, match="16 to 512"):
        native.native_extension().Codec.turbo([1.0] * 24, [], [-1.0, 1.0], False)
