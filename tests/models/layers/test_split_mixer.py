"""Mixers that compute row by row, and what in them is computed for all rows at once."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.device import current_device
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.layers.modules import own_class
from ingot.models.layers.split_mixer import TokenModule
from tests.models.layers import family_configs


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    config = family_configs.config("deepseek_v41")
    return adapt_model(family_configs.build("deepseek_v41"), config, current_device(), exact=True)


def calls_of_a_pass(adapter: ModelAdapter, rows: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each module was called by a decode step of so many rows of different lengths, and for all of them."""
    state = adapter.new_batch_state()
    live = [state.new() for _ in range(rows)]
    for number, row in enumerate(live):
        mx.eval(adapter.run(state, mx.ones(number + 5, mx.uint32), [ForwardPart((row,), number + 5)]), state.pending())
    paths = {id(module): path for path, module in adapter.model.named_modules()}
    calls: Counter[str] = Counter()
    before = TokenModule.computed

    def counted(module: TokenModule, x: mx.array) -> mx.array:
        calls[paths[id(module)]] += 1
        if x.shape[0] * x.shape[1] == rows:
            calls[f"{paths[id(module)]} for all"] += 1
        return before(module, x)

    monkeypatch.setattr(TokenModule, "computed", counted)
    mx.eval(adapter.run(state, mx.ones(rows, mx.uint32), [ForwardPart((row,), 1) for row in live]), state.pending())
    return calls


def test_projections_of_what_a_mixer_is_given_are_computed_once_for_all_rows(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of_a_pass(adapter, 3, monkeypatch)
    for name in ("q_a_proj", "q_a_norm", "q_b_proj", "kv_proj", "kv_norm", "indexer.q_b_proj", "indexer.weights_proj"):
        path = f"model.layers.1.self_attn.{name}"
        assert calls[path] == calls[f"{path} for all"] == 1, name


def test_the_projection_that_a_mixer_ends_in_is_computed_for_all_rows(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of_a_pass(adapter, 3, monkeypatch)
    assert calls["model.layers.1.self_attn.o_b_proj for all"] == 1


def test_a_row_alone_runs_a_mixer_s_own_code(adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_a_pass(adapter, 1, monkeypatch)
    assert calls["model.layers.1.self_attn.o_b_proj"] == calls["model.layers.1.self_attn.q_a_proj"] == 1


def test_what_is_around_mixers_is_left_as_it_is(adapter: ModelAdapter) -> None:
    shared = [path for path, module in adapter.model.named_modules() if isinstance(module, TokenModule)]
    assert shared and all(".self_attn." in path for path in shared)
    assert {own_class(dict(adapter.model.named_modules())[path]) for path in shared} == {nn.Linear, nn.RMSNorm}
