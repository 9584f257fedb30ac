"""The probe against made-up models, each with one fault."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.attention_state import AppendState
from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardBatch, ForwardPart
from ingot.cache.layer_state import LayerState
from ingot.errors import ModelError
from ingot.models.probe import ForwardFunction, Probe, ProbeFindings, ProbeVariants, logits_gap
from ingot.models.report import model_notes

Shift = Callable[[LayerState, int], float | mx.array]


def probe(shift: Shift, dtype: mx.Dtype = mx.float32, *, unlike: bool = True, in_chunks: bool = False) -> ProbeFindings:
    """Findings about a model whose logits follow from the newest token, moved by `shift(state, width)`."""

    def forward(
        rows: BatchState, tokens: mx.array, parts: Sequence[ForwardPart], at: Sequence[int] | None, *, mixed: bool
    ) -> mx.array:
        assert at is not None
        with rows.launch(parts, mixed=mixed) as layers:
            width = min(part.width for part in parts)
            return mx.sin(tokens[mx.array(list(at))][:, None] * mx.arange(1, 9)) + shift(layers[0], width)

    return probed(forward, dtype, unlike=unlike, in_chunks=in_chunks)


def probed(
    forward: ForwardFunction, dtype: mx.Dtype = mx.float32, *, unlike: bool = True, in_chunks: bool = False
) -> ProbeFindings:
    return Probe(forward, lambda: BatchState([AppendState()]), dtype, unlike=unlike, in_chunks=in_chunks).run()


def forward_parts(state: LayerState) -> Sequence[ForwardBatch]:
    return state.whole.parts if state.whole else [state.open_batch]


def rows(state: LayerState) -> int:
    return sum(part.count for part in forward_parts(state))


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
        starts = forward_parts(state)[0].starts
        return mx.array([[0.1 if start < max(starts) else 0.0] for start in starts]) if len(starts) > 1 else 0.0

    found = probe(shift)
    assert (found.ragged, found.mixed) == (False, True)


def test_a_family_known_not_to_mix_is_not_tried() -> None:
    found = probe(lambda state, width: 0.0, unlike=False)
    assert (found.ragged, found.mixed) == (False, False)


def test_a_model_that_goes_wrong_in_mixed_launches_has_fixed_experts_none_and_still_decodes_together() -> None:
    found = probe(lambda state, width: 0.1 if state.whole else 0.0)
    assert (found.ragged, found.mixed) == (True, False)


def test_a_model_whose_rows_run_apart_may_still_mix() -> None:
    found = probe(lambda state, width: 0.1 if any(part.count > 1 for part in forward_parts(state)) else 0.0)
    assert (found.ragged, found.mixed) == (False, True)


def test_a_difference_that_rounding_makes_in_one_row_too_is_no_fault_of_mixing() -> None:
    def rounds(state: LayerState, width: int) -> float:
        return 0.1 if width == 1 else 0.0

    for dtype in (mx.bfloat16, mx.float32):
        found = probe(rounds, dtype)
        assert (found.ragged, found.mixed) == (True, True)


def test_a_model_whose_answer_depends_on_how_its_prompt_is_cut_is_run_plainly_and_that_is_said() -> None:
    found = probe(lambda state, width: 1.0 if width == 1 else 0.0)
    assert (found.ragged, found.mixed) == (False, False) and found.rounding > 0.3


class Mixture:
    """A made-up model that also answers with one of two experts, by the toss of a coin: as a router that wavers."""

    def __init__(self, *, wrong: bool = False) -> None:
        self.wrong, self.is_nudged, self.has_fixed_experts, self.passes = wrong, False, False, 0

    def __call__(
        self,
        rows_: BatchState,
        tokens: mx.array,
        parts: Sequence[ForwardPart],
        at: Sequence[int] | None,
        *,
        mixed: bool,
    ) -> mx.array:
        assert at is not None
        self.passes += 1
        with rows_.launch(parts, mixed=mixed) as layers:
            together = rows(layers[0]) > 1
        expert = 0 if self.has_fixed_experts else hash((self.is_nudged, mixed, together, len(at), tokens.size)) % 7
        off = 0.5 if self.wrong and together else 0.0
        return mx.sin((tokens[mx.array(list(at))][:, None] + 31 * expert) * mx.arange(1, 9)) + off

    @contextmanager
    def nudged(self) -> Iterator[None]:
        self.is_nudged = True
        yield
        self.is_nudged = False

    @contextmanager
    def fixed_experts(self) -> Iterator[None]:
        self.has_fixed_experts = True
        yield
        self.has_fixed_experts = False

    def found(self, original: Callable[[list[int]], mx.array] | None = None) -> ProbeFindings:
        variants = ProbeVariants(self.nudged, self.fixed_experts, original)
        return Probe(self, lambda: BatchState([AppendState()]), mx.bfloat16, unlike=True, variants=variants).run()


def cut(state: LayerState) -> mx.array:
    """As far as logits of a part are moved by where it was cut before."""
    return mx.array([[0.4 * (start > 0)] for part in forward_parts(state) for start in part.starts])


def test_a_model_whose_own_code_depends_on_the_cut_may_mix_rows_that_get_what_they_get_alone_in_the_same_chunks() -> (
    None
):
    found = probe(lambda state, width: cut(state), in_chunks=True)
    assert (found.ragged, found.mixed, found.rounding) == (True, True, 0.0)


def test_such_a_model_that_goes_wrong_in_company_still_runs_its_rows_apart() -> None:
    found = probe(lambda state, width: cut(state) + (0.1 if rows(state) > 1 else 0.0), in_chunks=True)
    assert (found.ragged, found.mixed) == (False, False)


def test_a_router_that_wavers_is_no_fault_of_mixing() -> None:
    found = Mixture().found()
    assert (found.ragged, found.mixed, found.rounding, found.wrong) == (True, True, 0.0, None)


def test_a_mixture_that_goes_wrong_in_company_is_found_though_its_router_wavers() -> None:
    found = Mixture(wrong=True).found()
    assert (found.ragged, found.mixed) == (False, False)


def test_a_mixture_whose_experts_cannot_be_fixed_is_run_plainly_and_that_is_said() -> None:
    model = Mixture()
    variants = ProbeVariants(model.nudged)
    found = Probe(model, lambda: BatchState([AppendState()]), mx.bfloat16, unlike=True, variants=variants).run()
    assert (found.ragged, found.mixed) == (False, False) and found.rounding > 0.3
    [note] = [note for note in model_notes(nn.Module(), None, found, None, None, None) if "one after another" in note]
    assert "rounding alone moves this model's logits by" in note


def test_what_differs_from_mlx_lms_own_answer_by_more_than_rounding_is_wrong() -> None:
    def original(prompt: list[int], off: float = 0.0) -> mx.array:
        return mx.sin(mx.array(prompt[-1:])[:, None] * mx.arange(1, 9)) + off

    def found(off: float) -> ProbeFindings:
        model = Mixture()
        model.has_fixed_experts = True
        return Probe(
            model,
            lambda: BatchState([AppendState()]),
            mx.float32,
            unlike=True,
            variants=ProbeVariants(original=partial(original, off=off)),
        ).run()

    assert found(0.0).wrong is None
    assert found(1.0).wrong is not None and "differ from mlx-lm's own by" in str(found(1.0).wrong)


def test_a_steady_model_runs_no_variants() -> None:
    model = Mixture()
    model.has_fixed_experts = True
    assert model.found().mixed
    assert model.passes == 3 + 3, "three prompts alone, and three passes beside each other"


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
        rows: BatchState, tokens: mx.array, parts: Sequence[ForwardPart], at: Sequence[int] | None, *, mixed: bool
    ) -> mx.array:
        with rows.launch(parts, mixed=mixed):
            return mx.zeros((tokens.size, 8))

    with pytest.raises(ModelError, match=r"logits of shape \(9, 8\)"):
        probed(forward)


def test_tokens_that_a_model_rules_out_do_not_hide_what_differs() -> None:
    ruled_out = mx.array([[1.0, 3.0, -mx.inf]])
    assert logits_gap(ruled_out, ruled_out) == 0
    assert logits_gap(mx.array([[1.0, 2.0, -mx.inf]]), ruled_out) == 0.5
    assert logits_gap(mx.array([[1.0, 3.0, 0.0]]), ruled_out) == float("inf")
