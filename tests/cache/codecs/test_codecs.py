from __future__ import annotations

import math

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.cache.codecs.codec import AffineCodec, VectorCodec
from ingot.cache.codecs.names import CODEC_NAMES, CodecName, codec_problem
from ingot.cache.codecs.pair import CODEC_FACTORIES, PairCodec, RecordCodec
from ingot.cache.codecs.turbo import TurboCodec, lloyd_max_codebook
from tests.cache.codecs.vectors import drawn, logit_error, lost, with_offsets

LOSSY = [name for name in CODEC_NAMES if name != "raw"]
SIZES = [64, 80, 96, 128, 160, 256]


def there_and_back(codec: VectorCodec, x: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
    return codec.decode(codec.encode(x.astype(dtype)), dtype).astype(mx.float32)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_turbo_loses_what_theory_says_for_that_head_size(bits: int, size: int) -> None:
    x = drawn(1, 2, 1500, size)
    assert lost(x, there_and_back(TurboCodec(bits), x)) == pytest.approx(
        lloyd_max_codebook(size, bits).distortion, rel=0.03
    )


@pytest.mark.parametrize("offset", [0.0, 30.0, 1000.0])
@pytest.mark.parametrize(("name", "most"), [("turbo3", 0.20), ("turbo4", 0.11), ("affine4", 0.11), ("affine8", 0.01)])
def test_attention_sees_keys_as_well_with_a_large_part_in_common(name: str, most: float, offset: float) -> None:
    keys = with_offsets(drawn(1, 2, 512, 128), offset)
    codec = RecordCodec(CodecName.parse(name))
    again, _ = codec.decode(codec.encode(keys, keys), mx.float32)
    assert logit_error(keys, again) <= most


@pytest.mark.parametrize("name", [*LOSSY, "k8v4"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_key_that_all_queries_look_at_comes_back_exactly(name: str, dtype: mx.Dtype) -> None:
    keys = mx.concatenate([drawn(1, 3, 1, 64, seed=4) * 20, drawn(1, 3, 69, 64)], axis=2).astype(dtype)
    codec = RecordCodec(CodecName.parse(name))
    again, _ = codec.decode(codec.encode(keys, keys), dtype)
    assert mx.array_equal(again[:, :, :1], keys[:, :, :1])
    others = keys[:, :, 1:].astype(mx.float32)
    plain = there_and_back(codec.keys, others)
    assert lost(others, again[:, :, 1:].astype(mx.float32)) <= 1.1 * lost(others, plain) + 1e-5


def test_keys_that_are_alike_go_by_the_same_centre() -> None:
    sinks = drawn(1, 1, 1, 64, seed=4) * 20 + drawn(1, 1, 3, 64, seed=5) * 0.1
    keys = mx.concatenate([sinks, drawn(1, 1, 125, 64)], axis=2)
    codec = RecordCodec(CodecName.parse("turbo4"))
    again, _ = codec.decode(codec.encode(keys, keys), mx.float32)
    assert float(mx.abs(again[:, :, :3] - sinks).max()) < 0.1
    plain = PairCodec(codec.name)
    again, _ = plain.decode(plain.encode(keys, keys), mx.float32)
    assert float(mx.abs(again[:, :, :3] - sinks).max()) > 1


@pytest.mark.parametrize("kind", [PairCodec, RecordCodec])
@pytest.mark.parametrize("name", [*CODEC_NAMES, "k8v4", "raw/turbo2"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_what_is_counted_is_what_it_takes(name: str, dtype: mx.Dtype, kind: type[PairCodec]) -> None:
    codec = kind(CodecName.parse(name))
    keys, values = (drawn(1, 3, 70, 64, seed=seed).astype(dtype) for seed in (1, 2))
    arrays = codec.encode(keys, values)
    assert sum(array.nbytes for array in arrays) == codec.nbytes(70, 3, (64, 64), dtype)
    assert len(arrays) == codec.arrays
    assert all(array.shape[2] in (1, 70) for array in arrays)
    assert [again.dtype for again in codec.decode(arrays, dtype)] == [dtype, dtype]


def test_three_bits_are_five_times_smaller_than_sixteen_with_everything_counted() -> None:
    codec, raw = (RecordCodec(CodecName.parse(name)) for name in ("turbo3", "raw"))
    sizes = (512, 8, (128, 128), mx.float16)
    assert raw.nbytes(*sizes) / codec.nbytes(*sizes) >= 5.0


@pytest.mark.parametrize("name", [*LOSSY, "k8v4"])
@settings(max_examples=20)
@given(tokens=st.integers(2, 60), cut=st.data())
def test_any_run_of_tokens_is_decoded_as_it_is_with_the_rest(name: str, tokens: int, cut: st.DataObject) -> None:
    codec = RecordCodec(CodecName.parse(name))
    arrays = codec.encode(drawn(1, 2, tokens, 32), drawn(1, 2, tokens, 32, seed=1))
    begin = cut.draw(st.integers(0, tokens - 1))
    end = cut.draw(st.integers(begin + 1, tokens))
    piece = tuple(array if array.shape[2] == 1 else array[:, :, begin:end] for array in arrays)
    for part, whole in zip(codec.decode(piece, mx.float32), codec.decode(arrays, mx.float32), strict=True):
        assert mx.allclose(part, whole[:, :, begin:end], atol=1e-5)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-3, 1.0, 1e5, 1e15])
def test_numbers_of_any_size_come_back_finite_and_about_as_large(name: str, scale: float) -> None:
    x = drawn(1, 1, 20, 64) * scale
    again = there_and_back(CODEC_FACTORIES[name](), x)
    assert bool(mx.all(mx.isfinite(again)))
    assert float(mx.abs(again).max()) <= 2.5 * float(mx.abs(x).max()) + 1e-30


@pytest.mark.parametrize("bits", [4, 8])
@given(numbers=st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16))
def test_affine_is_off_by_no_more_than_a_step(bits: int, numbers: list[float]) -> None:
    x = mx.array(numbers).reshape(1, 1, 1, 16)
    again = there_and_back(AffineCodec(bits), x)
    reach = max(numbers) - min(numbers)
    slack = 0.04 * max(map(abs, numbers))  # least and step have few bits
    assert float(mx.abs(x - again).max()) <= (reach + slack) / (2 * ((1 << bits) - 1)) + 1e-5 * slack + 1e-30


@pytest.mark.parametrize("size", [60, 72, 120, 36, 4, 1, 0, 44])
def test_sizes_that_cannot_be_rotated_are_refused_before_they_are_tried(size: int) -> None:
    problem = TurboCodec(3).problem(size)
    assert problem is not None and str(size) in problem


@pytest.mark.parametrize("size", [8, 16, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 40, 56])
def test_sizes_that_are_taken_come_back(size: int) -> None:
    assert TurboCodec(4).problem(size) is None
    x = drawn(1, 1, 200, size)
    assert lost(x, there_and_back(TurboCodec(4), x)) < 0.02


def test_a_pair_says_which_side_cannot_be_encoded() -> None:
    codec = PairCodec(CodecName.parse("affine8/turbo4"))
    assert codec.problem((128, 128)) is None
    assert "values" in (codec.problem((64, 60)) or "")
    assert "keys" in (codec.problem((20, 64)) or "")
    assert PairCodec(CodecName()).problem((7, 0)) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [("raw", "raw"), ("turbo3", "turbo3"), ("k8v4", "k8v4"), ("affine8/turbo4", "k8v4"), ("raw/turbo2", "raw/turbo2")],
)
def test_names_are_read_and_said_alike(text: str, name: str) -> None:
    parsed = CodecName.parse(text)
    assert str(parsed) == name and CodecName.parse(str(parsed)) == parsed
    assert parsed.lossy == (text != "raw")


@pytest.mark.parametrize("text", ["turbo5", "turbo", "", "affine8/", "/turbo4", "a/b/c", "k8v4/raw", "TURBO3"])
def test_what_is_no_codec_is_told_what_there_is(text: str) -> None:
    assert "known are raw" in (codec_problem(text) or "")


def test_records_of_another_kind_have_another_name() -> None:
    name = CodecName.parse("turbo4")
    assert PairCodec(name).described != RecordCodec(name).described
    assert PairCodec(CodecName()).described == RecordCodec(CodecName()).described == "raw"


def test_the_same_vectors_become_the_same_bytes() -> None:
    x = drawn(1, 1, 30, 64)
    for name in LOSSY:
        codec = CODEC_FACTORIES[name]()
        assert all(map(mx.array_equal, codec.encode(x), codec.encode(x[:, :, :])))
    assert math.isclose(lloyd_max_codebook(128, 3).levels[-1], 2.13149, abs_tol=2e-5)
