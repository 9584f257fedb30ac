"""A group of two ranks in one process: one leads, the other follows in a thread, and each has all of the model. So
nothing has to be added up, and whatever a pass gives on the one it has to give on the other, bit by bit: the one that
follows has been told all that it has to know."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.config import Settings
from ingot.distributed import follower, leader
from ingot.distributed.group import JoinedGroup
from ingot.distributed.place import HostAddress, RankConfig
from ingot.distributed.wire import Link
from ingot.engine.engine import Engine
from ingot.engine.loading import language_model
from ingot.models.parallelism import ModelSharding
from tests.distributed import playing

LIMIT_S = 60.0
WHERE = RankConfig(1, 2, HostAddress("nowhere", 1), None, "of nobody but this test")


OTHER_PART = "tensor, rank 1 of 2"


class OtherShare(ModelSharding):
    """Of the one that follows: all of the model, and files of its own."""

    @property
    def part(self) -> str:
        return OTHER_PART


class Echo:
    """What passes gave, on either side."""

    def __init__(self) -> None:
        self.led: list[np.ndarray[Any, Any]] = []
        self.followed: list[np.ndarray[Any, Any]] = []
        self.trouble: BaseException | None = None

    def check(self) -> None:
        assert self.trouble is None, self.trouble
        assert len(self.led) == len(self.followed) > 0
        for number, (ours, theirs) in enumerate(zip(self.led, self.followed, strict=True)):
            assert np.array_equal(ours, theirs), f"pass {number} of {len(self.led)} gives something else"


@contextmanager
def leading(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> Iterator[tuple[Engine, Echo]]:
    """An engine of rank 0, and what its passes and the other's give; the latter has ended when this has."""
    echo, tokens = Echo(), Queue[mx.array]()
    ours, theirs = socket.socketpair()
    sharing, other = ModelSharding("tensor", mx.distributed.init()), OtherShare("tensor", mx.distributed.init())
    lead, follow = leader.LeaderAdapter.run, follower.run_forward

    def led(*given: Any, **asked: Any) -> Any:
        found = lead(*given, **asked)
        logits = found[0] if isinstance(found, tuple) else found
        echo.led.append(np.array(logits.astype(mx.float32)))
        return found

    def followed(*given: Any, **asked: Any) -> Any:
        logits = follow(*given, **asked)
        echo.followed.append(np.array(logits.astype(mx.float32)))
        return logits

    def told(given: mx.array, group: Any) -> mx.array:
        mx.eval(given)
        tokens.put(given)
        return given

    def run() -> None:
        try:
            follower.run_follower(settings, folder, WHERE, lambda step: None)
        except BaseException as error:  # which the test is to see
            echo.trouble = error

    monkeypatch.setattr(
        language_model, "join_as_leader", lambda settings: JoinedGroup(sharing, [Link(ours, "rank 1")], 2)
    )
    monkeypatch.setattr(follower, "join_group", lambda settings, where: JoinedGroup(other, [Link(theirs, "rank 0")], 2))
    monkeypatch.setattr(leader, "broadcast_tokens", told)
    monkeypatch.setattr(follower, "broadcast_tokens", lambda given, group: tokens.get(timeout=LIMIT_S))
    monkeypatch.setattr(leader.LeaderAdapter, "run", led)
    monkeypatch.setattr(follower, "run_forward", followed)
    thread = Thread(target=run, daemon=True)
    with ours, theirs:
        thread.start()
        engine = playing.started(folder, settings, **more)
        try:
            yield engine, echo
        finally:
            engine.close()
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "the one that follows does not end"
