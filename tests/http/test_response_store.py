"""Stored responses outlive the server, stay within their bounds, and are each tenant's own."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import Unavailable
from ingot.http import response_store
from ingot.http.response_store import ResponseStore, StoreLimits
from ingot.protocol.responses.answers import ResponseBody, ResponseReasoningEcho, ResponseTextEcho
from tests.processes import ROOT, start

CAPS = StoreLimits(rows=100, size=1 << 20, age_s=3600.0)
ITEMS = [{"type": "message", "id": "msg_1", "role": "user", "content": "Hi"}]


def response(name: str, **changes: Any) -> ResponseBody:
    values: dict[str, Any] = {
        "id": name,
        "created_at": 1,
        "status": "completed",
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "model": "toy",
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": ResponseReasoningEcho(),
        "safety_identifier": None,
        "store": True,
        "temperature": 1.0,
        "text": ResponseTextEcho({"type": "text"}),
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "user": None,
        "metadata": {},
    }
    return ResponseBody(**values | changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "responses.db"


@pytest.fixture
def store(path: Path) -> Iterator[ResponseStore]:
    made = ResponseStore(path, CAPS)
    yield made
    made.close()


def test_a_response_is_found_with_what_it_answered(store: ResponseStore) -> None:
    store.keep("t", response("resp_1"), ITEMS)
    stored = store.find("t", "resp_1")
    assert stored is not None
    assert (stored.response["id"], stored.response["status"], stored.input) == ("resp_1", "completed", ITEMS)
    assert store.find("t", "resp_2") is None


def test_one_tenants_responses_are_no_other_tenants(store: ResponseStore) -> None:
    store.keep("t", response("resp_1"), ITEMS)
    assert store.find("other", "resp_1") is None
    assert not store.delete("other", "resp_1")
    assert store.find("t", "resp_1") is not None


def test_a_deleted_response_is_gone(store: ResponseStore) -> None:
    store.keep("t", response("resp_1"), ITEMS)
    assert store.delete("t", "resp_1")
    assert store.find("t", "resp_1") is None
    assert not store.delete("t", "resp_1")


def test_keeping_a_response_again_tells_what_became_of_it(store: ResponseStore) -> None:
    store.keep("t", response("resp_1", status="queued"), ITEMS)
    store.keep("t", response("resp_1", status="completed"), ITEMS)
    stored = store.find("t", "resp_1")
    assert stored is not None and stored.response["status"] == "completed"


def test_responses_and_the_secret_outlive_the_server(store: ResponseStore, path: Path) -> None:
    store.keep("t", response("resp_1"), ITEMS)
    secret = store.secret()
    store.close()
    again = ResponseStore(path, CAPS)
    assert again.find("t", "resp_1") is not None
    assert again.secret() == secret and len(secret) == 32
    again.close()


def test_nothing_is_written_before_it_is_needed_and_then_for_nobody_else_to_read(
    store: ResponseStore, path: Path
) -> None:
    assert not path.exists()
    store.keep("t", response("resp_1"), ITEMS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_oldest_go_when_there_are_too_many(path: Path) -> None:
    store = ResponseStore(path, StoreLimits(rows=3, size=1 << 20, age_s=3600.0))
    for number in range(5):
        store.keep("t", response(f"resp_{number}"), ITEMS)
    assert [number for number in range(5) if store.find("t", f"resp_{number}")] == [2, 3, 4]
    store.close()


def test_the_oldest_go_when_they_are_too_large(path: Path) -> None:
    store = ResponseStore(path, StoreLimits(rows=100, size=3000, age_s=3600.0))
    for number in range(5):
        noise = [{"id": "x", "text": os.urandom(500).hex()}]
        store.keep("t", response(f"resp_{number}"), noise)
    left = [number for number in range(5) if store.find("t", f"resp_{number}")]
    assert 0 < len(left) < 5 and left[-1] == 4
    store.close()


def test_what_is_too_old_is_not_found(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.keep("t", response("resp_1"), ITEMS)
    later = response_store.time.time() + CAPS.age_s + 1
    monkeypatch.setattr(response_store.time, "time", lambda: later)
    assert store.find("t", "resp_1") is None
    store.keep("t", response("resp_2"), ITEMS)
    assert store.find("t", "resp_2") is not None


def test_a_damaged_file_is_set_aside_and_the_store_serves(store: ResponseStore, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no database, and it is longer than a header of one would be" * 40)
    store.keep("t", response("resp_1"), ITEMS)
    assert store.find("t", "resp_1") is not None
    assert len(list(path.parent.glob("responses.db.damaged-*"))) == 1


def test_a_store_of_another_version_is_left_alone(store: ResponseStore, path: Path) -> None:
    store.keep("t", response("resp_1"), ITEMS)
    store.close()
    connection = response_store.sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(Unavailable):
        ResponseStore(path, CAPS).find("t", "resp_1")
    assert list(path.parent.glob("*.damaged-*")) == []


def test_a_place_that_cannot_be_written_is_said_without_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = ResponseStore(tmp_path / "file" / "responses.db", CAPS)
    with pytest.raises(Unavailable) as refused:
        store.keep("t", response("resp_1"), ITEMS)
    assert "file" not in refused.value.message.replace("store: false", "")
    assert store.secret() == store.secret()


WRITER = """
import sys
from pathlib import Path
from ingot.http.response_store import ResponseStore
from tests.http.test_response_store import CAPS, ITEMS, response
store = ResponseStore(Path(sys.argv[1]), CAPS)
number = 0
while True:
    store.keep("t", response(f"resp_{number % 50}"), ITEMS)
    print(number, flush=True)
    number += 1
