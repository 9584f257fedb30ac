"""Tools as the wire describes them, as a model is shown them, and back."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.errors import BadRequest, Unsupported
from ingot.protocol.chat.ask import ForcedToolChoice, ToolChoice, ToolDefinition
from ingot.protocol.responses.tools import (
    HOSTED_TOOLS,
    OMITTED_TOOLS,
    RESPONSE_TOOL_CHOICE,
    RESPONSE_TOOLS,
    RemoteMcpTool,
    Toolbox,
)
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.terms import Terms

TERMS = Terms(("toy",), 300, 60.0)
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}
CUSTOM = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "About agents.",
    "tools": [
        {"type": "function", "name": "close", "description": "Closes.", "parameters": {}, "strict": False},
        CUSTOM,
    ],
}
REMOTE = {"files": (RemoteMcpTool("read", "Reads.", SCHEMA), RemoteMcpTool("write", None, {}))}
MCP = {"type": "mcp", "server_label": "files", "require_approval": "never"}


def toolbox(*tools: dict[str, Any]) -> Toolbox:
    return Toolbox(RESPONSE_TOOLS.parse(list(tools), "tools", BodyReading(TERMS)), REMOTE)


def chosen(choice: Any, *tools: dict[str, Any]) -> tuple[list[str], ToolChoice]:
    shown, wanted = toolbox(*tools).chosen(RESPONSE_TOOL_CHOICE.parse(choice, "tool_choice", BodyReading(TERMS)))
    return [tool.name for tool in shown], wanted


def test_a_function_is_shown_as_it_is() -> None:
    offer = toolbox(FUNCTION).of("look")
    assert offer is not None and offer.shown == ToolDefinition("look", "Looks.", SCHEMA, strict=True)
    assert (offer.kind, offer.name, offer.space) == ("function", "look", None)


def test_a_custom_tool_is_shown_as_a_function_of_one_text() -> None:
    offer = toolbox(CUSTOM).of("patch")
    assert offer is not None and offer.kind == "custom" and not offer.shown.strict
    assert offer.shown.parameters["required"] == ["input"]


def test_a_regular_expression_holds_a_custom_tools_text() -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+|x"}
    offer = toolbox(CUSTOM | {"format": grammar}).of("patch")
    assert offer is not None and offer.shown.strict
    assert offer.shown.parameters["properties"]["input"]["pattern"] == "^(?:[0-9]+|x)$"


def test_of_a_lark_grammar_the_model_is_told_and_the_receipt_says_so() -> None:
    box = toolbox(CUSTOM | {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}})
    offer = box.of("patch")
    assert offer is not None and not offer.shown.strict
    assert 'start: "x"' in (offer.shown.description or "")
    assert box.left_out == ["tools.patch.format"]


def test_tools_of_a_namespace_go_by_both_names_and_share_its_description() -> None:
    box = toolbox(SPACE)
    close, patch = box.of("agents__close"), box.of("agents__patch")
    assert close is not None and close.shown.description == "About agents.\n\nCloses."
    assert (close.kind, close.name, close.space) == ("function", "close", "agents")
    assert patch is not None and (patch.kind, patch.name, patch.space) == ("custom", "patch", "agents")


def test_tools_of_an_mcp_server_are_offered_under_its_label() -> None:
    assert list(toolbox(MCP).offers) == ["files__read", "files__write"]
    only = toolbox(MCP | {"allowed_tools": ["read"]})
    assert list(only.offers) == ["files__read"]
    assert list(toolbox(MCP | {"allowed_tools": {"tool_names": ["write"]}}).offers) == ["files__write"]
    assert [tool.name for tool in only.servers["files"]] == ["read"]


def test_only_servers_that_are_connected_and_tools_that_they_have_can_be_named() -> None:
    with pytest.raises(Unsupported, match="'files'"):
        toolbox(MCP | {"server_label": "file"})
    with pytest.raises(BadRequest, match="Did you mean 'read'"):
        toolbox(MCP | {"allowed_tools": ["reed"]})


@pytest.mark.parametrize(
    "field", [{"server_url": "http://x"}, {"connector_id": "c"}, {"headers": {}}, {"authorization": "x"}]
)
def test_a_request_cannot_bring_its_own_server(field: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=next(iter(field))):
        toolbox(MCP | field)


def test_whether_calls_need_approval_is_said_in_so_many_words() -> None:
    with pytest.raises(BadRequest, match="require_approval"):
        toolbox({"type": "mcp", "server_label": "files"})
    for asks in ("always", "never"):
        offers = toolbox(MCP | {"require_approval": asks}).offers.values()
        assert {offer.needs_approval for offer in offers} == {asks == "always"}


@pytest.mark.parametrize("kind", HOSTED_TOOLS)
def test_hosted_tools_are_refused_by_name(kind: str) -> None:
    with pytest.raises(Unsupported, match=kind):
        toolbox({"type": kind})


@pytest.mark.parametrize("kind", OMITTED_TOOLS)
def test_what_agents_always_offer_is_left_out_and_said_to_be(kind: str) -> None:
    box = toolbox({"type": kind}, FUNCTION)
    assert list(box.offers) == ["look"]
    assert box.left_out == [f"tools.{kind}"]


def test_two_tools_of_one_name_are_refused_whatever_they_are() -> None:
    with pytest.raises(BadRequest, match="two tools"):
        toolbox(SPACE, FUNCTION | {"name": "agents__close"})


def test_what_is_to_be_called_is_understood_in_every_form() -> None:
    everything = (FUNCTION, CUSTOM, SPACE, MCP)
    names = ["look", "patch", "agents__close", "agents__patch", "files__read", "files__write"]
    for plain in ("auto", "none", "required"):
        assert chosen(plain, *everything) == (names, plain)
    assert chosen({"type": "function", "name": "look"}, *everything) == (names, ForcedToolChoice("look"))
    assert chosen({"type": "custom", "name": "patch"}, *everything) == (names, ForcedToolChoice("patch"))
    assert chosen({"type": "mcp", "server_label": "files", "name": "read"}, *everything)[1] == ForcedToolChoice(
        "files__read"
    )
    assert chosen({"type": "mcp", "server_label": "files"}, *everything) == (
        ["files__read", "files__write"],
        "required",
    )
    function = {"type": "function", "name": "close", "namespace": "agents"}
    assert chosen(function, *everything)[1] == ForcedToolChoice("agents__close")


def test_allowed_tools_are_the_only_ones_shown() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "custom", "name": "patch"}, {"type": "mcp", "server_label": "files"}],
    }
    assert chosen(allowed, FUNCTION, CUSTOM, MCP) == (["patch", "files__read", "files__write"], "required")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "lock"},
        {"type": "mcp", "server_label": "mail"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]},
    ],
)
def test_a_choice_that_names_no_tool_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="tool_choice"):
        chosen(choice, FUNCTION)


def test_a_hosted_tool_cannot_be_chosen() -> None:
    with pytest.raises(Unsupported, match="web_search_preview"):
        chosen({"type": "web_search_preview"}, FUNCTION)
