"""Steps that are compiled, over kernels that are plain operations of all data that real ones are given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from bench import host, random_models
from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.kernels.device import Device
from ingot.kernels.paged_attention.inputs import KernelRows, KVSlabs
from ingot.kernels.paged_attention.kernels import PagedAttention, has_paged_kernels
from ingot.kernels.paged_attention.rope import RopeKernel
from ingot.kernels.paged_attention.shapes import KVSplits
from ingot.kernels.recurrent.kernels import RecurrentSpans
from ingot.kernels.recurrent.mixers import DeltaKernels
from ingot.models import forward as module
from ingot.models.adapter import ModelAdapter, adapt_model, rehearse_steps
from ingot.models.forward import STEP_TRIALS, CompiledSteps, run_forward
from ingot.models.layers import swapping
from ingot.models.layers.swapping import restore_mlx_lm_modules
from ingot.models.probe import logits_gap
from tests import engines, tiny
from tests.memory import pretended
from tests.models.layers import family_configs

pytestmark = [
    pytest.mark.skipif(not has_paged_kernels(engines.GPU), reason="kernels run on no device here, nor can be emulated"),
    pretended,
]


def turn(
    self: RopeKernel, projected: mx.array, angles: mx.array, slots: mx.array, slabs: KVSlabs, after: mx.array
) -> tuple[mx.array, mx.array]:
    heads = self._shape.heads
    queries = projected[:, : heads.heads * heads.key_size].reshape(-1, heads.heads, heads.key_size)
    shown = angles[:, None, :1] + slots[: queries.shape[0], None, 1:] * 0.01
    # A step that is run twice is to give the same twice.
    return queries + shown.astype(queries.dtype), after * 0 + slots.sum() % 1000


def attend(
    self: PagedAttention, queries: mx.array, rows: KernelRows, slabs: KVSlabs, after: mx.array, coded: None = None
) -> mx.array:
    lengths = rows.rows[: len(rows.spans), 0]
    tokens = mx.concatenate([mx.full(count, n) for n, (_, count) in enumerate(rows.spans)])
    pages = rows.table[rows.rows[: len(rows.spans), 4]] % 7
    lain = self.found(slabs)[0].reshape(-1)[:1] % 2
    shown = (lengths + pages)[tokens][:, None, None] * 0.02 + (after % 5 + lain) * 0.1
    return queries * mx.cos(shown + rows.splits(KVSplits(64, False), 0)).astype(queries.dtype)


def mix(
    self: DeltaKernels, joint: mx.array, spans: RecurrentSpans, states: Sequence[mx.array]
) -> tuple[mx.array, list[mx.array]]:
    """Tails and states are written in place, as the kernels do, where they can be."""
    tails, states_of_heads = states
    slots, rows = spans.spans[: spans.rows, 2], joint[: spans.rows]
    tail = rows[:, : tails.shape[-1]] + tails[slots, -1] * 0.5
    tails[slots] = mx.broadcast_to(tail[:, None], (spans.rows, *tails.shape[1:]))
    heads = states_of_heads.shape[1]
    state = states_of_heads[slots] * 0.5 + rows[:, -heads:, None, None] * 0.1
    states_of_heads[slots] = state
    return mx.tanh(joint[:, : self.shape.inner] + tail.mean() + state.mean()), []


class Counted:
    """The model, and how often Python went through it."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0
        self.model_type = model.model_type

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.calls += 1
        logits: mx.array = self.model(tokens, cache=cache)
        return logits


def adapted(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any] = tiny.CONFIGS["kernel"], device: Device = engines.GPU
) -> ModelAdapter:
    made = adapt_model(random_models.build(config, spread=0.2), config, device)
    assert made.steps is None, "the emulator cannot be asked without running"
    monkeypatch.setattr(RopeKernel, "__call__", turn)
    monkeypatch.setattr(PagedAttention, "attend", attend)
    monkeypatch.setattr(DeltaKernels, "mix", mix)
    return made


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModelAdapter:
    return adapted(monkeypatch)


class Session:
    """Rows that begin with prompts of these lengths and decode."""

    def __init__(self, adapter: ModelAdapter, model: Any, lengths: list[int]) -> None:
        self._adapter, self._model = adapter, model
        self.states: BatchState = adapter.new_batch_state()
        self.rows: list[Row] = [self.states.new() for _ in lengths]
        for number, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            self._run([5 + number] * length, ForwardPart((row,), length))

    def _run(self, tokens: list[int], part: ForwardPart) -> mx.array:
        inputs = mx.array(tokens, mx.uint32)
        logits = run_forward(self._model, self._adapter.selection, self.states, inputs, [part], None, mixed=True)
        mx.eval(logits, self.states.pending())
        return logits

    def step(self, tokens: list[int], rows: list[Row]) -> mx.array:
        return self._run(tokens, ForwardPart(tuple(rows), 1))


