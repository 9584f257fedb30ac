"""A prompt that takes 400 s, answered to unmodified agents that give up after 300 s in which no event came.

Nobody waits so long here: everything is scaled by one factor, the time that the prompt takes, the server's intervals,
and the agent's own limit.

- Codex: `stream_idle_timeout_ms` is a setting of its own, scaled to a fortieth.
- Claude Code lets nobody shorten its limit (`CLAUDE_STREAM_IDLE_TIMEOUT_MS` only makes it longer). Right where it sets
  its clock back, it also writes to its log where no event came for 30 s, which is a tenth of the limit, by the same
  count: so a tenth is what everything else is scaled to.

`REAL_TIME=1` also runs both at their true length, with the settings that are the default.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ingot.config import Settings
from ingot.engine.engine import Engine
from tests import scripted
from tests.clients import test_claude_code, test_codex
from tests.clients.agents import needs_node_client
from tests.http.running import running
from tests.http.scripted import settings

pytestmark = pytest.mark.clients

PROMPT_S, LIMIT_S = 400.0, 300.0
DEFAULTS = Settings()
CODEX, CLAUDE = 1 / 40, 1 / 10
"""What time is scaled by."""
OFF = 3600.0
STALL = "Streaming stall detected"
ABORTED = "idle timeout waiting for SSE"

needs_codex = needs_node_client("codex")
needs_claude = pytest.mark.skipif(not test_claude_code.PROGRAMS, reason="Claude Code is not installed")


@contextmanager
def slow(seconds: float, **changes: Any) -> Iterator[str]:
    """The URL of a server whose every prompt takes `seconds` to compute."""
    engines: list[Engine] = []

    def wait(width: int) -> None:
        if width > 1:
            [asked] = engines[0].status()
            time.sleep(seconds * width / asked.prompt_tokens)

    engines.append(scripted.start(lambda prompt: "Hello from afar.", wait=wait))
    try:
        with running(engines[0], settings(alias=("claude-*=default",), **changes)) as url:
            yield url
    finally:
        engines[0].close()


def scaled(factor: float) -> dict[str, float]:
    return {"keepalive_s": DEFAULTS.keepalive_s * factor, "idle_event_s": DEFAULTS.idle_event_s * factor}


def ask_codex(folder: Path, url: str, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    (folder / "codex").mkdir(parents=True)
    limits = f"stream_idle_timeout_ms = {round(1000 * limit_s)}\nstream_max_retries = 0\n"
    (folder / "codex" / "config.toml").write_text(test_codex.CONFIG.format(url=url) + limits)
    return test_codex.codex(folder, "Say hello.", timeout=2 * PROMPT_S, codes=(0, 1))


def ask_claude(folder: Path, url: str) -> tuple[list[Any], str]:
    """What it prints, and its log."""
    folder.mkdir(exist_ok=True)
    told = test_claude_code.claude(url, folder, "Say hello.", "--debug", code=None, wait_s=2 * PROMPT_S)
    logs = (folder / "home" / ".claude" / "debug").glob("*.txt")
    return told, "".join(log.read_text() for log in logs)


def assert_codex_is_answered(told: list[dict[str, Any]]) -> None:
    assert [event for event in told if event["type"] in ("error", "turn.failed")] == []
    assert [item["text"] for item in test_codex.items(told, "agent_message")] == ["Hello from afar."]


def assert_claude_is_answered(told: list[Any], log: str) -> None:
    assert (told[-1]["subtype"], told[-1]["result"]) == ("success", "Hello from afar.")
    assert not [one for one in told if one.get("subtype") == "api_retry"]
    assert "Stream started - received first chunk" in log, "it is the log that would tell"
    assert STALL not in log and "Streaming idle" not in log


@needs_codex
def test_codex_waits_for_a_slow_prompt(tmp_path: Path) -> None:
    with slow(PROMPT_S * CODEX, **scaled(CODEX)) as url:
        assert_codex_is_answered(ask_codex(tmp_path, url, LIMIT_S * CODEX))


@needs_codex
def test_codex_gives_up_where_comments_are_all_that_comes(tmp_path: Path) -> None:
    with slow(PROMPT_S * CODEX, **scaled(CODEX) | {"idle_event_s": OFF}) as url:
        told = ask_codex(tmp_path, url, LIMIT_S * CODEX)
    assert ABORTED in told[-1]["error"]["message"]


@needs_claude
def test_claude_code_counts_events_while_a_slow_prompt_is_computed(tmp_path: Path) -> None:
    with slow(PROMPT_S * CLAUDE, **scaled(CLAUDE)) as url:
        assert_claude_is_answered(*ask_claude(tmp_path, url))


@needs_claude
def test_claude_code_counts_no_pings(tmp_path: Path) -> None:
    with slow(PROMPT_S * CLAUDE, **scaled(CLAUDE) | {"idle_event_s": OFF}) as url:
        _, log = ask_claude(tmp_path, url)
    assert STALL in log


@needs_codex
@needs_claude
@pytest.mark.skipif("REAL_TIME" not in os.environ, reason="takes seven minutes: run with REAL_TIME=1")
def test_both_wait_for_a_prompt_of_that_length(tmp_path: Path) -> None:
    with slow(PROMPT_S, **scaled(1)) as one, slow(PROMPT_S, **scaled(1)) as other, ThreadPoolExecutor() as both:
        codex = both.submit(ask_codex, tmp_path / "codex", one)
        claude = both.submit(ask_claude, tmp_path / "claude", other)
        assert_codex_is_answered(codex.result())
        assert_claude_is_answered(*claude.result())
