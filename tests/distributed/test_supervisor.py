from __future__ import annotations

import os
import queue
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from ingot.config import Settings
from ingot.distributed.hosts import local_hosts
from ingot.distributed.supervisor import MOST_RESTARTS, GroupFault, RankGone, RestartBackoff, Supervisor
from ingot.errors import DeviceLost
from ingot.http.server import UnavailableServer
from tests.distributed.serving import PATIENCE_S, Group, is_gone, standins, started, stop, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SIZE = 3


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with started(standins(SIZE)) as found:
        yield found


@pytest.fixture
def ready(group: Group) -> Group:
    group.await_ready()
    return group


def test_a_group_serves_and_says_how_each_rank_stands(ready: Group) -> None:
    status, message = ready.ask()
    assert status == 200
    assert "39 " in message
    wait_until(lambda: len(steps := {rank["step"] for rank in ready.ranks_told()}) == 1 and min(steps) >= 40)
    step = ready.ranks_told()[0]["step"]
    assert f'ingot_rank_step{{model_name="org/toy",rank="2"}} {step}' in ready.get("/metrics")[1]


@pytest.mark.parametrize("rank", [0, SIZE - 1])
def test_after_the_death_of_a_rank_clients_hear_of_it_and_all_ranks_are_new(ready: Group, rank: int) -> None:
    before = ready.ranks
    with ThreadPoolExecutor() as clients:
        asked = [clients.submit(ready.ask) for _ in range(3)]
        wait_until(lambda: ready.health().get("running") == 3)
        os.kill(before[rank], signal.SIGKILL)
        ended = [client.result(PATIENCE_S) for client in asked]
    for status, message in ended:
        assert "39 " not in message
        # The answers had begun; where the first rank is dead its connections just end.
        assert rank == 0 or (status == 200 and f"rank {rank} was killed by signal 9" in message)
    wait_until(lambda: all(map(is_gone, before)))
    status, message = ready.ask()  # whoever answers: the new ranks, or the parent until they are there
    assert "39 " in message if status == 200 else (status == 503 and "unavailable" in message)
    ready.await_ready()
    assert ready.ask()[0] == 200


def test_a_stopped_parent_lets_requests_finish_and_leaves_nobody() -> None:
    with started(standins(2)) as group, ThreadPoolExecutor() as clients:
        ranks = group.ranks
        asked = clients.submit(group.ask)
        wait_until(lambda: group.health()["running"] == 1)
        group.parent.terminate()
        status, message = asked.result(PATIENCE_S)
        assert status == 200
        assert "39 " in message
        assert group.parent.wait(PATIENCE_S) == 0
        assert all(map(is_gone, ranks))


def test_a_rank_that_stands_still_is_noticed_and_all_are_ended() -> None:
    with started(standins(2, stall_s=2.0)) as group:
        before = group.ranks
        stop(before[1])
        wait_until(lambda: all(map(is_gone, before)))


def test_no_rank_outlives_its_parent_not_even_one_that_stands_still() -> None:
    with started(standins(2)) as group:
        ranks = group.ranks
        stop(ranks[1])
        group.parent.kill()
        wait_until(lambda: all(map(is_gone, ranks)))


def test_a_rank_that_lost_its_device_is_named_and_started_again_however_early() -> None:
    gone = RankGone(1, DeviceLost.exit_code)
    assert str(gone) == "rank 1 lost its device"
    with socket.socket() as listening:
        supervisor = Supervisor(local_hosts(2), (), [listening], UnavailableServer([listening], Settings()), 1.0, 1.0)
        life = SimpleNamespace(mail=queue.SimpleQueue())
        assert supervisor._cause(life, gone) == GroupFault("rank 1 lost its device", final=False)  # type: ignore[arg-type]
        assert supervisor._cause(life, RankGone(1, 1)).final  # type: ignore[arg-type]


def test_pauses_grow_while_a_group_never_comes_to_serving_and_end() -> None:
    patience = RestartBackoff()
    pauses = [patience.pause_after(was_ready=False) for _ in range(MOST_RESTARTS + 1)]
    assert pauses[0] == pytest.approx(0.1)
    assert pauses[:-1] == sorted(pauses[:-1])  # type: ignore[type-var]
    assert pauses[-1] is None


def test_a_group_that_served_is_started_again_soon_however_often() -> None:
    patience = RestartBackoff()
    for _ in range(MOST_RESTARTS):
        patience.pause_after(was_ready=False)
    for _ in range(100):
        assert patience.pause_after(was_ready=True) == pytest.approx(0.1)


def test_a_group_that_was_started_to_ignore_interrupts_ignores_them() -> None:
    """As a shell without job control starts what runs in the background."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    made = Supervisor(hosts=None, arguments=(), listening=(), fallback=None, stall_s=1, drain_s=1)  # type: ignore[arg-type]
    try:
        made._take_signals()
        for number in numbers:
            signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (made.signals.stops, made.signals.reloads) == (1, 1)
