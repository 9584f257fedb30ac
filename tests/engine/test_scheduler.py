import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.scheduler import ENOUGH_TOKENS, LEAST_PREFILL_SHARE, LITTLE_TOKENS, PRIORITY_STEP_S, SMALLEST_CHUNK
from ingot.engine.sequence import TokenSequence
from ingot.engine.step_costs import REMEMBERED_COSTS, SURE_COSTS
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
    assert world.stalls[stream.ticket] <= 0.085  # where decoding alone takes 0.02, and prefill three times that


@either_way
def test_running_streams_do_not_starve_a_prompt_even_where_they_alone_exceed_the_target(mixes: bool) -> None:
    world = World(memory=1 << 20, target_ms=5.0, max_sequences=8, mixes=mixes)
    for _ in range(7):
        world.arrive(5, 3000)
    for _ in range(20):
        world.step()
    late = world.arrive(1000, 1)
    began_at = world.now
    while late in world.alive:
        world.step()
    # Alone it would take half a second; a quarter of each step and more as it ages bounds the wait.
    assert world.now - began_at < 2.5


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


LONG_STEPS = [(20.0, 0.5), (2000.0, 50.0), (1.0, 3.0)]
"""Milliseconds of a forward pass whatever is in it, and of each token."""


def crowd(fixed_ms: float, token_ms: float, mixes: bool) -> World:
    return World(
        memory=1 << 24,
        max_sequences=64,
        context=40_000,
        widest=2048,
        target_ms=100.0,
        token_ms=token_ms,
        decode_ms=fixed_ms,
        pass_ms=fixed_ms,
        mixes=mixes,
    )


def steps_until(world: World, done: Callable[[], bool], most: int = 1000) -> int:
    for number in range(most):
        if done():
            return number
        world.step()
    raise AssertionError(f"nothing came of {most} steps")


@pytest.mark.parametrize(("fixed_ms", "token_ms"), LONG_STEPS)
@pytest.mark.parametrize("streams", [0, 1, 8])
@either_way
def test_fifteen_tokens_are_computed_within_three_steps_beside_a_long_prompt_however_old_it_is(
    mixes: bool, streams: int, fixed_ms: float, token_ms: float
) -> None:
    world = crowd(fixed_ms, token_ms, mixes)
    for _ in range(streams):
        world.arrive(5, 5000)
    long = world.arrive(39_000, 1)
    for _ in range(8):
        world.step()
    world.now += 600.0
    for _ in range(5):
        short = world.arrive(15, 1)
        assert steps_until(world, lambda short=short: short.sampled > 0) <= 3
    assert long in world.alive