def compare(adapter: ModelAdapter, steps: CompiledSteps, lengths: list[int], count: int) -> None:
    dice, plain, mine = random.Random(1), Session(adapter, adapter.model, lengths), Session(adapter, steps, lengths)
    for number in range(count):
        some = slice(0, 1 + number // 8 % len(lengths))
        tokens = [dice.randrange(90) for _ in plain.rows[some]]
        wanted, found = plain.step(tokens, plain.rows[some]), mine.step(tokens, mine.rows[some])
        assert logits_gap(found, wanted) < 1e-5, f"at step {number}"  # what is compiled may round elsewhere


def test_they_say_what_the_model_says_while_rows_grow_join_and_leave(adapter: ModelAdapter) -> None:
    counted = Counted(adapter.model)
    steps = CompiledSteps(counted)
    compare(adapter, steps, [3, 60, 130], 60)
    assert steps.refusal is None
    prompts, seen, graphs = 3, 1, len(steps._steps)
    assert 3 <= graphs <= 9
    # Once by itself at each trial, and once a graph: not at every step.
    assert counted.calls <= prompts + seen + STEP_TRIALS + 1 + graphs


RECURRENT = {
    "by kernels of ours": tiny.CONFIGS["kernel-hybrid"],
    "by the model's own code": {**family_configs.config("lfm2"), "hidden_size": 64, "block_dim": 64},
}


@pytest.mark.parametrize("computed", RECURRENT)
def test_states_of_recurrent_layers_pass_through_steps(monkeypatch: pytest.MonkeyPatch, computed: str) -> None:
    if computed == "by the model's own code":
        monkeypatch.setattr(swapping, "kernel_recurrence", lambda module, kernels: None)
    adapter = adapted(monkeypatch, RECURRENT[computed])
    counted = Counted(adapter.model)
    steps = CompiledSteps(counted)
    compare(adapter, steps, [3, 60], 12)
    assert steps.refusal is None
    assert counted.calls < 2 + 12, "prompts, and not every step"


def test_recurrent_layers_are_compiled_only_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapted(monkeypatch, tiny.CONFIGS["kernel-hybrid"])
    steps = CompiledSteps(adapter.model, with_recurrent=False)
    compare(adapter, steps, [3, 60], 6)
    assert steps.refusal is None and steps.graph_count == 0


def test_attention_of_a_models_own_code_is_not_compiled(adapter: ModelAdapter) -> None:
    restore_mlx_lm_modules(adapter.model)
    steps = CompiledSteps(adapter.model)
    compare(adapter, steps, [3, 60], 6)
    assert steps.refusal == "qwen3 reads data of its rows that cannot be compiled"


def test_layers_that_split_batches_by_themselves_are_compiled_where_they_read_states_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = adapted(monkeypatch, {**tiny.CONFIGS["mixed"], "head_dim": 16})
    steps = CompiledSteps(Counted(adapter.model))
    compare(adapter, steps, [3, 60, 30], 20)
    assert steps.refusal is None


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_asks_metal_for_few_operations(rows: int) -> None:
    config = tiny.CONFIGS["kernel-packed"]
    few, more = (
        host.operations_of(
            host.OurSteps(
                host.as_compiled_there(
                    adapt_model(tiny.build("kernel-packed", num_hidden_layers=layers), config, host.METAL)
                ),
                [70 + number for number in range(rows)],
            )
        )
        for layers in (2, 3)
    )
    layer = more - few
    assert (layer["CustomKernel"], layer["QuantizedMatmul"]) == (2, 4)
    assert sum(layer.values()) <= 15, layer


def test_slabs_that_kernels_take_as_they_lie_are_data(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapted(monkeypatch, device=Device("metal", "a GPU", 1))
    steps = CompiledSteps(adapter.model)
    plain, mine = Session(adapter, adapter.model, [3, 20]), Session(adapter, steps, [3, 20])
    for number in range(10):
        for session in (plain, mine):
            for state in session.states.states:
                state.storage.keys[0][:1] = mx.array(number / 3)
        wanted, found = plain.step([7, 8], plain.rows), mine.step([7, 8], mine.rows)
        assert logits_gap(found, wanted) < 1e-5, f"at step {number}"
    assert steps.refusal is None and steps.graph_count == 1


def test_positions_that_a_models_own_code_reads_are_data(adapter: ModelAdapter) -> None:
    class Scaled(Counted):
        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            return super().__call__(tokens, cache) * (1 + cache[0].offset.at[..., None] / 32)

    plain, steps = Scaled(adapter.model), CompiledSteps(Scaled(adapter.model))
    one, other = Session(adapter, plain, [3, 20]), Session(adapter, steps, [3, 20])
    for number in range(10):
        assert logits_gap(other.step([7, 8], other.rows), one.step([7, 8], one.rows)) < 1e-5, f"at step {number}"
    assert steps.refusal is None and steps.graph_count == 1


def test_a_model_that_keeps_something_of_a_step_is_not_compiled(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeps(
        self: PagedAttention, queries: mx.array, rows: KernelRows, slabs: KVSlabs, after: mx.array, coded: None = None
    ) -> mx.array:
        return attend(self, queries, rows, slabs, after) + 0.01 * rows.spans[0][0]

    monkeypatch.setattr(PagedAttention, "attend", keeps)
    steps = CompiledSteps(adapter.model)
    compare(adapter, steps, [3, 60], 24)
    assert steps.refusal is not None and steps.refusal.startswith("compiled steps differ by")


class Shifted(CompiledSteps):
    """Whose graphs answer otherwise than the model, by as much of each logit."""

    def __init__(self, model: Any, by: float) -> None:
        super().__init__(model)
        self._by = by

    def _trace(self, *inputs: Any) -> tuple[mx.array, tuple[list[mx.array], list[list[mx.array]]]]:
        logits, after = super()._trace(*inputs)
        return logits * (1 + self._by), after


def test_steps_that_round_elsewhere_are_compiled(adapter: ModelAdapter) -> None:
    steps = Shifted(adapter.model, 1e-6)
    compare(adapter, steps, [3, 60], 24)
    assert steps.refusal is None and steps._trials == STEP_TRIALS


def test_steps_that_are_off_by_more_than_the_model_rounds_are_not_compiled(adapter: ModelAdapter) -> None:
    session, steps = Session(adapter, adapter.model, [3, 60]), Shifted(adapter.model, 0.01)
    wanted = [session.step([7, 8], session.rows) for _ in range(6)]
    again = Session(adapter, steps, [3, 60])
    for number, logits in enumerate(wanted):
        found = again.step([7, 8], again.rows)
        assert mx.array_equal(found, logits).item(), f"at step {number}: trials leave no trace in states"
    assert steps.refusal is not None and steps.refusal.startswith("compiled steps differ by 0.0")


def test_how_far_a_model_rounds_is_asked_of_itself(adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Shifted(adapter.model, 0.01)
    monkeypatch.setattr(CompiledSteps, "_rounding_gap", lambda *_: 0.02)
    session = Session(adapter, steps, [3, 60])
    for _ in range(6):
        session.step([7, 8], session.rows)
    assert steps.refusal is None


def test_what_is_asked_of_a_step_and_not_known_is_not_compiled(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = CompiledSteps(adapter.model)
    monkeypatch.setattr(module, "_is_known_key", lambda key: key != "calls")
    compare(adapter, steps, [3, 60], 12)
    assert steps.refusal == "qwen3 reads data of its rows that cannot be compiled"


def test_positions_that_a_models_own_code_computes_with_are_data(adapter: ModelAdapter) -> None:
    class Scaled(Counted):
        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            positions = mx.arange(tokens.shape[1]) + cache[0].offset
            return super().__call__(tokens, cache) * (1 + positions[..., None] // 32)

    scaled = Scaled(adapter.model)
    steps = CompiledSteps(scaled)
    plain, mine = Session(adapter, scaled, [3, 60]), Session(adapter, steps, [3, 60])
    for number in range(40):
        wanted, found = plain.step([7, number], plain.rows), mine.step([7, number], mine.rows)
        assert logits_gap(found, wanted) < 1e-5, f"at step {number}"
    assert steps.refusal is None and steps.graph_count > 0


def test_steps_that_were_rehearsed_are_compiled_before_the_first_request(adapter: ModelAdapter) -> None:
    counted = Counted(adapter.model)
    made = replace(adapter, steps=CompiledSteps(counted))
    rehearse_steps(made)
    assert made.steps is not None and made.steps.refusal is None
    calls, session = counted.calls, Session(made, made.steps, [70])
    assert counted.calls == calls + 1, "the prompt"
    session.step([7], session.rows)
    assert counted.calls == calls + 1


def test_few_graphs_are_kept(adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_COMPILED_STEPS", 2)
    steps = CompiledSteps(adapter.model)
    compare(adapter, steps, [3, 60, 130], 60)
    assert len(steps._steps) == 2 and steps.refusal is None


def test_logits_after_some_tokens_alone_are_the_models_own(adapter: ModelAdapter) -> None:
    steps = CompiledSteps(adapter.model)
    compare(adapter, steps, [3, 60], 12)
    assert steps.refusal is None and steps._steps
    session = Session(adapter, steps, [3, 60])
    for at in ([], [1], [0]):
        inputs, part = mx.array([4, 5], mx.uint32), ForwardPart(tuple(session.rows), 1)
        logits = run_forward(steps, adapter.selection, session.states, inputs, [part], at, mixed=True)
        mx.eval(logits, session.states.pending())
        assert logits.shape[0] == len(at)


def test_more_rows_than_packed_weights_are_multiplied_by_as_they_are_are_not_compiled(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(adapter.model)
    steps = CompiledSteps(counted)
    compare(adapter, steps, [3, 60, 130], 24)
    graphs, calls = len(steps._steps), counted.calls
    monkeypatch.setattr(module, "FEW_ROWS", 1)
    session = Session(adapter, steps, [3, 60])
    for _ in range(3):
        session.step([4, 5], session.rows)
    assert counted.calls == calls + 2 + 3 and len(steps._steps) == graphs, "prompts, and steps by the model itself"
