"""Ranks that die at any moment, again and again, under clients that do not stop asking."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import tiny
from tests.distributed.groups import write_model
from tests.distributed.serving import PATIENCE_S, Group, engines, is_gone, is_whole, standins, started, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
KILLS = int(os.environ.get("INGOT_TEST_KILLS", "15"))
CLIENTS = 3
IDLE_S = float(os.environ.get("INGOT_TEST_IDLE_S", "30"))  # more than a rank may be silent


@pytest.fixture(params=["stand-ins", "engines"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Of a group of three that only count, or of two with a model."""
    if request.param == "stand-ins":
        return standins(3)
    write_model(tmp_path, tiny.CONFIGS["llama"])
    return engines(tmp_path, 2)


class Client(threading.Thread):
    """Asks all the time, and remembers when each answer, or what came instead of one, began and ended."""

    def __init__(self, group: Group) -> None:
        super().__init__(daemon=True)
        self.group, self.over = group, False
        self.ended: list[tuple[float, float, bool]] = []

    def run(self) -> None:
        while not self.over:
            began = time.monotonic()
            status, message = self.group.ask()
            whole = is_whole((status, message))
            assert whole or status in (0, 503) or '"error"' in message
            self.ended.append((began, time.monotonic(), whole))
            if not whole:
                time.sleep(0.1)


@dataclass
class Seen:
    """Seconds from each kill on."""

    heard: list[float] = field(default_factory=list)  # until each client under way was told
    begun: list[float] = field(default_factory=list)  # until nobody of before was left, and new ranks were started
    back: list[float] = field(default_factory=list)  # until the group answered again

    def __str__(self) -> str:
        each = {"told": self.heard, "started again": self.begun, "back": self.back}
        return ", ".join(f"{name} after {max(spent):.1f} s at most" for name, spent in each.items())


def kill_one(group: Group, clients: list[Client], dice: random.Random, seen: Seen) -> None:
    ranks = group.ranks
    time.sleep(dice.uniform(0.0, 1.0))
    os.kill(dice.choice(ranks), signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: all(map(is_gone, ranks)) and len(set(group.ranks) - set(ranks)) == len(ranks))
    seen.begun.append(time.monotonic() - killed)
    wait_until(lambda: all(each.ended and each.ended[-1][0] > killed for each in clients))
    group.await_ready()
    seen.back.append(time.monotonic() - killed)
    for client in clients:
        seen.heard += [end - killed for begin, end, _ in client.ended if begin <= killed < end]


def test_whoever_dies_each_client_hears_of_it_and_nobody_is_left_over(command: list[str]) -> None:
    dice, seen = random.Random(25), Seen()
    began = time.monotonic()
    with started(command) as group:
        print(f"there after {time.monotonic() - began:.1f} s")
        size = len(group.ranks)
        clients = [Client(group) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        for _ in range(KILLS):
            kill_one(group, clients, dice, seen)
        for client in clients:
            client.over = True
            client.join(PATIENCE_S)
            assert not client.is_alive()
        assert all(any(whole for *_, whole in client.ended) for client in clients)
        assert len(group.ranks) == size
    print(f"{KILLS} kills: {seen}")
    assert len(seen.heard) > KILLS  # most kills met somebody under way


def test_a_group_that_nobody_asked_for_a_while_answers(command: list[str]) -> None:
    with started(command) as group:
        ranks = group.ranks
        time.sleep(IDLE_S)
        assert is_whole(group.ask())
        assert group.ranks == ranks
