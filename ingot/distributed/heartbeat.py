"""What is known of a rank: what it says of itself, and how the parent process sees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

SIGN: Final = 1  # from a rank: `Sign`
STANDINGS: Final = 2  # to rank 0: a list of `Standing`
FAREWELL: Final = 3  # to rank 0: why the group ends, as text

BEAT_S: Final = 0.25
"""Every rank shows that it lives this often,"""
FIRST_SIGN_S: Final = 60.0
"""from so long after its start on: a machine has to be reached, and Python to find its modules."""


class Sign(msgspec.Struct, frozen=True, array_like=True):
    """`step` is the last one that the rank has done, `stuck_s` how long it has been at one and the same piece of work;
    `ready` once it is loaded, `trouble` why it cannot go on."""

    ready: bool
    step: int
    stuck_s: float
    pid: int
    trouble: str = ""


class Standing(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    ready: bool
    step: int
    silent_s: float  # since its last sign of life
    late_s: float  # since it ought to have gone on

    def problem(self, limit_s: float) -> str | None:
        """Why the group cannot go on with it."""
        if self.silent_s > limit_s:
            return f"rank {self.rank} has given no sign of life for {self.silent_s:.0f} s"
        if self.late_s > limit_s:
            return f"rank {self.rank} has been at step {self.step + 1} for {self.late_s:.0f} s"
        return None


class Watched:
    """A rank as its parent sees it. All times are those of one monotonic clock."""

    def __init__(self, rank: int, now: float) -> None:
        self.rank = rank
        self.sign = Sign(False, 0, 0.0, 0)
        self._heard = now + FIRST_SIGN_S
        self._behind: tuple[int, float] | None = None  # at which step, and since when

    def hear(self, sign: Sign, now: float) -> None:
        self.sign, self._heard = sign, now

    def compare(self, furthest: int, now: float) -> None:
        """With the last step that any rank knows of."""
        step = self.sign.step
        if step >= furthest:
            self._behind = None
        elif self._behind is None or self._behind[0] != step:
            self._behind = step, now

    def standing(self, now: float) -> Standing:
        behind_s = 0.0 if self._behind is None else now - self._behind[1]
        silent_s = max(now - self._heard, 0.0)
        return Standing(self.rank, self.sign.ready, self.sign.step, silent_s, max(behind_s, self.sign.stuck_s))


class Watch:
    """All ranks of a group."""

    def __init__(self, size: int, now: float) -> None:
        self._ranks = [Watched(rank, now) for rank in range(size)]

    def hear(self, rank: int, sign: Sign, now: float) -> None:
        self._ranks[rank].hear(sign, now)
        furthest = max(each.sign.step for each in self._ranks)
        for each in self._ranks[1:]:  # the first one says what is next: it is late when it says so itself
            each.compare(furthest, now)

    @property
    def ready(self) -> bool:
        return all(each.sign.ready for each in self._ranks)

    def pid(self, rank: int) -> int:
        """Of its process, on its machine; 0 where it has not said so yet."""
        return self._ranks[rank].sign.pid

    def standings(self, now: float) -> list[Standing]:
        return [each.standing(now) for each in self._ranks]


def first_problem(standings: Iterable[Standing], limit_s: float) -> str | None:
    """Of who is furthest behind."""
    worst = max(standings, key=lambda one: max(one.silent_s, one.late_s), default=None)
    return None if worst is None else worst.problem(limit_s)


def not_ready(standings: Iterable[Standing]) -> str | None:
    """Who is still being loaded."""
    return next((f"rank {one.rank} is being started" for one in standings if not one.ready), None)
