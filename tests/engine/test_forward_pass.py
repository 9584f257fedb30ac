"""Which work shares a forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.footprint import Footprint, GatherCost
from ingot.cache.forward_batch import Row
from ingot.engine.forward_pass import BatchPart, PassPlanner
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import Request, Sampling
from ingot.engine.scheduler import PromptChunk
from ingot.engine.sequence import TokenSequence
from tests import tiny

CONTEXT = 1024
SHAPE = Footprint(groups=((None, 1),), recurrent=0, activation=1, score=0, logits=0)


def row(slot: int, computed: int, *, decoding: bool = False, **sampling: Any) -> TokenSequence:
    length = computed + 1 if decoding else 500
    request = Request(f"r{slot}", ((1,) * length,), sampling=Sampling(**sampling))
    made = TokenSequence(request, 0, slot, request.prompts[0], 10, 0)
    made.row, made.computed, made.decoding = Row(slot, ()), computed, decoding
    return made


def passes(*, widest: int = 256, **can: bool) -> PassPlanner:
    budget = MemoryBudget(100_000, 0, SHAPE, context=CONTEXT, widest=widest, rows=8)
    return PassPlanner(replace(tiny.adapter("llama"), **{"mixed": True, "ragged": True, **can}), budget)


def slots(logprobs_found: list[list[BatchPart]]) -> list[list[list[int]]]:
    return [[[each.slot for each in part.part.rows] for part in parts] for parts in logprobs_found]


def test_decoding_rows_and_chunks_of_any_width_share_one_pass() -> None:
    decoding = [row(0, 40, decoding=True), row(1, 7, decoding=True)]
    chunks = [PromptChunk(row(3, 0), 100, False), PromptChunk(row(2, 9), 5, True)]
    logprobs_found = passes().of(decoding, chunks)
    assert slots(logprobs_found) == [[[0, 1], [3], [2]]]
    assert [part.samples for part in logprobs_found[0]] == [True, False, True]


def test_rows_that_cannot_decode_together_are_parts_of_one_pass() -> None:
    decoding = [row(0, 40, decoding=True), row(1, 7, decoding=True), row(2, 7, decoding=True)]
    assert slots(passes(ragged=False).of(decoding, [])) == [[[0], [1], [2]]]


def test_a_pass_holds_no_more_than_memory_allows() -> None:
    decoding = [row(0, 40, decoding=True)]
    chunks = [PromptChunk(row(slot, 0), 100, False) for slot in (1, 2, 3, 4)]
    assert slots(passes(widest=256).of(decoding, chunks)) == [[[0], [1], [2]], [[3], [4]]]


def test_rows_whose_pages_are_gathered_are_parted_where_memory_does_not_hold_them_at_once() -> None:
    decoding = [row(slot, 400 + slot, decoding=True) for slot in range(6)]
    for gathered, wanted in ((GatherCost(), [[0, 1, 2, 3, 4, 5]]), (GatherCost(9, 9, 16), [[0, 1, 2], [3, 4, 5]])):
        shape = replace(SHAPE, gathered=gathered)
        budget = MemoryBudget(10_000_000, 0, shape, context=2 * CONTEXT, widest=256, rows=8)
        logprobs_found = PassPlanner(replace(tiny.adapter("llama"), mixed=True, ragged=True), budget).of(decoding, [])
        assert slots(logprobs_found) == [[part] for part in wanted]


def test_a_prompt_that_is_scored_has_a_pass_to_itself() -> None:
    chunks = [PromptChunk(row(1, 0, prompt_logprobs=1), 100, False), PromptChunk(row(2, 0), 5, True)]
    assert slots(passes().of([row(0, 9, decoding=True)], chunks)) == [[[0], [2]], [[1]]]


def test_a_model_that_cannot_mix_decodes_first_and_runs_one_part_after_another() -> None:
    decoding = [row(0, 40, decoding=True)]
    chunks = [PromptChunk(row(3, 0), 100, False), PromptChunk(row(1, 0), 50, True), PromptChunk(row(2, 0), 48, True)]
    assert slots(passes(mixed=False).of(decoding, chunks)) == [[[0]], [[3]], [[1]], [[2]]]


def test_with_nothing_to_do_there_is_no_pass() -> None:
    assert passes().of([], []) == passes(mixed=False).of([], []) == []


def test_rows_with_as_many_guessed_tokens_are_one_part() -> None:
    decoding = [row(slot, 40 + slot, decoding=True) for slot in range(5)]
    behind = row(5, 90, decoding=True)
    behind.computed -= 3
    drafts = {decoding[1]: (1, 2), decoding[3]: (3, 4), decoding[4]: (5,), behind: (6, 7)}
    logprobs_found = passes().of([*decoding, behind], [PromptChunk(row(6, 0), 100, False)], drafts)
    assert slots(logprobs_found) == [[[0, 2], [4], [1, 3], [5], [6]]]
    widths = [(part.width, part.draft_tokens, part.part.tentative) for part in logprobs_found[0]]
    assert widths == [(1, 0, 0), (2, 1, 1), (3, 2, 2), (6, 2, 2), (100, 0, 0)]
