"""Guesses of a smaller model that reads along."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import mlx.core as mx
import pytest

from foundry.package import MODELS
from ingot.cache.forward_batch import ForwardPart
from ingot.cache.pages import PAGE
from ingot.config import Settings
from ingot.engine.admission import EngineLimits
from ingot.engine.core import LoadedModel
from ingot.engine.engine import Engine
from ingot.engine.loading import language_model
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import Ended, Request, Sampling, Stop
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.draft_model import (
    CATCH_UP_TOKENS,
    LONGEST_MODEL_DRAFT,
    DraftModel,
    DraftModelProposer,
    draft_budget,
)
from ingot.engine.speculation.proposer import Proposal
from ingot.errors import ModelError
from ingot.kernels.device import Device, current_device
from ingot.models import adapter as adapters
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.files.locate import ModelFolder
from ingot.models.precision import settle_precision
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests import engines, tiny
from tests.one_path import one_path

__all__ = ["one_path"]

NUMBERS = count()
PLACES = [(kind, device) for device in (None, engines.GPU) for kind in ("llama", "window", "moe")]


def adapter_of(kind: str, device: Device | None = None) -> ModelAdapter:
    model, here = tiny.build(kind), device or current_device()
    settle_precision(model, here, None)
    return adapt_model(model, tiny.CONFIGS[kind], here)


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[0]}-{'gpu' if place[1] else 'here'}")
def adapter(request: pytest.FixtureRequest) -> ModelAdapter:
    return adapter_of(*request.param)


@pytest.fixture(scope="module")
def llama() -> ModelAdapter:
    return adapter_of("llama")


@dataclass
class Counted:
    """How many tokens each pass of a draft computes."""

    passes: list[int] = field(default_factory=list)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    seen, run = Counted(), ModelAdapter.run

    def counting(self: ModelAdapter, rows: Any, tokens: mx.array, *rest: Any, **more: Any) -> Any:
        seen.passes.append(tokens.size)
        return run(self, rows, tokens, *rest, **more)

    monkeypatch.setattr(ModelAdapter, "run", counting)
    yield seen


def drafting(
    adapter: ModelAdapter, *, states: int = 1 << 24, cache_bytes: int = 0, vocab: int | None = None
) -> DraftModelProposer:
    total = adapter.weight_bytes + states
    budget = MemoryBudget(total, adapter.weight_bytes, adapter.footprint, context=4096, widest=CATCH_UP_TOKENS, rows=8)
    return DraftModelProposer(DraftModel(adapter, budget, cache_bytes=cache_bytes), vocab=vocab or adapter.vocab)


def sequence(prompt: list[int], **asked: Any) -> TokenSequence:
    request = Request(f"r{next(NUMBERS)}", (tuple(prompt),), **asked)
    return TokenSequence(request, 0, next(NUMBERS), tuple(prompt), 10_000, 0)


def some(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(f"{seed} {length}")
    return [chance.randrange(95) for _ in range(length)]


def write(row: TokenSequence, *tokens: int) -> None:
    row.tokens.extend(tokens)
    row.sampled += len(tokens)


def plain(adapter: ModelAdapter, tokens: list[int], most: int) -> tuple[list[int], list[float]]:
    """What the model would go on with, computed anew, and how likely it thinks that is."""
    rows = adapter.new_batch_state()
    row, left, written, sure = rows.new(), list(tokens), list[int](), list[float]()
    for _ in range(most):
        logits = adapter.run(rows, mx.array(left, dtype=mx.uint32), [ForwardPart((row,), len(left))], [len(left) - 1])
        likelihoods = mx.softmax(logits[0].astype(mx.float32))
        written.append(int(mx.argmax(likelihoods)))
        sure.append(float(mx.max(likelihoods)))
        left = [written[-1]]
    return written, sure


def asked(draft: DraftModelProposer, rows: list[TokenSequence], counts: list[int]) -> list[Proposal]:
    offers = draft.offers(rows)
    assert all(offer is not None and offer.most == LONGEST_MODEL_DRAFT and not offer.free for offer in offers)
    return draft.propose(rows, counts)


def draft_tokens(draft: DraftModelProposer, rows: list[TokenSequence], counts: list[int]) -> list[tuple[int, ...]]:
    return [proposal.tokens for proposal in asked(draft, rows, counts)]


def check(adapter: ModelAdapter, row: TokenSequence, proposal: Proposal, most: int) -> None:
    """It is what the draft would write, and as sure as it is, which one wrong token in its states would change."""
    tokens, sure = plain(adapter, row.tokens, most)
    assert list(proposal.tokens) == tokens
    assert proposal.confidences == pytest.approx(sure, abs=2e-3)


@pytest.mark.sampled(4)
def test_draft_tokens_are_what_the_draft_model_would_generate_with_its_confidences(adapter: ModelAdapter) -> None:
    draft, row = drafting(adapter), sequence(some(40))
    [proposal] = asked(draft, [row], [6])
    check(adapter, row, proposal, 6)


@pytest.mark.sampled(4)
def test_whatever_is_accepted_the_next_draft_is_as_if_it_were_the_first(adapter: ModelAdapter) -> None:
    """Rows of different lengths, of which some are accepted in part, wholly, or not at all; some end, some come."""
    chance = random.Random(5)
    draft = drafting(adapter, cache_bytes=1 << 22)
    rows = [sequence(some(length)) for length in (3, 63, 130, 200)]
    for _ in range(7):
        wanted = chance.sample(rows, chance.randint(1, len(rows)))
        counts = [chance.randint(1, 5) for _ in wanted]
        for row, most, proposal in zip(wanted, counts, asked(draft, wanted, counts), strict=True):
            check(adapter, row, proposal, most)
            write(row, *proposal.tokens[: chance.randint(0, most)], chance.randrange(95))
        if chance.random() < 0.3:
            gone = rows.pop(0)
            gone.ended = chance.random() < 0.5
            draft.forget(gone)
            # One that goes on where another was, or the same again, as after preemption.
            rows.append(gone if not gone.ended else sequence([*gone.tokens, *some(5)]))
        draft.check()
    for row in rows:
        draft.forget(row)
    draft.check()
    assert draft.rows.count == 0


@pytest.mark.parametrize("device", [None, engines.GPU], ids=["here", "gpu"])
def test_a_window_still_sees_what_it_saw_before_a_rejected_draft(device: Device | None) -> None:
    adapter = adapter_of("window", device)
    [window] = {window for window, _ in adapter.footprint.groups if window is not None}
    draft, row = drafting(adapter), sequence(some(PAGE + window - 3))
    draft_tokens(draft, [row], [8])  # with which the first page leaves the window
    write(row, 7)
    check(adapter, row, asked(draft, [row], [3])[0], 3)


def test_tokens_that_were_not_drafted_are_caught_up_with(llama: ModelAdapter, counted: Counted) -> None:
    draft, row = drafting(llama), sequence(some(20))
    draft_tokens(draft, [row], [3])
    write(row, *some(30, seed=1))
    counted.passes.clear()
    [tokens] = draft_tokens(draft, [row], [4])
    assert counted.passes == [30, 1, 1, 1]
    assert list(tokens) == plain(llama, row.tokens, 4)[0]


def test_what_came_true_is_not_computed_again(llama: ModelAdapter, counted: Counted) -> None:
    draft, row = drafting(llama), sequence(some(20))
    [tokens] = draft_tokens(draft, [row], [5])
    write(row, *tokens, 7)
    counted.passes.clear()
    draft_tokens(draft, [row], [1])
    assert counted.passes == [2]  # the last draft token, and what came behind it


def test_asking_again_before_anything_came_gives_the_same_for_nothing(llama: ModelAdapter, counted: Counted) -> None:
    draft, row = drafting(llama), sequence(some(20))
    first = draft_tokens(draft, [row], [5])
    counted.passes.clear()
    assert draft_tokens(draft, [row], [5]) == first and draft_tokens(draft, [row], [3]) == [first[0][:3]]
    assert counted.passes == []


def test_all_rows_are_drafted_in_one_pass_a_token(llama: ModelAdapter, counted: Counted) -> None:
    draft, rows = drafting(llama), [sequence(some(length)) for length in (10, 20, 30, 41)]
    assert list(map(len, draft_tokens(draft, rows, [2, 5, 1, 0]))) == [2, 5, 1, 0]
    assert counted.passes == [60, 2, 1, 1, 1]


def test_a_long_prompt_is_prefilled_in_chunks_while_short_ones_get_drafts(
    llama: ModelAdapter, counted: Counted
) -> None:
    draft = drafting(llama)
    long, short = sequence(some(3 * CATCH_UP_TOKENS - 5)), sequence(some(4))
    given = []
    for _ in range(4):
        counted.passes.clear()
        tokens, others = draft_tokens(draft, [long, short], [3, 2])
        assert counted.passes[0] <= CATCH_UP_TOKENS and len(others) == 2
        write(short, 1)
        given.append(tokens)
    assert given[:2] == [(), ()] and list(given[3]) == plain(llama, long.tokens, 3)[0]


def test_the_next_turn_goes_on_from_what_was_read(llama: ModelAdapter, counted: Counted) -> None:
    draft = drafting(llama, cache_bytes=1 << 22)
    first = sequence(some(300))
    [tokens] = draft_tokens(draft, [first], [5])
    write(first, *tokens[:2], 7, 8)
    draft_tokens(draft, [first], [5])
    first.ended = True
    draft.forget(first)
    counted.passes.clear()
    turn = sequence([*first.tokens, *some(12)])
    [tokens] = draft_tokens(draft, [turn], [1])
    assert counted.passes == [12]
    assert list(tokens) == plain(llama, turn.tokens, 1)[0]
    other = sequence([*first.tokens, *some(12)], tenant="another")
    counted.passes.clear()
    draft_tokens(draft, [other], [1])
    assert counted.passes == [316]


def test_prompts_are_shared_from_where_they_were_read(llama: ModelAdapter, counted: Counted) -> None:
    draft, prompt = drafting(llama, cache_bytes=1 << 22), some(200)
    draft_tokens(draft, [sequence(prompt)], [4])
    counted.passes.clear()
    draft_tokens(draft, [sequence([*prompt, 1, 2, 3])], [1])
    assert counted.passes == [3]


def test_rows_without_room_get_no_offer_until_there_is_some(llama: ModelAdapter) -> None:
    row_bytes = 256 * llama.footprint.token
    draft = drafting(llama, states=int(2.5 * row_bytes / 0.75))
    rows = [sequence(some(length)) for length in (100, 110, 120)]
    assert [offer is not None for offer in draft.offers(rows)] == [True, True, False]
    draft.propose(rows[:2], [3, 3])
    assert [offer is not None for offer in draft.offers(rows[::-1])] == [False, True, True]
    assert draft.rows.nbytes <= 2.5 * row_bytes / 0.75
    draft.forget(rows[0])
    assert [offer is not None for offer in draft.offers(rows[1:])] == [True, True]


def test_a_row_that_outgrows_its_room_gives_it_back(llama: ModelAdapter) -> None:
    row_bytes = 256 * llama.footprint.token
    draft = drafting(llama, states=int(2.5 * row_bytes / 0.75))
    rows = [sequence(some(length)) for length in (200, 210)]
    draft_tokens(draft, rows, [2, 2])
    write(rows[0], *some(60))
    write(rows[1], *some(60))
    offers = draft.offers(rows)
    assert [offer is not None for offer in offers] == [True, False]
    assert draft.rows.count == 1
    draft.check()


def test_no_draft_reaches_beyond_the_draft_models_context(llama: ModelAdapter) -> None:
    draft = drafting(llama, states=1 << 26)
    assert draft.offers([sequence(some(4096 - LONGEST_MODEL_DRAFT))]) != [None]
    assert draft.offers([sequence(some(4096 - LONGEST_MODEL_DRAFT + 1))]) == [None]


def test_no_token_is_drafted_that_the_target_does_not_have(llama: ModelAdapter) -> None:
    draft, row = drafting(llama, vocab=10), sequence(some(20))
    [tokens] = draft_tokens(draft, [row], [8])
    assert len(tokens) == 8 and max(tokens) < 10


def test_forgetting_a_sequence_that_was_never_seen_is_nothing(llama: ModelAdapter) -> None:
    draft = drafting(llama)
    draft.forget(sequence([1]))
    row = sequence([1])
    draft.offers([row])
    draft.forget(row)
    draft.check()


def test_a_draft_with_recurrent_layers_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"qwen3_5_text cannot be a draft.*recurrent"):
        drafting(adapter_of("hybrid"))


def test_memory_is_shared_so_that_both_models_hold_as_many_tokens(llama: ModelAdapter) -> None:
    free, context = 1 << 24, 1024
    budget = draft_budget(llama, llama.footprint, free, context=context, rows=4)
    assert budget.total == llama.weight_bytes + free // 2 and budget.weights == llama.weight_bytes
    wide = adapter_of("kernel").footprint
    small = draft_budget(llama, wide, free, context=context, rows=4).total - llama.weight_bytes
    assert small / llama.footprint.token == pytest.approx((free - small) / wide.token, rel=0.01)


# The shipped ones, in the engine.

PROMPTS = [
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "In the beginning God created the heaven and the earth. And the earth was",
]


def shipped(*, drafted: bool) -> Engine:
    tokenizer = Tokenizer.load(MODELS / "dense")

    def load() -> LoadedModel:
        settings = Settings(speculate="off", memory="1GB", max_sequences=8, dtype="float32", deterministic=True)
        loaded = language_model.load_language_model(
            settings, ModelFolder(MODELS / "dense", "dense", "dense"), lambda: tokenizer, {}
        )
        if not drafted:
            return loaded
        adapter = adapters.load_model_adapter(MODELS / "draft", current_device())
        budget = draft_budget(adapter, loaded.adapter.footprint, 1 << 28, context=loaded.card.context, rows=8)
        draft = DraftModelProposer(DraftModel(adapter, budget, cache_bytes=1 << 26), vocab=loaded.adapter.vocab)
        return replace(loaded, proposers=[draft], fixed_draft_tokens=4)

    return Engine(load, EngineLimits(max_sequences=8))


def test_answers_are_the_same_with_a_draft_model_and_many_of_its_tokens_are_accepted() -> None:
    told = []
    for drafted in (False, True):
        engine = shipped(drafted=drafted)
        asked = [
            Request(
                f"{drafted}-{number}-{temperature}",
                (tuple(engine.tokenizer.encode(text, add_special=False)),),
                max_tokens=48,
                sampling=Sampling(temperature=temperature, seed=number),
                stop=Stop(ignore_eos=True),
            )
            for number, text in enumerate(PROMPTS)
            for temperature in (0.0, 0.8)
        ]
        streams = [engine.generate(request) for request in asked]
        told.append([[event for batch in stream for event in batch] for stream in streams])
        engine.check()
        engine.close()
    assert [engines.text_of(events) for events in told[0]] == [engines.text_of(events) for events in told[1]]
    reports = [events[-1].speculation for events in told[1] if isinstance(events[-1], Ended)]
    assert sum(report.accepted for report in reports) > 0.3 * sum(report.proposed for report in reports) > 20
