"""The probe against made-up models, each with one fault."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.launch import Launch, Part
from ingot.cache.layer_state import LayerState
from ingot.cache.layers import AppendState
from ingot.cache.rows import Rows
from ingot.errors import ModelError
from ingot.models.probe import Findings, Forward, Probe, apart

Shift = Callable[[LayerState, int], float | mx.array]


def probe(shift: Shift, dtype: mx.Dtype = mx.float32, *, unlike: bool = True) -> Findings:
    """Findings about a model whose logits follow from the newest token, moved by `shift(state, width)`."""

    def forward(
        rows: Rows, tokens: mx.array, parts: Sequence[Part], at: Sequence[int] | None, *, mixed: bool
    ) -> mx.array:
        assert at is not None
        with rows.launch(parts, mixed=mixed) as layers:
            width = min(part.width for part in parts)
            return mx.sin(tokens[mx.array(list(at))][:, None] * mx.arange(1, 9)) + shift(layers[0], width)

    return probed(forward, dtype, unlike=unlike)


def probed(forward: Forward, dtype: mx.Dtype = mx.float32, *, unlike: bool = True) -> Findings:
    return Probe(forward, lambda: Rows([AppendState()]), dtype, unlike=unlike).run()


def launches(state: LayerState) -> Sequence[Launch]:
    return state.whole.parts if state.whole else [state.open_launch]


def rows(state: LayerState) -> int:
    return sum(launch.count for launch in launches(state))


def test_a_faultless_model_may_batch_and_mix_its_rows() -> None:
    found = probe(lambda state, width: 0.0)
    assert (found.ragged, found.mixed, found.vocab) == (True, True, 8)


def test_a_model_that_goes_wrong_in_company_runs_its_rows_apart() -> None:
    found = probe(lambda state, width: 0.1 if rows(state) > 1 else 0.0)
    assert (found.ragged, found.mixed) == (False, False)


def test_a_model_that_fails_in_company_runs_its_rows_apart() -> None:
    def fails(state: LayerState, width: int) -> float:
        if rows(state) > 1:
            raise TypeError
        return 0.0

    found = probe(fails)
    assert (found.ragged, found.mixed) == (False, False)


def test_a_model_that_goes_wrong_in_the_shorter_of_two_rows_runs_them_apart() -> None:
    def shift(state: LayerState, width: int) -> float | mx.array:
        starts = launches(state)[0].starts
        return mx.array([[0.1 if start < max(starts) else 0.0] for start in starts]) if len(starts) > 1 else 0.0

    found = probe(shift)
    assert (found.ragged, found.mixed) == (False, True)


def test_a_family_known_not_to_mix_is_not_tried() -> None:
    found = probe(lambda state, width: 0.0, unlike=False)
    assert (found.ragged, found.mixed) == (False, False)


def test_a_model_that_goes_wrong_in_mixed_launches_is_given_none_and_still_decodes_together() -> None:
    found = probe(lambda state, width: 0.1 if state.whole else 0.0)
    assert (found.ragged, found.mixed) == (True, False)


def test_a_model_whose_rows_run_apart_may_still_mix() -> None:
    found = probe(lambda state, width: 0.1 if any(launch.count > 1 for launch in launches(state)) else 0.0)
    assert (found.ragged, found.mixed) == (False, True)


def test_a_difference_that_rounding_makes_in_one_row_too_is_no_fault_of_mixing() -> None:
    def rounds(state: LayerState, width: int) -> float:
        return 0.1 if width == 1 else 0.0

    for dtype in (mx.bfloat16, mx.float32):
        found = probe(rounds, dtype)
        assert (found.ragged, found.mixed) == (True, True)


def test_a_model_whose_answer_depends_on_how_its_prompt_is_cut_is_refused() -> None:
    with pytest.raises(ModelError, match="how its prompt is cut"):
        probe(lambda state, width: 1.0 if width == 1 else 0.0)


def test_a_model_that_answers_with_no_numbers_is_refused() -> None:
    with pytest.raises(ModelError, match="not numbers"):
        probe(lambda state, width: float("nan"))


def test_a_model_that_fails_is_refused_with_its_own_words() -> None:
    def fails(state: LayerState, width: int) -> float:
        raise RuntimeError("no such kernel")

    with pytest.raises(ModelError, match="cannot be run here: no such kernel"):
        probe(fails)


def test_a_model_that_answers_for_more_tokens_than_it_was_asked_for_is_refused() -> None:
    def forward(
        rows: Rows, tokens: mx.array, parts: Sequence[Part], at: Sequence[int] | None, *, mixed: bool
    ) -> mx.array:
        with rows.launch(parts, mixed=mixed):
            return mx.zeros((tokens.size, 8))

    with pytest.raises(ModelError, match=r"logits of shape \(9, 8\)"):
        probed(forward)


def test_tokens_that_a_model_rules_out_do_not_hide_what_differs() -> None:
    ruled_out = mx.array([[1.0, 3.0, -mx.inf]])
    assert apart(ruled_out, ruled_out) == 0
    assert apart(mx.array([[1.0, 2.0, -mx.inf]]), ruled_out) == 0.5
    assert apart(mx.array([[1.0, 3.0, 0.0]]), ruled_out) == float("inf")
