"""What the log says of requests, by a clock that the test sets."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ingot.engine.request import CacheReport, RequestStatus
from ingot.engine.telemetry import PROGRESS_S, RequestLog, error_outcome
from ingot.errors import Cancelled, ClientLeft, DeadlineExceeded, IngotError


@pytest.fixture(autouse=True)
def all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ingot")


def status(**changes: Any) -> RequestStatus:
    known = {
        "id": "msg_1",
        "phase": "prefill",
        "prompt_tokens": 1000,
        "prefilled_tokens": 200,
        "completion_tokens": 0,
        "max_tokens": 16,
        "age_s": 1.0,
        "tokens_per_second": 0.0,
        "cache": (CacheReport(1000, 200, 200, "new_turn"),),
    }
    return RequestStatus(**known | changes)


def test_a_request_is_told_of_once_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    request_log = RequestLog("toy")
    request_log.began(status(), "/v1/messages", 0.0)
    request_log.began(status(), "/v1/messages", 1.0)  # a second answer of the same request
    assert caplog.messages == ["msg_1 began: /v1/messages, model toy, 1000 prompt tokens, 200 of them cached"]


def test_a_long_prompt_is_told_of_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    request_log = RequestLog("toy")
    request_log.began(status(), "/v1/messages", 100.0)
    caplog.clear()
    for second in range(1, 31):
        request_log.log_progress(100.0 + second, lambda done=200 + 10 * second: [status(prefilled_tokens=done)])
    assert PROGRESS_S == 10.0
    assert caplog.messages == [
        "msg_1 prompt: 300 of 1000 tokens, 10.0 tokens/s, about 70 s left",
        "msg_1 prompt: 400 of 1000 tokens, 10.0 tokens/s, about 60 s left",
        "msg_1 prompt: 500 of 1000 tokens, 10.0 tokens/s, about 50 s left",
    ]


def test_a_prompt_that_was_set_back_gets_no_estimate(caplog: pytest.LogCaptureFixture) -> None:
    request_log = RequestLog("toy")
    request_log.began(status(), "", 0.0)
    request_log.log_progress(10.0, lambda: [status(prefilled_tokens=0)])
    assert caplog.messages[-1] == "msg_1 prompt: 0 of 1000 tokens, 0.0 tokens/s, time left unknown"


def test_nobody_is_asked_how_far_requests_are_while_no_line_is_due() -> None:
    request_log = RequestLog("toy")
    request_log.began(status(), "", 0.0)

    def asked() -> list[RequestStatus]:
        raise AssertionError("nothing is due")

    request_log.log_progress(9.9, asked)
    request_log.log_progress(10.0, lambda: [status(phase="decode")])
    request_log.log_progress(1000.0, asked)  # an answer in the making tells of itself


def test_the_end_tells_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    request_log = RequestLog("toy")
    request_log.ended(status(completion_tokens=41, age_s=12.5, first_token_s=2.5, phase="decode"), "tool_calls")
    assert caplog.messages == [
        "msg_1 ended, tool_calls: 1000 prompt tokens (20% cached), first token after 2.50 s, 41 answer tokens, "
        "4.0 tokens/s"
    ]


def test_an_end_before_the_first_token_tells_how_far_it_was(caplog: pytest.LogCaptureFixture) -> None:
    request_log = RequestLog("toy")
    request_log.ended(status(prefilled_tokens=640, age_s=300.0), error_outcome(ClientLeft("gone")))
    assert caplog.messages == [
        "msg_1 ended, the client left (499): 1000 prompt tokens (20% cached), 640 of them computed or cached, "
        "no token after 300.00 s"
    ]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ClientLeft("x"), "the client left (499)"),
        (Cancelled("x"), "cancelled (499 cancelled)"),
        (DeadlineExceeded("x"), "failed (504 deadline_exceeded)"),
        (IngotError("something private"), "failed (500 internal_error)"),
    ],
)
def test_an_outcome_names_the_status_and_never_the_message(error: IngotError, outcome: str) -> None:
    assert error_outcome(error) == outcome


def test_a_request_that_ended_is_forgotten() -> None:
    request_log = RequestLog("toy")
    request_log.began(status(), "", 0.0)
    request_log.ended(status(), "stop")
    request_log.log_progress(1000.0, lambda: pytest.fail("nothing runs"))