"""


def test_a_process_that_is_killed_loses_nothing_that_was_acknowledged(path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(path)]
    with start(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 20:
                break
        writer.send_signal(signal.SIGKILL)
        done = [int(line) for line in writer.stdout.read().split()]
    store = ResponseStore(path, CAPS)
    for number in range(max([20, *done]) + 1):
        assert store.find("t", f"resp_{number % 50}") is not None
    store.close()


def test_a_busy_tenant_takes_what_others_leave_and_nothing_of_their_shares(path: Path) -> None:
    store = ResponseStore(path, StoreLimits(rows=6, size=1 << 20, age_s=3600.0))
    for number in range(6):
        store.keep("busy", response(f"resp_b{number}"), ITEMS)
    assert store.find("busy", "resp_b0") is not None, "what nobody else needs is lent"
    for number in range(3):
        store.keep("calm", response(f"resp_c{number}"), ITEMS)
    for number in range(6, 20):
        store.keep("busy", response(f"resp_b{number}"), ITEMS)
    assert all(store.find("calm", f"resp_c{number}") is not None for number in range(3))
    assert [n for n in range(20) if store.find("busy", f"resp_b{n}") is not None] == [17, 18, 19]
    store.close()


def test_large_responses_of_one_tenant_evict_its_own(path: Path) -> None:
    store = ResponseStore(path, StoreLimits(rows=100, size=20_000, age_s=3600.0))
    store.keep("calm", response("resp_c"), ITEMS)
    for number in range(10):
        noise = [{"type": "message", "text": os.urandom(4000).hex()}]
        store.keep("busy", response(f"resp_b{number}"), noise)
    assert store.find("calm", "resp_c") is not None
    assert store.find("busy", "resp_b0") is None
    store.close()


def test_a_full_disk_is_said_before_anything_is_computed(path: Path) -> None:
    store = ResponseStore(path, CAPS)
    store.check()
    assert store._connection is not None
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    store._connection.execute("DELETE FROM secrets WHERE name = 'room'")
    store._connection.execute("INSERT INTO secrets VALUES ('filler', zeroblob(12000))")
    store._connection.commit()
    with pytest.raises(Unavailable, match=r"disk is full\. Send `store: false`"):
        store.check()
    assert len(store.secret()) == 32
    store.close()
