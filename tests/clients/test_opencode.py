"""opencode, unmodified, works on a task over chat completions: it calls a tool, and goes on in a second turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import scripted
from tests.clients.agents import NODE_BIN, json_lines, needs_node_client, run, serving, serving_default_model

pytestmark = [pytest.mark.clients, needs_node_client("opencode")]

RUN = scripted.call("bash", command="echo marker-$((40 + 2))", description="Prints it")
SCRIPT = scripted.said(
    ("marker-42", "It printed marker-42."),
    ("print", f"<think>\nI shall run it.\n</think>\n\nI run it.\n{RUN}"),
    otherwise="A title",
)
ELSEWHERE = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def configured(url: str, **more: Any) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ingot",
        "options": {"baseURL": f"{url}/v1", "apiKey": "x"},
        "models": {"default": {"name": "default"}},
    }
    return json.dumps(
        {
            "provider": {"ingot": provider},
            "model": "ingot/default",
            "small_model": "ingot/default",
            "permission": {"bash": "allow"},
            "share": "disabled",
            **more,
        }
    )


def opencode(folder: Path, *words: str, **given: Any) -> list[dict[str, Any]]:
    command = [str(NODE_BIN / "opencode"), "run", "--format", "json", *words]
    said = json_lines(run(command, folder, ELSEWHERE, **given))
    assert not [event for event in said if event["type"] == "error"], said
    return said


def parts(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event["part"] for event in events if event["type"] == kind]


def test_opencode_calls_a_tool_and_goes_on_from_what_was_computed(tmp_path: Path) -> None:
    with serving(SCRIPT, tmp_path) as url:
        (tmp_path / "opencode.json").write_text(configured(url))
        first = opencode(tmp_path, "Please print it.")
        again = opencode(tmp_path, "--continue", "Please print it again.")
    for events in (first, again):
        (used,) = parts(events, "tool_use")
        assert used["state"]["output"].strip() == "marker-42"
        assert [part["text"] for part in parts(events, "text")][-1] == "It printed marker-42."
        assert [part["reason"] for part in parts(events, "step_finish")] == ["tool-calls", "stop"]
    steps = [part["tokens"] for part in parts(first, "step_finish") + parts(again, "step_finish")]
    for step in steps[1:]:
        assert step["cache"]["read"] > 0.95 * (step["cache"]["read"] + step["input"])


def test_a_turn_with_the_default_model_ends_without_an_error_of_the_protocol(tmp_path: Path) -> None:
    """What a small model makes of it is its own affair."""
    simple = {"prompt": "You are a helpful assistant.", "tools": {"*": False, "bash": True}, "steps": 2}
    with serving_default_model(tmp_path, context=2560) as url:
        forbidden = {"bash": "deny"}  # whatever it comes up with
        (tmp_path / "opencode.json").write_text(configured(url, agent={"build": simple}, permission=forbidden))
        told = opencode(tmp_path, "Say hello.", timeout=600)
    assert parts(told, "step_finish"), told
