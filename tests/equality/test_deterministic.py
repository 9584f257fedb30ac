"""With --deterministic, by CUDA's rules: a token's logits have the same bits however its prompt is cut, and whatever is
computed beside it, for every kind of layer; and what cannot be held to that is named."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest

from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.dense_matmul.kernels import DenseProduct
from ingot.kernels.paged_attention.kernels import has_paged_kernels
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.layers import decode_graph, token_lots
from ingot.models.layers.decode_graph import DecodeGraphs
from tests import engines, tiny

pytestmark = pytest.mark.skipif(
    not has_paged_kernels(engines.GPU), reason="kernels run on no device here, nor can be emulated"
)
LENGTH = 75
PROMPT = [random.Random(7).randrange(95) for _ in range(LENGTH)]
KINDS = (
    *("kernel-packed", "kernel-hybrid-packed", "kernel-window-packed", "kernel", "kernel-window", "kernel-hybrid"),
    *("kernel-mamba-packed", "kernel-conv-packed", "kernel-kda-packed"),
)


def adapted(kind: str, *, deterministic: bool = True) -> ModelAdapter:
    model = tiny.build(kind)
    model.set_dtype(mx.bfloat16)
    return adapt_model(model, tiny.CONFIGS[kind], engines.GPU, deterministic=deterministic)


def logits(adapter: ModelAdapter, cuts: Sequence[int], company: int = 0) -> mx.array:
    """After each token of the prompt, which is computed in these pieces beside so many other rows."""
    dice, rows = random.Random(company), adapter.new_batch_state()
    row, others = rows.new(), [rows.new() for _ in range(company)]
    found, at = [], 0
    for cut in cuts:
        parts = [ForwardPart((other,), dice.choice((1, 4, 20))) for other in others]
        before = sum(part.width for part in parts)
        tokens = [dice.randrange(95) for _ in range(before)] + PROMPT[at : at + cut]
        computed = adapter.run(rows, mx.array(tokens), [*parts, ForwardPart((row,), cut)])
        mx.eval(computed, rows.pending())
        found.append(computed[before:])
        at += cut
    return mx.concatenate(found)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapted(kind)
    assert adapter.irreproducible is None and not any("deterministic" in note for note in adapter.notes)
    whole = logits(adapter, [LENGTH])
    assert mx.array_equal(logits(adapter, [17, 1, 1, 4, LENGTH - 23], company=2), whole)
    monkeypatch.setattr(token_lots, "PROMPT_ROOMS", (24,))  # tokens of a lot
    assert mx.array_equal(logits(adapter, [LENGTH - 2, 2], company=1), whole)


def test_lots_have_all_tokens_of_a_pass_and_no_more_of_a_row_at_once_than_attention_takes() -> None:
    adapter, seen = adapted("kernel-packed"), []
    make = token_lots.token_lots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_graph, "token_lots", lambda mixed, most: seen.append(make(mixed, 50)) or seen[-1])
        logits(adapter, [LENGTH], company=2)
    [lots] = seen
    pieces = [piece for lot in lots for piece in lot.pieces]
    assert [piece.first for piece in pieces] == [0, *[piece.end for piece in pieces][:-1]]
    assert max(piece.tokens for piece in pieces) == 16 and all(lot.end - lot.begin <= 50 for lot in lots)
    starts = [piece.start for piece in pieces if piece.row == 2]
    assert starts == [*range(0, LENGTH, 16)], "of the row, not of the pass"


def test_what_is_not_held_to_it_is_named() -> None:
    without = adapted("kernel-packed", deterministic=False)
    assert without.irreproducible == "its prompts, without --deterministic"
    mixture = adapt_model(tiny.build("moe"), tiny.CONFIGS["moe"], engines.GPU, deterministic=True)
    assert mixture.irreproducible is not None
    assert any(mixture.irreproducible in note and "--deterministic" in note for note in mixture.notes)


def test_a_device_on_which_many_rows_have_other_bits_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = DenseProduct.launched
    monkeypatch.setattr(
        DenseProduct,
        "launched",
        lambda self, x, *rest, **options: launched(self, x, *rest, **options) + (x.shape[0] > 32),
    )
    adapter = adapted("kernel")
    assert adapter.irreproducible is not None and "how many rows" in adapter.irreproducible
    assert not adapter.model.layers[0]._stack.computes_prompts


def test_a_refused_graph_is_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeGraphs, "_difference_from_layers", lambda *given: "they differ")
    adapter = adapted("kernel-packed")
    assert adapter.irreproducible == "its layers, as graphs they differ"
