"""The probe against made-up models, each with one fault."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from ingot.cache.slots import Slots

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.layers import AppendState, LayerState
from ingot.errors import ModelError
from ingot.models.probe import Findings, Probe, apart

Shift = Callable[[LayerState, int], float]


def probe(shift: Shift, dtype: mx.Dtype = mx.float32, *, unlike: bool = True, mixing: bool = True) -> Findings:
    """Findings about a model whose logits follow from the newest token, moved by `shift(state, width)`."""

    def forward(tokens: mx.array, layers: list[LayerState], at: Sequence[int] | None) -> mx.array:
        assert at is not None
        newest = mx.take_along_axis(tokens, mx.array(list(at))[:, None], axis=1)
        return mx.sin(newest[..., None] * mx.arange(1, 9)) + shift(layers[0], tokens.shape[1])

    def forward_mixed(tokens: mx.array, layers: list[LayerState], at: Sequence[int] | None) -> mx.array:
        assert at is not None
        return forward(tokens[mx.array(list(at))][:, None], layers, [0] * len(at))[:, 0]

    probe = Probe(forward, forward_mixed, lambda: Slots([AppendState()]), dtype, unlike=unlike, mixing=mixing)
    return probe.run()


def rows(state: LayerState) -> int:
    return 1 if state.whole else state.open_launch.rows


def test_a_faultless_model_may_mix_and_pad_its_rows() -> None:
    found = probe(lambda state, width: 0.0)
    assert (found.ragged, found.padded, found.mixed, found.vocab) == (True, True, True, 8)


def test_a_model_that_goes_wrong_in_company_runs_its_rows_apart() -> None:
    found = probe(lambda state, width: 0.1 if rows(state) > 1 else 0.0)
    assert (found.ragged, found.padded) == (False, False)


def test_a_model_that_fails_in_company_runs_its_rows_apart() -> None:
    def fails(state: LayerState, width: int) -> float:
        if rows(state) > 1:
            raise TypeError
        return 0.0

    found = probe(fails)
    assert (found.ragged, found.padded) == (False, False)


def test_a_model_that_padding_leads_astray_still_decodes_together() -> None:
    astray = False

    def shift(state: LayerState, width: int) -> float:
        nonlocal astray
        if width > 1:
            astray = rows(state) > 1
        return 0.1 if astray and width == 1 else 0.0

    found = probe(shift)
    assert (found.ragged, found.padded) == (True, False)


def test_a_family_known_not_to_mix_is_not_tried() -> None:
    found = probe(lambda state, width: 0.0, unlike=False)
    assert (found.ragged, found.padded, found.mixed) == (False, False, False)


def test_where_launches_cannot_share_a_pass_rows_unlike_each_other_still_share_a_launch() -> None:
    found = probe(lambda state, width: 0.0, mixing=False)
    assert (found.ragged, found.padded, found.mixed) == (True, True, False)


def test_a_model_that_goes_wrong_in_mixed_launches_is_given_none() -> None:
    found = probe(lambda state, width: 0.1 if state.whole else 0.0)
    assert (found.ragged, found.padded, found.mixed) == (True, True, False)


def test_a_model_whose_rows_run_apart_may_still_mix() -> None:
    parts: list[int] = []

    def shift(state: LayerState, width: int) -> float:
        if state.whole:
            parts.extend(part.rows for part in state.whole.parts)
            return 0.0
        return 0.1 if rows(state) > 1 else 0.0

    found = probe(shift)
    assert (found.ragged, found.mixed) == (False, True)
    assert set(parts) == {1}


def test_a_difference_that_rounding_makes_in_one_row_too_is_no_fault_of_mixing() -> None:
    def rounds(state: LayerState, width: int) -> float:
        return 0.1 if width == 1 else 0.0

    assert probe(rounds, mx.bfloat16).padded
    assert probe(rounds, mx.float32).padded


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


def test_tokens_that_a_model_rules_out_do_not_hide_what_differs() -> None:
    ruled_out = mx.array([[1.0, 3.0, -mx.inf]])
    assert apart(ruled_out, ruled_out) == 0
    assert apart(mx.array([[1.0, 2.0, -mx.inf]]), ruled_out) == 0.5
    assert apart(mx.array([[1.0, 3.0, 0.0]]), ruled_out) == float("inf")
