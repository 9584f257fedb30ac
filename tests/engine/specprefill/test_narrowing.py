"""Prompts that are read without seeing all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.cache import page_choice
from ingot.cache.forward_batch import Part
from ingot.cache.pages import PAGE
from ingot.engine.sparse.narrowing import Narrowing
from ingot.kernels import native
from ingot.kernels.device import Device, current
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.models.adapter import adapt
from ingot.models.layers.fused_layers import OwnLayer
from ingot.models.precision import settle
from tests import engines, tiny
from tests.engine.specprefill.world import some

METAL = Device("metal", "a CPU that follows a GPU's rules", 1 << 34)
PLACES: list[tuple[str, Device | None, mx.Dtype]] = [
    ("llama", None, mx.float32),  # all layers as one operation
    ("moe", None, mx.float32),  # each one's attention
    ("kernel", engines.GPU, mx.float32),  # gathered
    ("kernel", engines.GPU, mx.float16),  # by the kernel for prompts
    ("kernel", METAL, mx.float16),  # gathered
]
PIECES = [200, 66]


def fewer(monkeypatch: pytest.MonkeyPatch, *, seen: int, newest: int) -> None:
    monkeypatch.setattr(page_choice, "FROM", 0)
    monkeypatch.setattr(page_choice, "SEEN", seen)
    monkeypatch.setattr(page_choice, "NEWEST", newest)


def read(
    kind: str, device: Device | None, dtype: mx.Dtype, prompt: tuple[int, ...], pieces: Sequence[int] = PIECES
) -> mx.array:
    """The logits behind it, read in pieces."""
    model, here = tiny.build(kind), device or current()
    model.set_dtype(dtype)
    settle(model, here, None)
    adapter = adapt(model, tiny.CONFIGS[kind], here)
    adapter.let_apart()
    rows, begin = adapter.new_rows(), 0
    row = rows.new()
    narrowing = Narrowing(rows, row)
    for width in pieces:
        tokens = mx.array(prompt[begin : begin + width], dtype=mx.uint32)
        with narrowing:
            logits = adapter.run(rows, tokens, [Part((row,), width)], [width - 1])
        mx.eval(logits, rows.pending())
        begin += width
    assert begin == len(prompt)
    rows.leave(row)
    return logits[-1].astype(mx.float32)


def by_stock_layers(kind: str, prompt: tuple[int, ...], newest: int) -> mx.array:
    """The same by mlx-lm's own layers, with what is not seen hidden: all but the first page and the newest."""
    model, count, begin = tiny.build(kind), len(prompt), 0
    mask = np.tril(np.ones((count, count), bool))
    for width in PIECES:
        full = begin // PAGE
        if full > newest + 1:
            mask[begin : begin + width, PAGE : (full - newest) * PAGE] = False
        begin += width
    x = model.model.embed_tokens(mx.array([prompt]))
    for layer in model.model.layers:
        x = layer(x, mx.array(mask), None)
    x = model.model.norm(x)[0, -1]
    return model.lm_head(x) if "lm_head" in model else model.model.embed_tokens.as_linear(x)


def distance(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one - other).max().item() / mx.abs(other).max().item())


@pytest.mark.parametrize(("kind", "device", "dtype"), PLACES, ids=lambda value: str(getattr(value, "kind", value)))
def test_tokens_see_the_first_page_the_newest_and_themselves(
    monkeypatch: pytest.MonkeyPatch, kind: str, device: Any, dtype: mx.Dtype
) -> None:
    fewer(monkeypatch, seen=2, newest=1)
    prompt, lengths, attend = some(sum(PIECES)), list[int](), PagedAttention.attend

    def watched(self: PagedAttention, queries: mx.array, rows: Any, *rest: Any) -> mx.array:
        lengths.extend(length for length, _ in rows.spans)
        return attend(self, queries, rows, *rest)

    monkeypatch.setattr(PagedAttention, "attend", watched)
    apart = distance(read(kind, device, dtype, prompt), by_stock_layers(kind, prompt, newest=1))
    assert apart < (0.002 if dtype == mx.float32 else 0.02)
    if device is engines.GPU and dtype == mx.float16:  # the kernel for prompts read so many places, in both layers
        assert lengths[-2:] == 2 * [2 * PAGE + PIECES[0] % PAGE + PIECES[1]]


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
def test_native_attention_chooses_what_others_choose(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pieces = [700, 330, 200]
    fewer(monkeypatch, seen=4, newest=1)
    prompt = some(sum(pieces))
    natively = read(kind, None, mx.float32, prompt, pieces)
    monkeypatch.setenv("INGOT_KERNELS", "mlx")
    plainly = read(kind, None, mx.float32, prompt, pieces)
    fewer(monkeypatch, seen=2, newest=1)
    otherwise = read(kind, None, mx.float32, prompt, pieces)
    assert distance(natively, plainly) < 0.002 < 0.005 < distance(otherwise, plainly)


@pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
def test_layers_that_are_one_operation_stay_so_while_they_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer(monkeypatch, seen=2, newest=1)
    choices, spans = list[Any](), native.spans

    def watched(*given: Any) -> Any:
        choices.append(given[-1])
        return spans(*given)

    monkeypatch.setattr(native, "spans", watched)
    monkeypatch.delattr(OwnLayer, "by_itself")
    read("llama", None, mx.float32, some(sum(PIECES)))
    assert choices[-2:] == [None, (2, 1, page_choice.ASKING)]  # of each piece, once for all layers


@pytest.mark.parametrize(("kind", "device"), [("llama", None), ("kernel", engines.GPU)])
def test_nobody_asks_what_to_see_as_long_as_all_is_seen(
    monkeypatch: pytest.MonkeyPatch, kind: str, device: Any
) -> None:
    monkeypatch.setenv("INGOT_KERNELS", "mlx")
    asked, choose = list[int](), page_choice.PageChoice.__call__

    def counted(choice: page_choice.PageChoice, queries: mx.array, scale: float, start: int) -> mx.array | None:
        asked.append(start)
        return choose(choice, queries, scale, start)

    monkeypatch.setattr(page_choice.PageChoice, "__call__", counted)
    read(kind, device, mx.float32, some(sum(PIECES)))
    assert asked == []
    fewer(monkeypatch, seen=2, newest=1)
    read(kind, device, mx.float32, some(sum(PIECES)))
    assert set(asked) == {PIECES[0]}


def test_what_is_hidden_matters() -> None:
    prompt = some(sum(PIECES))
    whole = read("llama", None, mx.float32, prompt)
    assert distance(whole, by_stock_layers("llama", prompt, newest=1)) > 0.02
