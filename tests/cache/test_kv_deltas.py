"""Whole pages in fewer bits outside of pages: cut anywhere, they are what they decode to."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_pages import CodedPageLayout, join_pages
from ingot.cache.kv_deltas import CodedDelta, KVDelta
from ingot.cache.pages import PAGE

FIRST, PAGES, RAW = 3, 4, 70
"""The number of the first page, how many are in fewer bits, and tokens behind them."""
BEGIN, END = FIRST * PAGE + 10, (FIRST + PAGES) * PAGE + RAW
FORM = CodedPageLayout(PairCodec(CodecName.parse("k8v4")), 2, (64, 64), mx.float16)


@cache
def drawn() -> tuple[CodedDelta, tuple[mx.array, mx.array]]:
    """One from `BEGIN` to `END`, and the keys and values of all its pages' tokens."""
    keys, values = (
        mx.random.normal((PAGES, 2, PAGE, 64), key=mx.random.key(each)).astype(mx.float16) for each in (1, 2)
    )
    raw = [mx.random.normal((1, 2, RAW, 64), key=mx.random.key(each)).astype(mx.float16) for each in (3, 4)]
    pages = FORM.encode(keys, values)
    whole = tuple(
        mx.concatenate([join_pages(part), tail], axis=2) for part, tail in zip(FORM.decode(pages), raw, strict=True)
    )
    mx.eval(pages, *raw, *whole)
    return CodedDelta(BEGIN, END, (pages, *raw), FORM), (whole[0], whole[1])


def is_right(delta: KVDelta) -> bool:
    """Whether it is, unpacked, what the same tokens are."""
    if isinstance(delta, CodedDelta):
        assert delta.has_valid_pages
    unpacked = delta.with_coded(0)
    assert unpacked.coded == 0 and (unpacked.begin, unpacked.end) == (delta.begin, delta.end)
    mine = (part[:, :, delta.begin - FIRST * PAGE : delta.end - FIRST * PAGE] for part in drawn()[1])
    return all(mx.array_equal(one, other).item() for one, other in zip(unpacked.arrays, mine, strict=True))


@settings(max_examples=40)
@given(st.integers(BEGIN, END - 1), st.integers(1, END - BEGIN), st.integers(0, PAGES))
def test_any_part_of_it_is_what_the_same_tokens_decode_to(begin: int, tokens: int, coded: int) -> None:
    delta, _ = drawn()
    end = min(END, begin + tokens)
    part = delta.before(end, BEGIN).behind(begin, BEGIN)
    assert (part.begin, part.end) == (begin, end) and is_right(part)
    assert part.coded == max(0, min(FIRST + PAGES, end // PAGE) - begin // PAGE), "whole pages stay as they are"
    fewer = part.with_coded(coded)
    assert fewer.coded == min(coded, part.coded) and is_right(fewer)
    assert is_right(part.copied()) and part.copied().coded == part.coded


def test_what_no_layer_of_this_form_could_have_is_told() -> None:
    delta, _ = drawn()
    pages, *raw = delta.arrays
    assert delta.has_valid_pages and replace(delta, end=END - RAW, arrays=(pages,)).has_valid_pages
    for wrong in ((pages,), (pages[:, :1], *raw), (pages[..., 1:], *raw), (pages.view(mx.int8), *raw)):
        assert not replace(delta, arrays=wrong).has_valid_pages
    assert not replace(delta, end=END - RAW).has_valid_pages
    assert not replace(delta, end=END - RAW - 1, arrays=(pages,)).has_valid_pages
