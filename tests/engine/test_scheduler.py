import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.scheduler import ENOUGH_TOKENS, PRIORITY_S
from tests.engine.world import World, expected_token

either_way = pytest.mark.parametrize("mixes", [False, True], ids=["apart", "mixed"])
"""Whether decoding rows and prompt tokens share forward passes."""

MOVES = st.lists(
    st.one_of(
        st.tuples(
            st.just("arrive"),
            st.integers(1, 1500),
            st.integers(1, 600),
            st.booleans(),
            st.sampled_from("abc"),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("step"), st.integers(1, 12)),
    ),
    max_size=60,
)


def drain(world: World, most_steps: int = 60_000) -> None:
    for _ in range(most_steps):
        if not world.alive and not world.in_flight:
            return
        world.step()
    raise AssertionError(f"{len(world.alive)} sequences never ended")


def play(world: World, moves: list) -> None:
    for move in moves:
        match move:
            case ("arrive", prompt, limit, stated, tenant):
                world.arrive(prompt, limit, stated, tenant)
            case ("cancel", which) if world.alive:
                world.cancel(world.alive[which % len(world.alive)])
            case ("step", times):
                for _ in range(times):
                    world.step()


@given(moves=MOVES, memory=st.integers(2048, 12_000), seats=st.integers(1, 6), mixes=st.booleans())
def test_nothing_is_lost_whatever_arrives_leaves_or_is_preempted(
    moves: list, memory: int, seats: int, mixes: bool
) -> None:
    world = World(memory=memory, max_sequences=seats, mixes=mixes)
    play(world, moves)
    drain(world)
    for sequence in world.finished:
        assert list(sequence.generated) == [expected_token(sequence.ticket, n) for n in range(sequence.limit)]
    assert not world.rows.held and not world.scheduler.running and not world.scheduler.waiting


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
@either_way
def test_random_arrivals_cancels_and_preemptions_all_come_to_an_end(mixes: bool, count: int) -> None:
    import random

    rng = random.Random(7)
    world = World(memory=9000, max_sequences=8, context=3000, mixes=mixes)
    arrivals = cancels = preempted = 0
    while arrivals < count:
        for _ in range(rng.randrange(3)):
            tenant = rng.choice("aaab")
            world.arrive(rng.randrange(1, 800), rng.randrange(1, 600), stated=rng.random() < 0.3, tenant=tenant)
            arrivals += 1
        if world.alive and rng.random() < 0.2:
            victim = rng.choice(world.alive)
            preempted += victim.preemptions
            world.cancel(victim)
            cancels += 1
        for _ in range(rng.randrange(60)):
            world.step()
    drain(world, 400_000)
    preempted += sum(sequence.preemptions for sequence in world.finished)
    assert len(world.finished) + cancels == arrivals
    assert preempted > 0 and cancels > 0


def test_a_preempted_sequence_continues_with_the_same_tokens() -> None:
    world = World(memory=1400, max_sequences=2, context=1400)
    old = world.arrive(200, 900, stated=False)
    new = world.arrive(200, 500, stated=False)
    drain(world)
    assert new.preemptions > 0 and old.preemptions == 0
    assert list(new.generated) == [expected_token(new.ticket, n) for n in range(500)]


def test_the_newest_sequence_is_the_one_that_is_preempted() -> None:
    world = World(memory=3000, max_sequences=3, context=1400)
    rows = [world.arrive(100, 900, stated=False) for _ in range(3)]
    for _ in range(450):
        world.step()
    assert [row.preemptions > 0 for row in rows] == [False, False, True]


@either_way
def test_a_long_prompt_does_not_starve_a_running_stream(mixes: bool) -> None:
    world = World(memory=1 << 20, target_ms=50.0, mixes=mixes)
    stream = world.arrive(10, 2000)
    for _ in range(20):
        world.step()
    world.arrive(3000, 1)
    world.stalls.clear()
    for _ in range(400):
        world.step()
    assert world.stalls[stream.ticket] <= 0.075


@either_way
def test_running_streams_do_not_starve_a_prompt_even_where_they_alone_exceed_the_target(mixes: bool) -> None:
    world = World(memory=1 << 20, target_ms=5.0, max_sequences=8, mixes=mixes)
    for _ in range(7):
        world.arrive(5, 3000)
    for _ in range(20):
        world.step()
    late = world.arrive(1000, 1)
    asked = world.now
    while late in world.alive:
        world.step()
    # Alone it would take half a second; a quarter of each step and more as it ages bounds the wait.
    assert world.now - asked < 2.5


@either_way
def test_a_short_prompt_passes_a_long_one_that_has_just_begun(mixes: bool) -> None:
    world = World(memory=1 << 20, target_ms=50.0, mixes=mixes)
    world.arrive(5, 1000)
    for _ in range(5):
        world.step()
    long = world.arrive(4000, 1)
    world.step()
    short = world.arrive(20, 1)
    while short in world.alive:
        world.step()
    assert long in world.alive


