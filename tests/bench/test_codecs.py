from __future__ import annotations

import mlx.core as mx
import pytest

from bench.codecs import CODECS, hit_logits, model_figures, vector_figures
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from tests import tiny


def test_every_codec_of_the_table_is_one() -> None:
    assert [str(CodecName.parse(name)) for name in CODECS] == list(CODECS)


def test_fewer_bits_save_more_and_lose_more() -> None:
    many, few = (vector_figures(PairCodec(CodecName.parse(name)), 1) for name in ("turbo4", "turbo2"))
    assert few.ratio > many.ratio > 3.8
    assert few.distortion > many.distortion > 0
    assert many.logit_error == pytest.approx(many.logit_error_with_offsets, rel=0.1)
    assert many.encode_gb_s > 0 and many.decode_gb_s > 0


@pytest.mark.parametrize("kind", ["llama", "window", "hybrid"])
def test_a_model_is_measured_on_what_was_read_back(kind: str) -> None:
    adapter = tiny.adapter(kind, 64, exact=True)
    tokens = [token % 90 for token in range(7, 167)]
    raw, fine, coarse = (
        hit_logits(adapter, tokens, 100, PairCodec(CodecName.parse(name))) for name in ("raw", "affine8", "turbo1")
    )
    off = [float(mx.abs(each - raw).max()) for each in (fine, coarse)]
    assert raw.shape == (60, tiny.VOCAB) and 0 < off[0] < off[1]
    figures = model_figures(adapter, [tokens], 100, ["raw", "affine8"])
    assert figures["raw"].agreement == 1.0
    assert figures["affine8"].perplexity == pytest.approx(figures["raw"].perplexity, rel=0.05)
