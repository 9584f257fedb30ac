"""While requests run, copying records off the device takes little of the time, and little at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ingot.cache import tree
from ingot.cache.disk.counts import DiskCounts
from ingot.cache.disk.header import PathHash, extended
from ingot.cache.tree import Node, Owner
from ingot.config import Settings
from ingot.engine.spilling import BURST_S, BUSY_SHARE, Spiller

RECORD_S = 0.004
"""What copying a record takes here."""
STEP_S = 0.03
NODE: Any = SimpleNamespace(is_saved=False, root_owner=SimpleNamespace(exact=False))


class Copying(Spiller):
    """Where nothing but copying takes time, and time is only counted."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.now, self.copied = 0.0, 0
        self.disk: Any = SimpleNamespace(has_room=lambda: has_room, counts=DiskCounts())
        super().__init__(self.disk, cast(Any, None), cast(Any, None), clock=lambda: self.now)

    def _hand_over(self, node: object) -> bool:
        self.now += RECORD_S
        self.copied += 1
        return True


def test_copying_takes_a_small_share_of_the_time_and_what_would_take_more_is_dropped() -> None:
    spiller, steps = Copying(), 2000
    for _ in range(steps):
        spiller.now += STEP_S
        for _ in range(3):
            spiller.spill(NODE)
    taken = spiller.copied * RECORD_S
    assert BUSY_SHARE * steps * STEP_S <= taken <= BURST_S + BUSY_SHARE * spiller.now + RECORD_S
    assert spiller.copied + spiller.disk.counts.dropped == 3 * steps


@pytest.mark.parametrize("idle_s", [0.0, 3600.0])
def test_between_two_steps_it_takes_no_longer_than_one_of_them_may(idle_s: float) -> None:
    spiller = Copying()
    spiller.now += idle_s
    begun = spiller.now
    kept = [spiller.spill(NODE) for _ in range(100)]
    assert 0 < spiller.now - begun <= BURST_S + RECORD_S < Settings().target_itl_ms / 1000
    assert kept == [True] * spiller.copied + [False] * (100 - spiller.copied)


def test_what_finds_the_writers_queue_full_is_dropped_before_it_is_copied() -> None:
    spiller = Copying(has_room=False)
    assert not spiller.spill(NODE) and spiller.copied == 0 and spiller.disk.counts.dropped == 1


def chain(*pieces: int) -> list[Node]:
    """A root and the nodes behind it, of so many tokens each; the tokens of all such chains are the same."""
    nodes = [Node(None, (), None, owner=Owner())]
    for length in pieces:
        begin = nodes[-1].end
        nodes.append(Node(nodes[-1], tuple(range(begin, begin + length)), None, begin + length))
    return nodes


def test_no_token_of_a_path_is_hashed_twice_however_many_records_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(before: PathHash, tokens: tuple[int, ...]) -> PathHash:
        hashed.append(len(tokens))
        return extended(before, tokens)

    monkeypatch.setattr(tree, "extended", counted)
    nodes = chain(*[5] * 40)
    digests = [node.path_hash.hexdigest() for node in nodes[1:]]
    assert sum(hashed) == 200 and len(set(digests)) == 40
    branch = Node(nodes[-1], (7, 8), None, 202)
    assert branch.path_hash.hexdigest() not in digests and sum(hashed) == 202


def test_a_path_has_the_same_digest_wherever_it_is_cut() -> None:
    assert chain(200)[-1].path_hash.hexdigest() == chain(3, 100, 97)[-1].path_hash.hexdigest()
    assert chain(200)[-1].path_hash.hexdigest() != chain(199)[-1].path_hash.hexdigest()
