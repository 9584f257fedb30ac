from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

from bench.codecs import CODECS, RECALL_PREFIX, RECALL_TOKENS, probes, vector_figures
from bench.hits import LAST_BIT, Prefix, codec_of, recall, text_figures
from ingot.cache.codecs.names import CodecName
from tests import tiny

TEXT = [token * token % 90 for token in range(7, 167)]


def test_every_codec_of_the_table_is_one() -> None:
    assert [str(CodecName.parse(name)) for name in CODECS] == list(CODECS)


def test_fewer_bits_save_more_and_lose_more() -> None:
    many, few = (vector_figures(codec_of(name), 1) for name in ("turbo4", "turbo2"))
    assert few.ratio > many.ratio > 3.8
    assert few.distortion > many.distortion > 0
    assert many.logit_error == pytest.approx(many.logit_error_with_offsets, rel=0.1)
    assert many.encode_gb_s > 0 and many.decode_gb_s > 0


@pytest.mark.parametrize("kind", ["llama", "window", "hybrid"])
def test_what_follows_is_computed_from_what_was_read_back(kind: str) -> None:
    known = Prefix(tiny.adapter(kind, 64, exact=True), TEXT[:100])
    names = ("raw", LAST_BIT, "affine8", "turbo1", "raw")
    raw, nudged, fine, coarse, again = (known.logits_behind(TEXT[100:], codec_of(name)) for name in names)
    off = [float(mx.abs(each - raw).max()) for each in (nudged, fine, coarse)]
    assert raw.shape == (60, tiny.VOCAB) and 0 < off[0] < off[1] < off[2]
    assert mx.array_equal(again, raw), "one codec leaves nothing behind for the next"


def test_codecs_are_compared_token_by_token() -> None:
    figures = text_figures(tiny.adapter("llama", 64, exact=True), [TEXT, TEXT[::-1]], 100, ["raw", "turbo1"])
    raw, coarse = figures["raw"], figures["turbo1"]
    assert (raw.tokens, raw.change, raw.error, raw.agreement) == (118, 0.0, 0.0, 1.0)
    assert coarse.perplexity == pytest.approx(raw.perplexity * (1 + coarse.change), rel=1e-5)
    assert coarse.error > 0 and coarse.agreement < 1
    assert 1 <= coarse.flipped_lead < coarse.usual_lead, "it is where two are alike that another one is chosen"


def test_recall_is_asked_for_behind_the_prefix() -> None:
    adapter = tiny.adapter("llama", 64, exact=True)
    likeliest = mx.argmax(Prefix(adapter, TEXT[:100]).logits_behind(TEXT[100:], codec_of("raw")), axis=-1).tolist()
    told = [*TEXT[:110], likeliest[9], *TEXT[111:]]
    places = [110, 120]
    right = [likeliest[place - 101] == told[place] for place in places]
    assert right[0]
    shares = recall(adapter, [(told, places[:1])], 100, ["raw"])
    assert shares == {"raw": 1.0}


def test_probes_ask_for_what_was_told_before() -> None:
    ((tokens, places),) = probes(1)
    assert len(tokens) == RECALL_TOKENS and len(places) >= 30 and min(places) > RECALL_PREFIX
    told = set(itertools.pairwise(tokens[: RECALL_PREFIX + 1]))
    assert all((tokens[place - 1], tokens[place]) in told for place in places)
