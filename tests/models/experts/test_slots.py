"""Which experts stay: those that are used often, and of late."""

from __future__ import annotations

import numpy as np

from ingot.models.experts.slots import NOWHERE, ExpertSlots


def used(slots: ExpertSlots, *passes: list[int]) -> None:
    for experts in passes:
        slots.note_uses(np.array(experts))


def filled(experts: int, slots: int) -> ExpertSlots:
    made = ExpertSlots(experts, slots)
    for each in range(slots):
        made.put(each, each)
    return made


def test_the_expert_that_was_used_least_makes_room() -> None:
    slots = filled(8, 4)
    used(slots, [0, 1], [0, 2], [0, 3], [1, 3])
    assert [slots.expert_in[slot] for slot in slots.replaceable(2, kept=[])] == [2, 1]


def test_uses_count_the_less_the_longer_ago_they_were() -> None:
    slots = filled(8, 2)
    used(slots, *[[0]] * 10, *[[1]] * 9, *[[7]] * 60)
    assert list(slots.replaceable(1, kept=[])) == [0]


def test_what_a_pass_needs_stays_and_empty_slots_come_first() -> None:
    slots = filled(8, 4)
    slots.drop(2)
    used(slots, [1], [3])
    assert list(slots.replaceable(4, kept=[0])) == [2, 1, 3]


def test_a_prompt_counts_more_than_a_step_and_less_than_its_tokens() -> None:
    slots = ExpertSlots(3, 2)
    assert slots.note_uses(np.array([[0]] * 400 + [[1]])) == [0, 1]
    assert 1 < slots.uses[0] / slots.uses[1] < 400


def test_whoever_was_in_a_slot_has_none_any_more() -> None:
    slots = filled(4, 2)
    slots.put(3, 0)
    assert (list(slots.slot_of), list(slots.expert_in)) == ([NOWHERE, 1, NOWHERE, 0], [3, 1])
    slots.check()
