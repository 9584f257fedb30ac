"""What leaves a model: logits of selected positions, and hidden states."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.models.layers.lm_head import select_at_lm_head, tap_hidden_states
from tests import tiny


@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize("quantised", [False, True])
def test_the_head_computes_only_the_selected_positions_with_the_same_weights(kind: str, quantised: bool) -> None:
    model = tiny.build(kind)
    if quantised:
        nn.quantize(
            model, group_size=32, bits=8, class_predicate=lambda path, module: "lm_head" in path or "embed" in path
        )
    tokens = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    whole = model(tokens)
    selection = select_at_lm_head(model)
    assert selection is not None
    selection.at, selection.width = mx.array([[3], [1]]), 4
    part = model(tokens)
    assert part.shape == (2, 1, tiny.VOCAB)
    assert (
        mx.allclose(part[0, 0], whole[0, 3], atol=1e-5).item()
        and mx.allclose(part[1, 0], whole[1, 1], atol=1e-5).item()
    )
    selection.width = 5  # tokens of a pass whose head is called for four of them
    assert mx.allclose(model(tokens), whole, atol=1e-5).item()
    selection.at = None
    assert mx.allclose(model(tokens), whole, atol=1e-5).item()


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_hidden_states_of_all_tokens_are_handed_over_whichever_are_selected(kind: str) -> None:
    model, tokens = tiny.build(kind), mx.array([[1, 2, 3, 4]])
    expected = model.model(tokens)
    selection = select_at_lm_head(model)
    assert selection is not None
    selection.at, selection.width = mx.array([[3]]), 4
    model(tokens)
    assert selection.hidden is None
    with selection.capturing_hidden():
        model(tokens)
        assert selection.hidden is not None
        assert mx.allclose(selection.hidden, expected, atol=1e-5).item()
    assert selection.hidden is None


def test_tapped_modules_hand_over_what_they_are_given_side_by_side() -> None:
    model, tokens = tiny.build("llama"), mx.array([[1, 2, 3, 4]])
    embedded = model.model.embed_tokens(tokens)
    whole = model(tokens)
    selection = select_at_lm_head(model)
    assert selection is not None
    tap_hidden_states(model, ["model.layers.0", "model.norm"], selection)
    with selection.capturing_hidden():
        assert mx.allclose(model(tokens), whole, atol=1e-5).item()
        hidden = selection.hidden
    assert hidden is not None
    assert mx.array_equal(hidden[..., : embedded.shape[-1]], embedded).item()
    assert mx.allclose(model.lm_head(model.model.norm(hidden[..., embedded.shape[-1] :])), whole, atol=1e-5).item()
