"""Codex, unmodified, works on a task: it calls a tool, reads what came of it, and goes on in a second turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import scripted
from tests.clients.agents import NODE_BIN, json_lines, needs_node_client, run, serving, serving_default_model

pytestmark = [pytest.mark.clients, needs_node_client("codex")]

CONFIG = """
model = "default"
model_provider = "ingot"
[model_providers.ingot]
name = "ingot"
base_url = "{url}/v1"
wire_api = "responses"
"""
UNASKED = "--dangerously-bypass-approvals-and-sandbox"  # the script is ours, and containers have no sandbox
RUN = scripted.call("exec_command", cmd="echo marker-$((40 + 2))")
SCRIPT = scripted.said(
    ("marker-42", "<think>\nThere it is.\n</think>\n\nIt printed marker-42."),
    ("print", f"<think>\nI shall run it.\n</think>\n\nI run it.\n{RUN}"),
)


def codex(folder: Path, *words: str, **given: Any) -> list[dict[str, Any]]:
    command = [str(NODE_BIN / "codex"), "exec", "--skip-git-repo-check", "--json", *words]
    return json_lines(run(command, folder, {"CODEX_HOME": str(folder / "codex")}, **given))


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


def usage(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Tokens that went in since the thread began, and how many of them were not computed again."""
    (last,) = [event["usage"] for event in events if event["type"] == "turn.completed"]
    return last["input_tokens"], last["cached_input_tokens"]


def test_codex_calls_a_tool_and_goes_on_from_what_was_computed(tmp_path: Path) -> None:
    (tmp_path / "codex").mkdir()
    with serving(SCRIPT, tmp_path) as url:
        (tmp_path / "codex" / "config.toml").write_text(CONFIG.format(url=url))
        first = codex(tmp_path, UNASKED, "Please print it.")
        again = codex(tmp_path, UNASKED, "resume", "--last", "Please print it again.")
    for events in (first, again):
        (ran,) = items(events, "command_execution")
        assert (ran["exit_code"], ran["aggregated_output"].strip()) == (0, "marker-42")
        assert [item["text"] for item in items(events, "agent_message")] == ["I run it.", "It printed marker-42."]
        assert [item["text"] for item in items(events, "reasoning")] == ["I shall run it.", "There it is."]
    given, cached = usage(first)
    later, later_cached = usage(again)
    assert cached > 0.45 * given, "the second request of the turn begins like the first"
    assert later_cached - cached > 0.95 * (later - given), "the second turn begins like the first"


PATCH = "*** Begin Patch\n*** Add File: hello.txt\n+Hello, wörld\n*** End Patch\n"
PATCHING = scripted.said(
    ("Success", "It is written."),
    ("write", scripted.call("apply_patch", input=PATCH)),
)


def test_codex_calls_a_custom_tool_of_a_model_that_it_knows_by_name(tmp_path: Path) -> None:
    """A name of OpenAI's, served as an alias: Codex then offers what it offers to those models."""
    (tmp_path / "codex").mkdir()
    with serving(PATCHING, tmp_path, alias=("gpt-*=default",)) as url:
        config = CONFIG.format(url=url).replace('model = "default"', 'model = "gpt-5.5"')
        (tmp_path / "codex" / "config.toml").write_text(config)
        told = codex(tmp_path, UNASKED, "Please write it.")
    assert (tmp_path / "hello.txt").read_text() == "Hello, wörld\n"
    assert items(told, "agent_message")[-1]["text"] == "It is written."


SHORT = """
model_instructions_file = "{file}"
web_search = "disabled"
[features]
multi_agent = false
"""


def test_a_turn_with_the_default_model_ends_without_an_error_of_the_protocol(tmp_path: Path) -> None:
    """What a small model makes of it is its own affair, and so is it whether it comes to an end."""
    folder = tmp_path / "codex"
    folder.mkdir()
    (tmp_path / "short.md").write_text("You are a helpful assistant.")
    with serving_default_model(tmp_path, context=4096) as url:
        top, _, rest = CONFIG.format(url=url).partition("[")
        (folder / "config.toml").write_text(top + SHORT.format(file=tmp_path / "short.md") + "[" + rest)
        told = codex(tmp_path, "Say hello.", timeout=600, codes=(0, 1))
    ends = [event for event in told if event["type"].startswith("turn.") and event["type"] != "turn.started"]
    assert len(ends) == 1, told
    failed = ends[0].get("error", {}).get("message", "")
    assert failed in ("", "Incomplete response returned, reason: max_output_tokens")
