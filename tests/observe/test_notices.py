from __future__ import annotations

import logging

import pytest

from ingot.observe import notices
from ingot.observe.notices import Notice


def test_what_comes_up_often_is_said_seldom_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(notices.time, "monotonic", lambda: now)
    notice = Notice(logging.getLogger("ingot.test"), every_s=60.0)
    for _ in range(1000):
        notice.warn("no room for %s", "x")
    assert [record.getMessage() for record in caplog.records] == ["no room for x"]
    now = 161.0
    notice.warn("no room for %s", "y")
    assert caplog.records[-1].getMessage() == "no room for y (and 999 times more before)"