@either_way
def test_a_long_prompt_is_not_overtaken_for_ever(mixes: bool) -> None:
    world = World(memory=1 << 20, target_ms=50.0, max_sequences=8, mixes=mixes)
    long = world.arrive(3000, 1)
    while long in world.alive:
        world.arrive(60, 1)
        world.step()
        assert world.now < 30.0


@pytest.mark.parametrize(
    ("token_ms", "longest"),
    [(2.0, 500), (0.05, ENOUGH_TOKENS), (0.01, 5000)],
    ids=["slow: a second's", "fast: enough", "faster still: the target's"],
)
def test_a_prompt_alone_is_computed_in_pieces_that_a_newcomer_can_wait_for(token_ms: float, longest: int) -> None:
    world = World(memory=1 << 20, context=40_000, widest=1 << 20, token_ms=token_ms, target_ms=50.0)
    prompt = world.arrive(30_000, 1)
    for _ in range(3):  # until costs are known
        world.step()
    before = prompt.computed
    world.step()
    assert prompt.computed - before == pytest.approx(longest, abs=1)


@pytest.mark.parametrize("stated", [False, True], ids=["unstated", "stated"])
def test_a_stated_length_reserves_no_more_than_a_step_ahead(stated: bool) -> None:
    world = World(memory=1 << 20, context=60_000)
    row = world.arrive(40, 50_000, stated=stated)
    world.step()
    assert row.reserved == 512


def test_short_sequences_overtake_one_that_does_not_fit_but_not_for_ever() -> None:
    world = World(memory=7 * 512, max_sequences=8, context=3000)
    for _ in range(3):
        world.arrive(100, 400)
    world.step()
    long = world.arrive(2500, 1)
    asked = world.now
    overtook = 0
    while long in world.alive:
        short = world.arrive(50, 20)
        for _ in range(25):
            world.step()
        overtook += short not in world.alive and long in world.alive
        assert world.now < asked + 30.0
    assert overtook > 3


def test_tenants_take_turns_at_a_single_seat() -> None:
    world = World(memory=1 << 20, max_sequences=1)
    for _ in range(20):
        world.arrive(10, 5, tenant="many")
    world.step()
    few = [world.arrive(10, 5, tenant="few") for _ in range(3)]
    while any(row in world.alive for row in few):
        world.step()
    assert sum(row.tenant == "many" for row in world.finished) <= 4


def test_who_has_priority_goes_first() -> None:
    world = World(memory=1 << 20, max_sequences=1)
    world.arrive(10, 5, tenant="low")
    world.step()
    waiting = [world.arrive(10, 5, tenant="low") for _ in range(3)]
    urgent = world.arrive(10, 5, tenant="high", priority=2)
    while urgent in world.alive:
        world.step()
    assert all(row in world.alive for row in waiting)


def test_of_one_tenant_the_request_with_priority_goes_first() -> None:
    world = World(memory=1 << 20, max_sequences=1)
    world.arrive(10, 5)
    world.step()
    patient, urgent = world.arrive(10, 5), world.arrive(10, 5, priority=2)
    drain(world)
    assert world.finished.index(urgent) < world.finished.index(patient)


def test_nobody_waits_for_ever_behind_those_with_priority() -> None:
    world = World(memory=1 << 20, max_sequences=1)
    world.arrive(10, 5, tenant="high", priority=2)
    low = world.arrive(10, 5, tenant="low")
    while low in world.alive:
        if sum(row.tenant == "high" for row in world.alive) < 3:
            world.arrive(10, 5, tenant="high", priority=2)
        world.step()
        assert world.now < 2 * PRIORITY_S + 1.0
    assert world.now > PRIORITY_S


def test_a_share_that_was_lent_is_given_back_at_once() -> None:
    world = World(memory=1 << 20, max_sequences=4)
    lent = [world.arrive(10, 500, tenant="many") for _ in range(6)]
    for _ in range(5):
        world.step()
    assert sum(row.row is not None for row in lent) == 4, "a tenant alone has every seat"
    own = [world.arrive(10, 50, tenant="few") for _ in range(3)]
    for _ in range(3):
        world.step()
    assert [row.row is not None for row in own] == [True, True, False], "but no more than its share"
    assert [row.preemptions for row in lent] == [0, 0, 1, 1, 0, 0], "and the newest make way"
    drain(world)
    for row in lent:
        assert list(row.generated) == [expected_token(row.ticket, n) for n in range(500)]


def test_memory_that_runs_out_is_taken_from_the_tenant_that_runs_most() -> None:
    world = World(memory=8 * 512, max_sequences=8, context=1024)
    many = [world.arrive(10, 700, tenant="many") for _ in range(7)]
    world.step()
    few = world.arrive(10, 700, tenant="few")
    drain(world)
    assert few.preemptions == 0 and sum(row.preemptions for row in many) > 0
