"""All draft tokens of a round as one graph, emulated, against the head's own modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.engine import requests, started
from bench.gpu.agents import with_given_head
from bench.random_models import decided
from bench.speculate import run
from ingot.engine.engine import Engine
from ingot.engine.request import Stop
from ingot.kernels.decode_graph.capture import EmulatedReplayStage
from ingot.models.draft_heads import draft_graph, mtp
from ingot.models.draft_heads.draft_graph import DraftGraphs
from tests import tiny

pytestmark = pytest.mark.parametrize("rules", ["cuda"], indirect=True)
CONFIG = {**tiny.CONFIGS["kernel"], "intermediate_size": 64}
DEPTH = 3


def drafting(wiring: str, bits: int | None = None, *, by_modules: bool = False) -> Engine:
    import mlx.core as mx
    import mlx.nn as nn

    def make() -> Any:
        model = decided(CONFIG, dtype=mx.bfloat16)
        if bits is not None:
            nn.quantize(model, group_size=32, bits=bits)
        return model

    def change(adapter: Any) -> Any:
        headed = with_given_head(CONFIG, adapter, rate=0.7, wiring=wiring)
        assert headed.head.graphs is not None
        if by_modules:
            headed.head.graphs = None
        return headed

    return started("tiny", CONFIG, make, memory_gb=0.1, change=change, fixed_draft_tokens=DEPTH)


def outcome(engine: Engine, **changes: Any) -> tuple[Any, int, int]:
    """What three unequal requests are answered together, and how many draft tokens were right."""
    asked = [
        replace(request, max_tokens=length, **changes)
        for request, length in zip(requests("r", 3, 20, 12, CONFIG["vocab_size"] - 1), (5, 12, 9), strict=True)
    ]
    answers = run(engine, asked).answers
    engine.check()
    return answers, engine.speculation.draft_tokens, engine.speculation.accepted_tokens


@pytest.mark.parametrize(("wiring", "bits"), [("mimo", None), ("qwen3_5", 8)])
def test_one_graph_drafts_the_tokens_that_the_heads_own_modules_would(
    wiring: str, bits: int | None, rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = list[int]()
    draft = DraftGraphs.draft

    def counted(graphs: DraftGraphs, *given: Any) -> Any:
        drafted.append(len(given[3]))
        return draft(graphs, *given)

    monkeypatch.setattr(DraftGraphs, "draft", counted)
    by_graph = drafting(wiring, bits)
    drafted.clear()
    found = outcome(by_graph)
    by_graph.close()
    assert drafted and max(drafted) == DEPTH
    by_modules = drafting(wiring, bits, by_modules=True)
    drafted.clear()
    assert outcome(by_modules) == found and not drafted
    by_modules.close()
    assert 0 < found[2] < found[1]


def test_an_answer_ends_at_a_stop_token_that_was_drafted_and_not_read_before_it_was_verified(rules: str) -> None:
    engine = drafting("mimo")
    (whole, *_), stop = outcome(engine), Stop()
    ends = {prompt: tokens[3] for prompt, tokens in whole.items()}  # within a draft of three
    for prompt, end in ends.items():
        [request] = [each for each in requests("r", 3, 20, 12, CONFIG["vocab_size"] - 1) if each.prompts[0] == prompt]
        asked = replace(request, id="stopped", stop=replace(stop, token_ids=frozenset({end})))
        [tokens] = run(engine, [asked]).answers.values()
        assert tokens[:3] == whole[prompt][:3] and len(tokens) in (3, 4)
    engine.check()
    engine.close()


def test_a_graph_that_drafts_other_tokens_than_the_modules_is_not_used(
    rules: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draft_graph, "pair_states", lambda run, first, second: draft_graph.pair(run, second, first))
    monkeypatch.setattr(draft_graph, "pair", pair, raising=False)
    with pytest.raises(AssertionError):
        drafting("mimo")
    assert "not computed as one graph" in caplog.text


pair = draft_graph.pair_states


def test_graphs_are_captured_ahead_where_that_takes_time(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedReplayStage, "takes_time", True)
    monkeypatch.setattr(draft_graph, "AHEAD_TOKENS", (1, 2, 4, 8))
    monkeypatch.setattr(draft_graph, "AHEAD_SPLITS", (8,))
    made = list[DraftGraphs]()
    checked = mtp._checked_graphs

    def noted(*given: Any) -> Any:
        made.append(checked(*given))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(mtp, "_checked_graphs", noted)
    engine = drafting("mimo")
    [graphs] = made
    assert graphs is not None
    before = graphs._stack.graph_count
    assert before >= 2 * draft_graph.MOST_DEPTH
    request = replace(requests("r", 1, 20, 8, CONFIG["vocab_size"] - 1)[0], max_tokens=8)
    run(engine, [request])
    assert all(key.tokens <= 8 for key in graphs._keys) and graphs._stack.graph_count == before
    engine.close()
