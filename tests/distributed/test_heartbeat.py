from __future__ import annotations

from ingot.distributed.heartbeat import (
    FIRST_HEARTBEAT_S,
    GroupWatch,
    Heartbeat,
    RankStatus,
    first_rank_problem,
    rank_not_ready,
)

LIMIT_S = 5.0


def sign(step: int, stuck_s: float = 0.0) -> Heartbeat:
    return Heartbeat(True, step, stuck_s, 1)


def heard(watch: GroupWatch, now: float, *steps: int) -> None:
    for rank, step in enumerate(steps):
        watch.receive(rank, sign(step), now)


def problem(watch: GroupWatch, now: float) -> str | None:
    return first_rank_problem(watch.statuses(now), LIMIT_S)


def test_ranks_that_are_as_far_as_each_other_may_rest_for_as_long_as_they_like() -> None:
    watch = GroupWatch(2, 0.0)
    heard(watch, 1.0, 7, 7)
    heard(watch, 1000.0, 7, 7)
    assert problem(watch, 1000.1) is None


def test_a_rank_that_others_wait_for_is_named_with_its_step() -> None:
    watch = GroupWatch(3, 0.0)
    heard(watch, 600.0, 7, 7, 7)  # idle for ten minutes, which is nobody's fault
    for now in (600.2, 604.0, 605.3):
        heard(watch, now, 8, 8, 7)
    assert problem(watch, 605.0) is None
    assert problem(watch, 605.3) == "rank 2 has been at step 8 for 5 s"


def test_a_rank_that_moves_is_not_late_however_far_ahead_others_are() -> None:
    watch = GroupWatch(2, 0.0)
    for second in range(20):
        heard(watch, float(second), 100 + second, second)
    assert problem(watch, 19.5) is None


def test_a_rank_that_is_inside_of_one_step_for_too_long_is_late_though_nobody_is_ahead() -> None:
    watch = GroupWatch(2, 0.0)
    heard(watch, 1.0, 3, 3)
    watch.receive(0, sign(3, stuck_s=5.5), 6.0)
    watch.receive(1, sign(3), 6.0)
    assert problem(watch, 6.0) == "rank 0 has been at step 4 for 6 s"


def test_silence_counts_from_the_last_sign_and_is_forgiven_while_a_rank_starts() -> None:
    watch = GroupWatch(2, 0.0)
    watch.receive(0, sign(0), FIRST_HEARTBEAT_S + 4.0)
    assert problem(watch, FIRST_HEARTBEAT_S + 4.0) is None
    assert problem(watch, FIRST_HEARTBEAT_S + 5.2) == "rank 1 has sent no heartbeat for 5 s"


def test_a_group_is_ready_once_every_rank_is() -> None:
    watch = GroupWatch(2, 0.0)
    watch.receive(0, sign(0), 1.0)
    watch.receive(1, Heartbeat(False, 0, 0.0, 1), 1.0)
    assert not watch.ready
    assert rank_not_ready(watch.statuses(1.0)) == "rank 1 is being started"
    watch.receive(1, sign(0), 2.0)
    assert watch.ready
    assert rank_not_ready(watch.statuses(2.0)) is None


def test_nobody_is_no_problem() -> None:
    assert first_rank_problem([], LIMIT_S) is None
    assert rank_not_ready([RankStatus(0, True, 0, 0.0, 0.0)]) is None
