"""Claude Code itself, unmodified, against a running server: it asks, calls a tool of its own, and gets its answer."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.cli.serve import local_server
from ingot.config import DEFAULT_MODEL
from tests import scripted
from tests.http.running import running
from tests.http.scripted import settings

HERE = Path(__file__).parent
# Its launcher needs a script that npm may not have run; the program itself is in the package for the platform.
PROGRAMS = sorted(HERE.glob("node_modules/@anthropic-ai/claude-code-*/claude"))
WAIT_S = 300
WORDS = "The quick brown fox"

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not PROGRAMS, reason="Claude Code is not installed: run `make test-clients`"),
]


COMMAND = {"command": "cat notes.txt", "description": "Show the notes"}


class Script:
    """Looks into a file when it is asked for one, then tells what the tool returned; keeps the prompts it saw."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self._says = scripted.said(
            ("notes.txt", "<think>\nI must read it.\n</think>\n\nI will look." + scripted.call("Bash", **COMMAND)),
            ("<tool_response>", "It is about a fox."),
            otherwise="Hello.",
        )

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self._says(prompt)


@contextmanager
def served(script: Script) -> Iterator[str]:
    engine = scripted.start(script)
    try:
        with running(engine, settings(alias=("claude-*=default",))) as url:
            yield url
        engine.check()
    finally:
        engine.close()


def claude(
    url: str, folder: Path, *arguments: str, code: int | None = 0, wait_s: float = WAIT_S, **variables: str
) -> list[Any]:
    """What it prints, message by message. Nothing of the user's own is seen or touched."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "x",
        "ANTHROPIC_MODEL": "claude-opus-5",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        **variables,
    }
    made = subprocess.run(
        [str(PROGRAMS[0]), "-p", "--output-format", "stream-json", "--verbose", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )
    assert code in (None, made.returncode), made.stdout[-3000:] + made.stderr[-3000:]
    return [json.loads(line) for line in made.stdout.splitlines()]


def test_a_turn_with_a_tool_call_completes_and_the_second_request_hits_the_cache(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(WORDS)
    script = Script()
    with served(script) as url:
        told = claude(url, tmp_path, "What is in notes.txt?", "--allowedTools", "Bash")
        ids = list(dict.fromkeys(one["message"]["id"] for one in told if one["type"] == "assistant"))
        receipts = [httpx.get(f"{url}/v1/requests/{id}").json() for id in ids]

    assert not [one for one in told if one.get("subtype") == "api_retry"]
    result = told[-1]
    assert (result["subtype"], result["is_error"], result["num_turns"]) == ("success", False, 2)
    assert (result["result"], result["stop_reason"]) == ("It is about a fox.", "end_turn")
    blocks = [block for one in told if one["type"] == "assistant" for block in one["message"]["content"]]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "text"]
    assert blocks[2]["input"] == COMMAND

    assert any(f"<tool_response>\n{WORDS}" in prompt for prompt in script.prompts)
    assert any("<think>\nI must read it.\n</think>" in prompt for prompt in script.prompts), "thinking comes back"
    first, second = (receipt["usage"] for receipt in receipts)
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"]
    unknown = [name for receipt in receipts for name in receipt["ingot"].get("ignored", [])]
    assert not [name for name in unknown if "." in name or name in ("system", "messages", "tools")], unknown


def test_a_conversation_goes_on_where_it_ended(tmp_path: Path) -> None:
    script = Script()
    with served(script) as url:
        claude(url, tmp_path, "Hi")
        told = claude(url, tmp_path, "Hi again", "--continue")
        usage = told[-1]["usage"]
    assert told[-1]["result"] == "Hello."
    prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert usage["cache_read_input_tokens"] > 0.9 * prompt
    assert "Hi again" in scripted.last_message(script.prompts[-1])


def test_a_prompt_that_is_too_long_is_said_to_be(tmp_path: Path) -> None:
    engine = scripted.start(Script(), context=2048)
    try:
        with running(engine, settings(alias=("claude-*=default",))) as url:
            told = claude(url, tmp_path, "Hi", code=1)
    finally:
        engine.close()
    assert "Prompt is too long" in told[-1]["result"]


def test_a_turn_with_the_default_model_ends_without_protocol_errors(tmp_path: Path) -> None:
    """Few tools and a short system prompt, as the whole of it does not fit into so small a model's context.

    Such a model may well talk to no end; then the client says so after a few tries, and nothing else.
    """
    short = ("--tools", "Bash", "--system-prompt", "You are a helpful assistant.", "--max-turns", "1")
    with local_server(settings(model=DEFAULT_MODEL, alias=("claude-*=default",))) as url:
        told = claude(url, tmp_path, "Say hello.", *short, code=None, CLAUDE_CODE_MAX_OUTPUT_TOKENS="24")
    assert not [one for one in told if one.get("subtype") == "api_retry"]
    assert [one for one in told if one["type"] == "assistant"]
    result = told[-1]
    assert result["api_error_status"] is None
    ended = result["subtype"] == "error_max_turns" or "output token maximum" in result.get("result", "")
    assert ended or not result["is_error"], result
