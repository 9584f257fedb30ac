from __future__ import annotations

from ingot.observe.metrics import RecentByTenant


def test_the_oldest_is_forgotten_when_there_is_no_room() -> None:
    recent: RecentByTenant[int] = RecentByTenant(2)
    for number in range(3):
        recent.add("", str(number), number)
    assert [recent.get("", str(number)) for number in range(3)] == [None, 1, 2]


def test_a_busy_tenant_makes_nobody_elses_be_forgotten() -> None:
    recent: RecentByTenant[int] = RecentByTenant(1)
    recent.add("quiet", "a", 1)
    for number in range(9):
        recent.add("busy", str(number), number)
    assert recent.get("quiet", "a") == 1
    assert recent.get("busy", "a") is None
