"""Work in no hurry: it runs while nothing else does, and gives everything back when somebody comes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.sequence import TokenSequence
from tests.engine.test_scheduler import drain
from tests.engine.world import World, expected_token


def unhurried(world: World, prompt: int) -> TokenSequence:
    sequence = world.arrive(prompt, 1)
    sequence.request = replace(sequence.request, background=True)
    return sequence


def test_it_runs_when_nobody_else_is_here() -> None:
    world = World(memory=8192)
    sequence = unhurried(world, 2000)
    drain(world)
    assert world.finished == [sequence]


def test_it_leaves_when_somebody_comes_even_if_it_holds_all_the_memory() -> None:
    world = World(memory=4096, max_sequences=1)
    waiting = unhurried(world, 3000)
    world.step()
    assert waiting.row is not None
    other = world.arrive(3000, 5)
    world.step()
    assert waiting.row is None and other.row is not None
    drain(world)
    assert world.finished == [other, waiting]


@given(
    prompts=st.lists(st.tuples(st.booleans(), st.integers(1, 900), st.integers(0, 5)), min_size=1, max_size=12),
    memory=st.integers(2048, 9000),
)
def test_nobody_ever_runs_beside_it_and_nothing_is_lost(prompts: list[tuple[bool, int, int]], memory: int) -> None:
    world = World(memory=memory, max_sequences=3)
    for background, prompt, steps in prompts:
        unhurried(world, prompt) if background else world.arrive(prompt, 7)
        for _ in range(steps):
            world.step()
            kinds = {sequence.request.background for sequence in world.scheduler.running}
            assert len(kinds) < 2
    drain(world)
    assert len(world.finished) == len(prompts)
    for sequence in world.finished:
        assert list(sequence.generated) == [expected_token(sequence.ticket, n) for n in range(sequence.limit)]