@given(
    others=st.lists(
        st.tuples(st.integers(1, 3000), st.integers(1, 300), st.sampled_from("abc"), st.integers(0, 9)), max_size=40
    ),
    little=st.integers(1, LITTLE_TOKENS),
    costs=st.sampled_from(LONG_STEPS),
    mixes=st.booleans(),
)
def test_who_has_little_left_is_computed_within_three_steps_whatever_else_runs(
    others: list[tuple[int, int, str, int]], little: int, costs: tuple[float, float], mixes: bool
) -> None:
    world = crowd(*costs, mixes)
    for prompt, limit, tenant, steps in others:
        world.arrive(prompt, limit, tenant=tenant)
        for _ in range(steps):
            world.step()
    ahead = [row for row in world.alive if not row.decoding and row.remaining <= LITTLE_TOKENS]
    short = world.arrive(little, 1)
    tokens = sum(row.remaining for row in ahead) + little
    # As many steps as their share takes, at least three; in the first of them others may still come to have little
    # left, but those stand behind it or have the rest of the step.
    assert steps_until(world, lambda: short.sampled > 0) <= max(3, len(ahead) + -(-tokens // SMALLEST_CHUNK))


@either_way
def test_those_with_little_left_are_computed_in_order_of_arrival_where_they_are_too_many(mixes: bool) -> None:
    world = crowd(1.0, 3.0, mixes)  # about 30 tokens a step
    world.arrive(5, 1000)
    world.arrive(5000, 1)
    for _ in range(20):
        world.step()
    short = [world.arrive(24 - number % 5, 1) for number in range(20)]
    drain(world)
    assert [row for row in world.finished if row in short] == short


@either_way
def test_no_flood_of_short_prompts_takes_more_than_half_of_what_a_long_one_has_alone(mixes: bool) -> None:
    def steps(flood: bool) -> int:
        world = crowd(1.0, 3.0, mixes)
        world.arrive(5, 5000)
        for _ in range(20):
            world.step()
        long = world.arrive(3000, 1)
        count = 0
        while long in world.alive:
            if flood:
                while len(world.alive) < 20:
                    world.arrive(15, 1)
            world.step()
            count += 1
        return count

    assert steps(flood=True) <= 2.3 * steps(flood=False)


@given(
    newcomers=st.lists(st.tuples(st.integers(1, 400), st.sampled_from("abc")), min_size=1, max_size=5),
    tenants=st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    costs=st.sampled_from(LONG_STEPS),
    mixes=st.booleans(),
)
def test_the_oldest_prompt_of_every_tenant_is_never_long_without_progress(
    newcomers: list[tuple[int, str]], tenants: list[str], costs: tuple[float, float], mixes: bool
) -> None:
    world = crowd(*costs, mixes)
    for tenant in tenants:
        world.arrive(1500, 1, tenant=tenant)
    since: dict[TokenSequence, int] = {}
    computed: dict[TokenSequence, int] = {}
    for number in range(40):
        if len(world.alive) < 12:
            prompt, tenant = newcomers[number % len(newcomers)]
            world.arrive(prompt, 1, tenant=tenant)
        world.step()
        pending = [row for row in world.scheduler.running if not row.decoding]
        for tenant in {row.tenant for row in pending}:
            oldest = min((row for row in pending if row.tenant == tenant), key=lambda row: row.ticket)
            since[oldest] = 0 if computed.get(oldest) != oldest.computed else since.get(oldest, 0) + 1
            computed[oldest] = oldest.computed
            # Every second step is for the oldest, and three tenants take turns.
            assert since[oldest] <= 2 * 3


@either_way
def test_a_step_is_little_longer_than_the_target_for_those_with_little_left(mixes: bool) -> None:
    world = crowd(10.0, 1.0, mixes)
    stream = world.arrive(5, 5000)
    for _ in range(20):
        world.step()
    world.arrive(8000, 1)
    for _ in range(60):
        world.step()
    world.stalls.clear()
    for _ in range(100):
        while len(world.alive) < 30:
            world.arrive(15, 1)
        world.step()
    assert world.stalls[stream.ticket] <= 1.25 * world.target_ms / 1000


@either_way
def test_the_short_prompts_of_a_tenant_need_not_wait_for_those_of_another(mixes: bool) -> None:
    world = crowd(1.0, 3.0, mixes)
    world.arrive(5, 1000, tenant="many")
    world.arrive(5000, 1, tenant="many")
    for _ in range(20):
        world.step()
    flood = [world.arrive(20, 1, tenant="many") for _ in range(20)]
    few = world.arrive(20, 1, tenant="few")
    assert steps_until(world, lambda: few.sampled > 0) <= 3
    assert any(row.remaining for row in flood)


def test_tenants_take_turns_with_long_prompts() -> None:
    world = crowd(20.0, 0.5, mixes=True)
    many = [world.arrive(3000, 1, tenant="many") for _ in range(8)]
    few = world.arrive(4000, 1, tenant="few")
    while few in world.alive:
        world.step()
    assert sum(row.computed for row in many) < 3.5 * 4000


def test_of_prompts_that_wait_the_one_with_priority_goes_first() -> None:
    world = crowd(20.0, 0.5, mixes=True)
    world.arrive(2000, 1)
    urgent = world.arrive(2500, 1, priority=2)
    while urgent in world.alive:
        world.step()
    assert len(world.alive) == 1


def jittery(seed: int) -> Callable[[], float]:
    """Passes that take now more and now less, and one in twenty three times as long."""
    dice = random.Random(seed)
    return lambda: dice.lognormvariate(0, 0.15) * (3 if dice.random() < 0.05 else 1)


def prompt_speed(fixed_ms: float, token_ms: float, *, mixes: bool, streams: int, seed: int | None) -> float:
    world = crowd(fixed_ms, token_ms, mixes)
    world.noise = jittery(seed) if seed is not None else world.noise
    for _ in range(streams):
        world.arrive(5, 30_000)
    for _ in range(10):
        world.step()
    prompts = [world.arrive(max(1500, int(15_000 / token_ms)), 1) for _ in range(2)]
    began_at = world.now
    while any(prompt in world.alive for prompt in prompts):
        world.step()
    return sum(len(prompt.prompt) for prompt in prompts) / (world.now - began_at)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seeds", [(None,), (1, 2, 3, 4)], ids=["steady", "jittery"])
@pytest.mark.parametrize(
    ("fixed_ms", "token_ms"), [(2000, 50), (600, 5), (150, 3), (50, 1), (35, 0.5), (10, 1), (1, 3)]
)
@either_way
def test_a_prompt_keeps_seven_tenths_of_its_speed_beside_a_stream_whatever_the_fixed_cost_of_a_step(
    mixes: bool, fixed_ms: float, token_ms: float, seeds: tuple[int | None, ...]
) -> None:
    alone, beside = (
        sum(prompt_speed(fixed_ms, token_ms, mixes=mixes, streams=streams, seed=seed) for seed in seeds)
        for streams in (0, 1)
    )
    assert beside >= 0.7 * alone


@pytest.mark.parametrize(("fixed_ms", "token_ms"), [(2000, 50), (150, 3), (35, 0.5), (10, 1)])
@either_way
def test_no_step_is_longer_than_the_target_or_what_its_fixed_cost_is_worth(
    mixes: bool, fixed_ms: float, token_ms: float
) -> None:
    world = crowd(fixed_ms, token_ms, mixes)
    stream = world.arrive(5, 30_000)
    for _ in range(10):
        world.step()
    world.stalls.clear()
    world.arrive(1500, 1)
    for _ in range(100):
        world.step()
    fixed = fixed_ms + token_ms if mixes else 2 * fixed_ms + 1
    slow = fixed_ms + 1 > world.target_ms / 2
    longest = max(world.target_ms, (1 + LEAST_PREFILL_SHARE) * fixed, slow * (fixed + 1000))
    assert world.stalls[stream.ticket] <= 1.1 * (longest + token_ms * SMALLEST_CHUNK) / 1000


def test_few_steps_are_small_to_learn_what_they_cost() -> None:
    world = crowd(20.0, 0.5, mixes=True)
    world.arrive(5, 30_000)
    for _ in range(10):
        world.step()
    prompt = world.arrive(39_000, 1)
    counts = []
    while prompt in world.alive:
        before = prompt.computed
        world.step()
        counts.append(prompt.computed - before)
    usual = sorted(counts)[len(counts) // 2]
    small = [count for count in counts[:-1] if 2 * count <= usual]
    assert 0 < len(small) <= (SURE_COSTS + 1) * (1 + len(counts) / REMEMBERED_COSTS)


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
    began_at = world.now
    overtook = 0
    while long in world.alive:
        short = world.arrive(50, 20)
        for _ in range(25):
            world.step()
        overtook += short not in world.alive and long in world.alive
        assert world.now < began_at + 30.0
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
        assert world.now < 2 * PRIORITY_STEP_S + 1.0
    assert world.now > PRIORITY_STEP_S


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
