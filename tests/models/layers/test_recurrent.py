"""Recurrent mixers that the native kernels compute, against the models' own code for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache import records
from ingot.cache.forward_batch import ForwardPart
from ingot.cache.layer_state import RecurrentState
from ingot.kernels.cpu import native
from ingot.kernels.device import Device, current_device
from ingot.kernels.paged_attention.kernels import has_paged_kernels
from ingot.models.adapter import ModelAdapter, adapt_model, load_model_adapter
from ingot.models.layers import swapping
from ingot.models.layers.modules import named_parameters
from ingot.models.layers.recurrent import KernelRecurrence, NativeRecurrence, swap_recurrences
from ingot.models.probe import logits_gap
from tests import engines, tiny
from tests.launches import computed, computed_last, decoded
from tests.models.layers import family_configs

only_recurrent = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

HYBRID = Path(__file__).parents[3] / "foundry" / "models" / "hybrid"
FAMILIES = [
    *("qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "kimi_k3", "bailing_moe_v3"),
    *("mamba2", "granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe"),
]
PROMPTS = [list(range(3, 3 + length)) for length in (5, 70, 1, 33)]
STEPS = 12


def greedy(adapter: ModelAdapter) -> list[list[int]]:
    """Answers to all prompts: each computed alone, in two parts, then decoded together."""
    rows = adapter.new_batch_state()
    live = [rows.new() for _ in PROMPTS]
    chosen: list[list[int]] = []
    for row, prompt in zip(live, PROMPTS, strict=True):
        for part in (prompt[: len(prompt) // 2], prompt[len(prompt) // 2 :]):
            if part:
                logits = computed_last(adapter, rows, row, part)
        chosen.append([int(mx.argmax(logits[0]).item())])
    for _ in range(STEPS):
        logits = decoded(adapter, rows, live, [own[-1] for own in chosen])
        for own, token in zip(chosen, mx.argmax(logits, axis=-1).tolist(), strict=True):
            own.append(token)
    return chosen


def natively(model: Any) -> int:
    return sum(isinstance(module, NativeRecurrence) for _, module in model.named_modules())


@only_recurrent
@pytest.mark.parametrize("name", [*FAMILIES, "hybrid"])
def test_greedy_answers_are_those_of_the_models_own_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> ModelAdapter:
        model = tiny.build("hybrid") if name == "hybrid" else family_configs.build(name)
        return adapt_model(model, {}, current_device(), widest=128)

    ours = made()
    assert natively(ours.model) > 0 and ours.mixed
    monkeypatch.setattr(native, "available", lambda: False)
    plain = made()
    assert natively(plain.model) == 0
    assert greedy(ours) == greedy(plain)


@only_recurrent
def test_a_trained_hybrid_answers_as_with_mlxs_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load_model_adapter(HYBRID, current_device(), widest=128)
    assert natively(ours.model) == 6
    monkeypatch.setattr(native, "available", lambda: False)
    assert greedy(ours) == greedy(load_model_adapter(HYBRID, current_device(), widest=128))


@only_recurrent
@pytest.mark.parametrize("name", FAMILIES)
def test_a_swapped_model_has_the_same_weights(name: str) -> None:
    model = family_configs.build(name)
    before = dict(named_parameters(model))
    assert swap_recurrences(model) > 0
    assert {path: id(array) for path, array in named_parameters(model)} == {
        path: id(array) for path, array in before.items()
    }


@only_recurrent
def test_other_caches_are_left_to_the_models_own_code() -> None:
    model = tiny.build("hybrid")
    tokens = mx.array([PROMPTS[1]])
    before = model(tokens)
    swap_recurrences(model)
    assert mx.array_equal(model(tokens), before).item()


@only_recurrent
@pytest.mark.parametrize("count", [1, 3])
def test_what_was_kept_of_a_row_does_not_change_with_it(count: int) -> None:
    """A record must not share memory with the recurrent states, which are written in place."""
    adapter = tiny.adapter("hybrid")
    rows = adapter.new_batch_state()
    row, *_ = [rows.new() for _ in range(count)]
    computed(adapter, rows, row, [1, 2, 3])
    record = records.take_record(rows, row, 0)
    mx.eval(record.checkpoint.arrays() if record.checkpoint else [])
    after = computed(adapter, rows, row, [4, 5])
    other = rows.new()
    records.restore_row(rows, other, [record], 3)
    assert mx.array_equal(computed(adapter, rows, other, [4, 5]), after).item()
    again = rows.new()
    records.restore_row(rows, again, [record], 3)
    assert mx.array_equal(computed(adapter, rows, again, [4, 5]), after).item()


@only_recurrent
@pytest.mark.parametrize("name", [*FAMILIES, "hybrid"])
def test_tokens_are_taken_back_one_by_one_and_nothing_is_computed_again(name: str) -> None:
    model = tiny.build("hybrid") if name == "hybrid" else family_configs.build(name)
    adapter = adapt_model(model, {}, current_device(), widest=128)
    for right in range(5):
        rows, single = adapter.new_batch_state(), adapter.new_batch_state()
        row, other, alone = rows.new(), rows.new(), single.new()
        for each, own in ((rows, row), (rows, other), (single, alone)):
            computed_last(adapter, each, own, PROMPTS[1])
        draft = [7, 9, 11, 13, 15]
        parts = [ForwardPart((other,), 1), ForwardPart((row,), len(draft), tentative=4)]
        mx.eval(adapter.run(rows, mx.array([5, *draft]), parts), rows.pending())
        assert rows.rewind(row, len(PROMPTS[1]) + 1 + right) == len(PROMPTS[1]) + 1 + right
        for token in draft[: 1 + right]:
            decoded(adapter, single, [alone], [token])
        ours, theirs = decoded(adapter, rows, [row], [21]), decoded(adapter, single, [alone], [21])
        assert mx.abs(ours - theirs).max().item() < 1e-4, right  # products of plain weights round by their number
        rows.check()


@only_recurrent
def test_where_states_take_too_much_what_was_right_is_computed_again() -> None:
    adapter = adapt_model(tiny.build("hybrid"), {}, current_device(), widest=128)
    rows = adapter.new_batch_state(earlier=0)
    row = rows.new()
    computed_last(adapter, rows, row, PROMPTS[1])
    adapter.run(rows, mx.array([7, 9, 11]), [ForwardPart((row,), 3, tentative=2)])
    assert rows.rewind(row, len(PROMPTS[1]) + 2) == len(PROMPTS[1])


only_kernels = pytest.mark.skipif(
    not has_paged_kernels(engines.GPU), reason="kernels run on no device here, nor can be emulated"
)


def logits(adapter: ModelAdapter) -> mx.array:
    """Of three rows: prompts of unlike lengths in one pass, a piece beside rows that decode, and all decoding."""
    rows = adapter.new_batch_state()
    one, two, three = (rows.new() for _ in range(3))
    steps = [
        [ForwardPart((one,), 40), ForwardPart((two,), 3)],
        [ForwardPart((two,), 1), ForwardPart((one,), 5), ForwardPart((three,), 17)],
        [ForwardPart((one, two, three), 1)],
        [ForwardPart((three, one), 1), ForwardPart((two,), 4)],
    ]
    found = []
    for step in steps:
        count = sum(part.width * len(part.rows) for part in step)
        found.append(adapter.run(rows, mx.arange(count) % 50, step))
        mx.eval(found[-1], rows.pending())
    return mx.concatenate(found)


@only_kernels
@pytest.mark.parametrize("rules", ["cuda", "metal"])
@pytest.mark.parametrize("name", [*FAMILIES, "granitemoehybrid-dense"])
def test_what_kernels_compute_is_what_the_models_own_code_computes(
    name: str, rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(rules, "a CPU that follows a GPU's rules", 1 << 34)  # type: ignore[arg-type]
    with engines.acting_as(rules):
        ours = adapt_model(family_configs.build(name), family_configs.config(name), device)
        assert any(isinstance(module, KernelRecurrence) for _, module in ours.model.named_modules())
        assert not any("recurrent layers by mlx-lm" in note for note in ours.notes)
        found = logits(ours)
        monkeypatch.setattr(swapping, "kernel_recurrence", lambda module, kernels: None)
        theirs = adapt_model(family_configs.build(name), family_configs.config(name), device)
        assert not any(isinstance(module, KernelRecurrence) for _, module in theirs.model.named_modules())
        assert ours.mixed and theirs.mixed
        assert logits_gap(found, logits(theirs)) < 1e-4


@only_kernels
@pytest.mark.parametrize("rules", ["cuda", "metal"])
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "lfm2"])
def test_kernels_write_what_may_be_taken_back_to_another_slot_and_copy_nothing(
    name: str, rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(rules, "a CPU that follows a GPU's rules", 1 << 34)  # type: ignore[arg-type]
    with engines.acting_as(rules):
        adapter = adapt_model(family_configs.build(name), family_configs.config(name), device)
        rows, single = adapter.new_batch_state(), adapter.new_batch_state()
        row, other, alone = rows.new(), rows.new(), single.new()
        for each, own in ((rows, row), (rows, other), (single, alone)):
            computed_last(adapter, each, own, PROMPTS[1])
        for method in ("row", "put"):
            monkeypatch.delattr(RecurrentState, method)
        length = len(PROMPTS[1])
        for right in (2, 0, 1):
            draft = [7, 9, 11]
            parts = [ForwardPart((other,), 1), ForwardPart((row,), len(draft), tentative=2)]
            mx.eval(adapter.run(rows, mx.array([5, *draft]), parts), rows.pending())
            accepted = draft[: 1 + right]
            if rows.rewind(row, length + len(accepted)) == length:
                assert right < 2
                mx.eval(adapter.run(rows, mx.array(accepted), [ForwardPart((row,), len(accepted))]), rows.pending())
            length += len(accepted)
            for token in accepted:
                decoded(adapter, single, [alone], [token])
        ours, theirs = decoded(adapter, rows, [row], [21]), decoded(adapter, single, [alone], [21])
        assert logits_gap(ours, theirs) < 1e-4
        assert rows.count == 2
        rows.check()


@only_kernels
def test_slots_are_given_back_by_rows_that_leave_and_passes_that_fail() -> None:
    with engines.acting_as("cuda"):
        adapter = adapt_model(family_configs.build("lfm2"), family_configs.config("lfm2"), engines.GPU)
        rows = adapter.new_batch_state()
        row, other = rows.new(), rows.new()
        for each in (row, other):
            computed_last(adapter, rows, each, PROMPTS[0])
        with pytest.raises(RuntimeError), rows.launch([ForwardPart((row, other), 3, tentative=2)]):
            raise RuntimeError
        assert (row.slot, row.target, row.before) == (0, None, None)
        mx.eval(adapter.run(rows, mx.arange(3), [ForwardPart((row,), 3, tentative=2)]), rows.pending())
        assert row.slot not in (0, other.slot) and rows.count == 2
        rows.leave(row)
        rows.leave(other)
        assert rows.count == 0 and rows.trim()
        rows.check()


@only_kernels
def test_projections_that_are_not_alike_are_not_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> ModelAdapter:
        model = family_configs.build("qwen3_5")
        mixer = next(module for _, module in model.named_modules() if "in_proj_z" in module)
        mixer.in_proj_z = nn.QuantizedLinear.from_linear(mixer.in_proj_z, group_size=32, bits=8)
        return adapt_model(model, family_configs.config("qwen3_5"), engines.GPU)

    ours = made()
    mixers = [module for _, module in ours.model.named_modules() if isinstance(module, KernelRecurrence)]
    assert [mixer.joined_in is None for mixer in mixers] == [True, False]
    found = logits(ours)
    monkeypatch.setattr(swapping, "kernel_recurrence", lambda module, kernels: None)
    assert logits_gap(found, logits(made())) < 1e-4


@only_kernels
def test_heads_too_small_for_the_kernels_run_their_own_code_and_the_adapter_says_so() -> None:
    plain = adapt_model(tiny.build("hybrid"), tiny.CONFIGS["hybrid"], engines.GPU)
    assert not any(isinstance(module, KernelRecurrence) for _, module in plain.model.named_modules())
    assert any("recurrent layers by the family's own modules, slower: keys of" in note for note in plain.notes)
