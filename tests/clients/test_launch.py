"""`ingot launch`: each agent, unmodified and told of the server by nothing else, works on a task of three turns.

It reads a file, changes it, and says that it is done. What it was told of the model shows in what it says itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import scripted
from tests.clients.agents import AIDER, CLAUDE_CODE, KEY, NODE_BIN, NOT_INSTALLED, json_lines, run, serving
from tests.processes import INGOT

pytestmark = pytest.mark.clients

PROGRAMS = {"claude": CLAUDE_CODE, "codex": NODE_BIN / "codex", "opencode": NODE_BIN / "opencode", "aider": AIDER}
WRONG, RIGHT = "Helo, world\n", "Hello, world\n"
TASK = "Mend the greeting."
DONE = "The greeting is mended."
CONTEXT = scripted.CARD.context
NOWHERE = "http://127.0.0.1:9"
OWN = {
    ".claude/settings.json": {"model": "sonnet", "env": {"ANTHROPIC_BASE_URL": NOWHERE, "ANTHROPIC_API_KEY": "own"}},
    ".config/opencode/opencode.json": {
        "$schema": "https://opencode.ai/config.json",
        "model": "elsewhere/other",
        "share": "disabled",
    },
    ".codex/config.toml": f'model_provider = "own"\n[model_providers.own]\nname = "own"\nbase_url = "{NOWHERE}/v1"\n',
    ".aider.conf.yml": f"model: openai/other\nopenai-api-base: {NOWHERE}/v1\nopenai-api-key: own\n",
}
"""What the user has set up: to ask somebody else, with another key."""


class Talk:
    """A folder with a task in it, a home where the clients are set up otherwise, a server, and `ingot launch`."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        (folder / "greeting.txt").write_text(WRONG)
        self.own = {folder / "home" / name: _text(told) for name, told in OWN.items()}
        for path, text in self.own.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name in ("bin", "tmp"):
            (folder / name).mkdir()

    @property
    def greeting(self) -> str:
        return (self.folder / "greeting.txt").read_text()

    def launch(self, client: str, *words: str, flags: tuple[str, ...] = (), **variables: str) -> str:
        """What the client says."""
        if not PROGRAMS[client].exists():
            pytest.skip(NOT_INSTALLED)
        link = self.folder / "bin" / client
        if not link.is_symlink():
            link.symlink_to(PROGRAMS[client])
        environment = {
            "PATH": f"{link.parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "TMPDIR": str(self.folder / "tmp"),
            "INGOT_API_KEY": KEY,
            **variables,
        }
        command = [INGOT, "launch", client, "--url", self.url, *flags, "--", *words]
        return run(command, self.folder, environment, timeout=240)

    def check(self) -> None:
        """Nothing of ours is left with the user."""
        assert {path: path.read_text() for path in self.own} == self.own
        home = [path for path in (self.folder / "home").rglob("*") if path.is_file()]
        assert not [path for path in home if KEY.encode() in path.read_bytes()]
        assert not list((self.folder / "tmp").glob("ingot-*"))


def _text(told: Any) -> str:
    return told if isinstance(told, str) else json.dumps(told)


@contextmanager
def talking(folder: Path, *script: tuple[str, str], otherwise: str = "A title") -> Iterator[Talk]:
    with serving(scripted.said(*script, otherwise=otherwise), folder, api_key=KEY) as url:
        talk = Talk(folder, url)
        yield talk
        talk.check()


def test_claude_code_reads_edits_and_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "greeting.txt")
    edit = scripted.call("Edit", file_path=path, old_string="Helo", new_string="Hello")
    with talking(
        tmp_path, (TASK, scripted.call("Read", file_path=path)), ("updated successfully", DONE), ("Helo", edit)
    ) as talk:
        told = json.loads(talk.launch("claude", "-p", "--output-format", "json", "--allowedTools", "Edit", "--", TASK))
    assert talk.greeting == RIGHT
    assert (told["result"], told["num_turns"], told["is_error"]) == (DONE, 3, False)
    (used,) = told["modelUsage"].values()
    assert used["contextWindow"] == CONTEXT


