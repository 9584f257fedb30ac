"""Who waits for whose prompt, and what it costs to know."""

from __future__ import annotations

import pytest

from ingot.cache.attention_state import AppendState
from ingot.cache.batch_state import Rows
from ingot.cache.footprint import Footprint
from ingot.cache.layer_state import LayerState
from ingot.cache.matches import Needs
from ingot.cache.recurrent_state import RecurrentState
from ingot.engine.memory_budget import Budget
from ingot.engine.prefix_cache import WORTH_WAITING, Reuse, needs_of
from ingot.engine.request import Request
from ingot.engine.sequence import Sequence
from ingot.engine.step_costs import StepCosts

SHAPE = Footprint(groups=((None, 1),), recurrent=0, activation=0, score=0, logits=0)


class Token(int):
    """Counts how often any is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Token.compared += 1
        return isinstance(other, int) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def reuse(needs: Needs) -> Reuse:
    budget = Budget(1 << 20, 0, SHAPE, context=1 << 14, widest=512, rows=4)
    states: list[LayerState] = [AppendState(), *([RecurrentState(1)] if needs.checkpoint else ())]
    made = Reuse(Rows(states), budget, StepCosts(), limit=1 << 20)
    assert needs_of(made.rows) == needs
    return made


def sequence(ticket: int, tokens: list[int], marks: tuple[int, ...] = ()) -> Sequence:
    own = tuple(Token(token) for token in tokens)
    made = Sequence(Request(f"r{ticket}", (own,)), 0, ticket, own, limit=4, seed=0)
    made.marks = frozenset(marks)
    return made


@pytest.mark.parametrize("needs", [Needs(), Needs(checkpoint=True)])
def test_prompts_are_compared_once_however_long_they_wait(needs: Needs) -> None:
    kept = reuse(needs)
    shared = list(range(2000))
    running = sequence(0, [*shared, 1])
    waiting = [sequence(number, [*shared[: 2000 - number], 90_000 + number]) for number in range(1, 20)]
    Token.compared = 0
    assert all(kept.waits(each, [running]) for each in waiting)
    assert Token.compared <= 3 * 2000 * len(waiting)
    Token.compared = 0
    for _ in range(100):
        running.computed = running.kept = running.kept + 10
        assert all(kept.waits(each, [running]) for each in waiting)
    assert Token.compared == 0


def test_a_prompt_that_has_grown_is_compared_again() -> None:
    kept = reuse(Needs())
    running, waiting = sequence(0, [*range(100), 7, 8]), sequence(1, [*range(100), 7, 8, 9])
    running.kept = 103 - WORTH_WAITING
    assert not kept.waits(waiting, [running])
    running.tokens += [9, 9]
    waiting.tokens += [9, 9]
    assert kept.waits(waiting, [running])


def test_a_model_that_needs_checkpoints_is_asked_to_stop_where_a_waiting_prompt_parts() -> None:
    kept = reuse(Needs(checkpoint=True))
    running, waiting = sequence(0, list(range(500)), marks=(100,)), sequence(1, [*range(300), 7])
    assert kept.next_stop(running) == 100
    assert kept.waits(waiting, [running])
    running.computed = running.kept = 100
    assert kept.next_stop(running) == 300
    assert kept.waits(waiting, [running])
    running.computed = running.kept = 300
    assert not kept.waits(waiting, [running])


def test_a_prompt_stops_for_a_few_others_at_most() -> None:
    kept = reuse(Needs(checkpoint=True))
    running = sequence(0, list(range(5000)))
    for number in range(1, 40):
        kept.waits(sequence(number, [*range(100 * number), 90_000]), [running])
    assert len(running.stops) == 8


def test_another_tenants_prompt_is_not_waited_for() -> None:
    kept = reuse(Needs())
    own = tuple(range(200))
    theirs = Sequence(Request("theirs", (own,), tenant="ann"), 0, 0, own, limit=4, seed=0)
    assert not kept.waits(sequence(1, list(own)), [theirs])
