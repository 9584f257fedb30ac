"""Texts of peers' tests, as they were recorded, are read here and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.text.tool_formats.registry import format_by_name
from tools import harvest

TEXT = '<tool_call>{"name": "f", "arguments": {"city": "Ulm"}}</tool_call>'


def note(**changed: Any) -> dict[str, Any]:
    call = {"name": "f", "arguments": '{"city":"Ulm"}'}
    return {
        "parser": "HermesToolParser",
        "test": "t",
        "text": TEXT,
        "tools": [],
        "calls": [call],
        "content": None,
    } | changed


def counted(found: dict[str, Any]) -> dict[str, int]:
    report = harvest.Report()
    harvest.replay("peer", found, report)
    return dict(report.counts["peer"])


def test_equal_calls_are_the_same_however_arguments_are_spaced() -> None:
    assert counted(note()) == {"same": 1}


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"calls": [], "tools": [{"function": {"name": "f"}}]}, "other calls"),
        ({"text": "Well. " + TEXT, "content": "Good."}, "other text"),
        ({"parser": "NovelToolParser"}, "parser without a format here"),
    ],
)
def test_what_differs_is_counted_by_its_kind(changed: dict[str, Any], kind: str) -> None:
    assert counted(note(**changed)) == {kind: 1}


def test_splits_join_to_the_text() -> None:
    for text in ("", "a", TEXT):
        assert {"".join(pieces) for pieces in harvest.splits(text, seed=1)} == {text}


def test_every_format_of_the_table_exists() -> None:
    for names in harvest.FORMATS.values():
        for name in names:
            assert format_by_name(name).name == name


def test_a_recorded_method_answers_as_before_and_notes_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(harvest.RECORDS, str(tmp_path / "records"))

    def parse_tool_call(text: str, tools: Any = None) -> dict[str, Any]:
        return {"name": "f", "arguments": {"text": text}}

    recorded = harvest.record(parse_tool_call, "json_tools", ("<tool_call>", "</tool_call>"))
    assert recorded("x") == parse_tool_call("x")
    [line] = (tmp_path / "records").read_text().splitlines()
    assert json.loads(line)["text"] == "<tool_call>x</tool_call>"
    assert json.loads(line)["calls"] == [parse_tool_call("x")]