def test_claude_codes_first_prompt_is_computed_before_its_next_session(tmp_path: Path) -> None:
    with talking(tmp_path, otherwise=DONE) as talk:
        words = ("-p", "--output-format", "json", "--", TASK)
        first = json.loads(talk.launch("claude", *words, flags=("--warm",)))
        [kept] = (tmp_path / "home/.cache/ingot/agents").glob("claude-*.json")
        httpx.delete(f"{talk.url}/v1/cache", headers={"authorization": f"Bearer {KEY}"})
        second = json.loads(talk.launch("claude", *words, flags=("--warm",)))
    assert first["result"] == second["result"] == DONE
    assert json.loads(kept.read_text())["path"] == "/v1/messages"
    usage = second["usage"]
    prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert usage["cache_read_input_tokens"] > 0.9 * prompt


def test_codex_reads_patches_and_says_so(tmp_path: Path) -> None:
    patch = "*** Begin Patch\n*** Update File: greeting.txt\n@@\n-Helo, world\n+Hello, world\n*** End Patch\n"
    unasked = "--dangerously-bypass-approvals-and-sandbox"  # the script is ours, and containers have no sandbox
    with talking(
        tmp_path,
        (TASK, scripted.call("exec_command", cmd="cat greeting.txt")),
        ("Success", DONE),
        ("Helo", scripted.call("apply_patch", input=patch)),
    ) as talk:
        told = json_lines(talk.launch("codex", "exec", "--skip-git-repo-check", "--json", unasked, TASK))
    assert talk.greeting == RIGHT
    items = [event["item"] for event in told if event["type"] == "item.completed"]
    assert not [item for item in items if item["type"] == "error"], "it knows the model"
    assert [item["type"] for item in items] == ["command_execution", "file_change", "agent_message"]
    assert items[-1]["text"] == DONE
    (session,) = (tmp_path / "home" / ".codex" / "sessions").rglob("*.jsonl")
    assert f'"model_context_window":{CONTEXT}' in session.read_text()


def test_opencode_reads_edits_and_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "greeting.txt")
    edit = scripted.call("edit", filePath=path, oldString="Helo", newString="Hello")
    offline = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    with talking(
        tmp_path, (TASK, scripted.call("read", filePath=path)), ("applied successfully", DONE), ("Helo", edit)
    ) as talk:
        told = json_lines(talk.launch("opencode", "run", "--format", "json", TASK, **offline))
    assert talk.greeting == RIGHT
    assert not [event for event in told if event["type"] == "error"], told
    assert [event["part"]["tool"] for event in told if event["type"] == "tool_use"] == ["read", "edit"]
    assert [event["part"]["text"] for event in told if event["type"] == "text"][-1] == DONE


def test_aider_asks_for_the_file_edits_and_mends_what_a_test_finds(tmp_path: Path) -> None:
    """It has no tools: it adds the files that an answer names, and tells what its test command said."""

    def edited(text: str) -> str:
        return f"{DONE}\n\ngreeting.txt\n```\n{text}```\n"

    (tmp_path / ".env").write_text("OPENAI_API_KEY=own\n")
    with talking(
        tmp_path,
        ("not-yet", edited(RIGHT)),
        ("added these files", edited("Hola, world\n")),
        (TASK, "Show me `greeting.txt`, please."),
    ) as talk:
        test = "grep -q Hello greeting.txt || { echo not-yet; exit 1; }"
        ours = ["--no-auto-commits", "--no-gitignore", "--no-check-update", "--yes-always"]
        for words in (["init", "--quiet"], ["add", "greeting.txt"]):  # it knows of files that git does
            run(["git", *words], tmp_path)
        said = talk.launch("aider", *ours, "--auto-test", "--test-cmd", test, "--message", TASK)
        counted = talk.launch("aider", *ours, "--message", "/tokens")
    assert said.count("Tokens:") == 3, said
    assert talk.greeting == RIGHT
    assert f"{CONTEXT - 32_000:,} tokens max context window size" in counted
