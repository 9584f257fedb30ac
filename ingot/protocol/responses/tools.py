"""The tools of a response: on the wire, as the model is shown them, and back.

Models know only functions. A custom tool is shown as a function of one text, the tools of a namespace or of an MCP
server with its name as a prefix; `Toolbox` finds the tool that was called.
"""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from ingot.errors import BadRequest, Unsupported, nearest_name
from ingot.protocol.chat.ask import (
    ABOUT_STRICT,
    CustomInputGrammar,
    CustomTextInput,
    ForcedToolChoice,
    ToolChoice,
    ToolDefinition,
    custom_tool_as_function,
    unknown_tool_error,
)
from ingot.protocol.responses.input_items import namespaced_tool_name
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, Bool, Either, ListOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged

RESPONSE_TOOL_NAME = Text(bounds.TOOL_NAME_CHARS, least=1)
RESPONSE_TOOL_DESCRIPTION = Text(bounds.TOOL_DESCRIPTION_CHARS)
TOOL_REFUSED: Final = "is not supported: this server has no such tool. Describe a function, and run it yourself."
DEFER_REFUSED: Final = "is not supported: every tool is shown. Send false."
REMOTE_REFUSED: Final = "is not supported: only servers of --mcp-config are called."
CREDENTIALS_REFUSED: Final = "is not supported: --mcp-config says how to connect to a server."
ABOUT_CALLERS: Final = "Only the model itself calls it."
NO_EFFECT: Final = "Has no effect."
HOSTED_TOOLS: Final = dict.fromkeys(
    (
        *("file_search", "computer", "computer_use", "computer_use_preview", "code_interpreter", "image_generation"),
        *("local_shell", "shell", "apply_patch", "programmatic_tool_calling"),
    ),
    TOOL_REFUSED,
)
# Agents send these with every request: left out, and named in the receipt.
WEB_SEARCH: Final = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
OMITTED_TOOLS: Final = (*WEB_SEARCH, "tool_search")
DirectCallers = ListOf(OneOf(("direct",), {"programmatic": "calling is not supported."}), most=1)


@dataclass(frozen=True, slots=True)
class ResponseFunctionTool:
    type: str = requires(OneOf(("function",)), "A function of yours.")
    name: str = requires(RESPONSE_TOOL_NAME, "The function's name.")
    description: str | None = accepts(RESPONSE_TOOL_DESCRIPTION, "What it does.")
    parameters: dict[str, Any] | None = accepts(Anything(dict), "The JSON schema of its arguments.")
    strict: bool | None = accepts(Bool(), ABOUT_STRICT)
    output_schema: dict[str, Any] | None = accepts(Anything(dict), "What it returns; not shown to the model.")
    allowed_callers: tuple[str, ...] | None = accepts(DirectCallers, ABOUT_CALLERS)
    defer_loading: None = refuses(DEFER_REFUSED, False)


@dataclass(frozen=True, slots=True)
class ResponseGrammarInput(CustomInputGrammar):
    type: str = requires(OneOf(("grammar",)), "Text that follows a grammar.")


@dataclass(frozen=True, slots=True)
class ResponseCustomTool:
    type: str = requires(OneOf(("custom",)), "A tool of yours that takes text.")
    name: str = requires(RESPONSE_TOOL_NAME, "The tool's name.")
    description: str | None = accepts(RESPONSE_TOOL_DESCRIPTION, "What it does.")
    format: CustomTextInput | ResponseGrammarInput | None = accepts(
        tagged("type", CustomTextInput, ResponseGrammarInput), "The format of the text."
    )
    allowed_callers: tuple[str, ...] | None = accepts(DirectCallers, ABOUT_CALLERS)
    defer_loading: None = refuses(DEFER_REFUSED, False)

    @property
    def grammar(self) -> ResponseGrammarInput | None:
        return self.format if isinstance(self.format, ResponseGrammarInput) else None


@dataclass(frozen=True, slots=True)
class NamespaceTool:
    type: str = requires(OneOf(("namespace",)), "Tools that belong together.")
    name: str = requires(RESPONSE_TOOL_NAME, "The namespace's name.")
    tools: tuple[ResponseFunctionTool | ResponseCustomTool, ...] = requires(
        ListOf(tagged("type", ResponseFunctionTool, ResponseCustomTool), most=bounds.TOOLS), "The tools."
    )
    description: str | None = accepts(
        RESPONSE_TOOL_DESCRIPTION, "What they are for; added before each tool's own description."
    )


@dataclass(frozen=True, slots=True)
class McpToolNames:
    tool_names: tuple[str, ...] | None = accepts(ListOf(RESPONSE_TOOL_NAME, bounds.TOOLS), "Only these tools.")
    read_only: None = refuses("is not supported: name the tools that are allowed.", False)


@dataclass(frozen=True, slots=True)
class McpTool:
    """The tools of an MCP server that is configured here."""

    type: str = requires(OneOf(("mcp",)), "Tools that this server calls by itself.")
    server_label: str = requires(RESPONSE_TOOL_NAME, "A server of --mcp-config.")
    require_approval: str = requires(
        OneOf(("never", "always")),
        "`never`: this server makes the calls without asking. `always`: it asks for each with an "
        "`mcp_approval_request`, and makes those that the next request's `mcp_approval_response` approves.",
    )
    server_description: str | None = accepts(
        RESPONSE_TOOL_DESCRIPTION, "What it is for; added before each tool's own description."
    )
    allowed_tools: tuple[str, ...] | McpToolNames | None = accepts(
        Either((ListOf(RESPONSE_TOOL_NAME, bounds.TOOLS), ObjectOf(McpToolNames))), "Only these of its tools."
    )
    server_url: None = refuses(REMOTE_REFUSED)
    connector_id: None = refuses(REMOTE_REFUSED)
    tunnel_id: None = refuses(REMOTE_REFUSED)
    authorization: None = refuses(CREDENTIALS_REFUSED)
    headers: None = refuses(CREDENTIALS_REFUSED)
    defer_loading: None = refuses(DEFER_REFUSED, False)
    allowed_callers: tuple[str, ...] | None = accepts(DirectCallers, ABOUT_CALLERS)

    @property
    def only(self) -> tuple[str, ...] | None:
        return self.allowed_tools.tool_names if isinstance(self.allowed_tools, McpToolNames) else self.allowed_tools


@dataclass(frozen=True, slots=True)
class WebSearchTool:
    """Left out: this server never searches the web."""

    type: str = requires(OneOf(WEB_SEARCH), "Left out and named in the receipt: this server never searches the web.")
    external_web_access: bool | None = accepts(Bool(), NO_EFFECT)
    filters: dict[str, Any] | None = accepts(Anything(dict), NO_EFFECT)
    search_context_size: str | None = accepts(Text(bounds.NAME_CHARS), NO_EFFECT)
    user_location: dict[str, Any] | None = accepts(Anything(dict), NO_EFFECT)
    search_content_types: tuple[str, ...] | None = accepts(ListOf(Text(bounds.NAME_CHARS), 16), NO_EFFECT)


@dataclass(frozen=True, slots=True)
class ToolSearchTool:
    """Left out: every tool is shown from the start."""

    type: str = requires(OneOf(("tool_search",)), "Left out and named in the receipt: every tool is shown.")
    description: str | None = accepts(RESPONSE_TOOL_DESCRIPTION, NO_EFFECT)
    execution: str | None = accepts(OneOf(("server", "client")), NO_EFFECT)
    parameters: dict[str, Any] | None = accepts(Anything(dict), NO_EFFECT)


ResponseTool = ResponseFunctionTool | ResponseCustomTool | NamespaceTool | McpTool | ToolSearchTool | WebSearchTool
RESPONSE_TOOLS = ListOf(tagged("type", *get_args(ResponseTool), refused=HOSTED_TOOLS), most=bounds.TOOLS)


@dataclass(frozen=True, slots=True)
class ChosenResponseTool:
    type: str = requires(OneOf(("function", "custom")), "The kind of tool.")
    name: str = requires(RESPONSE_TOOL_NAME, "Which one.")
    namespace: str | None = accepts(RESPONSE_TOOL_NAME, "The namespace that it is of.")


@dataclass(frozen=True, slots=True)
class ChosenMcpServer:
    type: str = requires(OneOf(("mcp",)), "A tool of an MCP server.")
    server_label: str = requires(RESPONSE_TOOL_NAME, "Which server.")
    name: str | None = accepts(RESPONSE_TOOL_NAME, "Which of its tools; any where there is none.")


@dataclass(frozen=True, slots=True)
class ResponseAllowedTools:
    type: str = requires(OneOf(("allowed_tools",)), "Some of the tools.")
    mode: str = requires(OneOf(("auto", "required")), "Whether the model decides to call one of them, or always does.")
    tools: tuple[ChosenResponseTool | ChosenMcpServer, ...] = requires(
        ListOf(tagged("type", ChosenResponseTool, ChosenMcpServer, refused=HOSTED_TOOLS), bounds.TOOLS, least=1),
        "The tools that may be called.",
    )


ResponseToolChoice = str | ChosenResponseTool | ChosenMcpServer | ResponseAllowedTools
CHOICES_REFUSED = HOSTED_TOOLS | dict.fromkeys(OMITTED_TOOLS, TOOL_REFUSED)
RESPONSE_TOOL_CHOICE = Either(
    (
        OneOf(("none", "auto", "required")),
        tagged("type", ChosenResponseTool, ChosenMcpServer, ResponseAllowedTools, refused=CHOICES_REFUSED),
    )
)


@dataclass(frozen=True, slots=True)
class RemoteMcpTool:
    """A tool of an MCP server, as that server describes it."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]


RemoteMcpTools = Mapping[str, tuple[RemoteMcpTool, ...]]
"""What each MCP server offers, by its label."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """One tool: its definition for the model, and its owner."""

    shown: ToolDefinition
    kind: Literal["function", "custom", "mcp"]
    name: str  # the owner's name for it
    space: str | None = None  # the namespace or the MCP server
    needs_approval: bool = False


class Toolbox:
    """The tools of one request, by the model's names for them."""

    def __init__(self, tools: Iterable[ResponseTool], remote: RemoteMcpTools) -> None:
        self.offers: dict[str, OfferedTool] = {}
        self.left_out: list[str] = []
        self.servers: dict[str, tuple[RemoteMcpTool, ...]] = {}
        for at, tool in enumerate(tools):
            match tool:
                case ResponseFunctionTool() | ResponseCustomTool():
                    self._add_own(tool, at)
                case NamespaceTool():
                    for each in tool.tools:
                        self._add_own(each, at, tool.name, tool.description)
                case McpTool():
                    self._add_server(tool, remote, at)
                case WebSearchTool() | ToolSearchTool():
                    self.left_out.append(f"tools.{tool.type}")

    def of(self, name: str) -> OfferedTool | None:
        return self.offers.get(name)

    def chosen(self, choice: ResponseToolChoice | None) -> tuple[tuple[ToolDefinition, ...], ToolChoice]:
        """The tools that the model is shown, and the tool choice."""
        shown = tuple(offer.shown for offer in self.offers.values())
        match choice:
            case ChosenResponseTool():
                return shown, ForcedToolChoice(self._check(namespaced_tool_name(choice.namespace, choice.name)))
            case ChosenMcpServer(name=str() as name):
                return shown, ForcedToolChoice(self._check(namespaced_tool_name(choice.server_label, name)))
            case ChosenMcpServer():
                return self._of_server(choice.server_label), "required"
            case ResponseAllowedTools():
                mode: ToolChoice = "required" if choice.mode == "required" else "auto"
                return self._allowed(choice), mode
            case "none" | "required":
                return shown, choice
        return shown, "auto"

    def _add_own(
        self,
        tool: ResponseFunctionTool | ResponseCustomTool,
        at: int,
        space: str | None = None,
        about: str | None = None,
    ) -> None:
        """A tool of the client's."""
        self._add(offer_tool(tool, space, about), at)
        if isinstance(tool, ResponseCustomTool) and tool.grammar is not None and tool.grammar.syntax == "lark":
            self.left_out.append(f"tools.{namespaced_tool_name(space, tool.name)}.format")  # described, not enforced

    def _add(self, offer: OfferedTool, at: int) -> None:
        if offer.shown.name in self.offers:
            raise BadRequest(f"tools.{at}: there are two tools named '{offer.shown.name[:100]}'.", param=f"tools.{at}")
        self.offers[offer.shown.name] = offer

    def _add_server(self, tool: McpTool, remote: RemoteMcpTools, at: int) -> None:
        where = f"tools.{at}.server_label"
        if tool.server_label not in remote:
            labels = ", ".join(f"'{label}'" for label in remote) or "none; start it with --mcp-config"
            raise Unsupported(f"{where}: no MCP server of that name is connected (connected: {labels}).", param=where)
        offered = {each.name: each for each in remote[tool.server_label]}
        for name in tool.only or ():
            if name not in offered:
                near = nearest_name(name, offered)
                hint = f" Did you mean '{near}'?" if near else ""
                raise BadRequest(f"tools.{at}.allowed_tools: there is no '{name[:100]}'.{hint}", param=f"tools.{at}")
        allowed = tuple(each for each in offered.values() if tool.only is None or each.name in tool.only)
        self.servers[tool.server_label] = allowed
        for each in allowed:
            name = namespaced_tool_name(tool.server_label, each.name)
            description = join_descriptions(tool.server_description, each.description)
            self._add(
                OfferedTool(
                    ToolDefinition(name, description, each.parameters),
                    *("mcp", each.name, tool.server_label, tool.require_approval == "always"),
                ),
                at,
            )

    def _check(self, name: str) -> str:
        if name not in self.offers:
            raise unknown_tool_error("tool_choice", name, self.offers)
        return name

    def _of_server(self, label: str) -> tuple[ToolDefinition, ...]:
        found = tuple(offer.shown for offer in self.offers.values() if offer.kind == "mcp" and offer.space == label)
        if not found:
            raise BadRequest(f"tool_choice: there are no tools of the MCP server '{label[:100]}'.", param="tool_choice")
        return found

    def _allowed(self, choice: ResponseAllowedTools) -> tuple[ToolDefinition, ...]:
        names: set[str] = set()
        for each in choice.tools:
            if isinstance(each, ChosenMcpServer) and each.name is None:
                names |= {tool.name for tool in self._of_server(each.server_label)}
            else:
                space = each.server_label if isinstance(each, ChosenMcpServer) else each.namespace
                names.add(self._check(namespaced_tool_name(space, each.name or "")))
        return tuple(offer.shown for offer in self.offers.values() if offer.shown.name in names)


def offer_tool(
    tool: ResponseFunctionTool | ResponseCustomTool, space: str | None = None, about: str | None = None
) -> OfferedTool:
    name = namespaced_tool_name(space, tool.name)
    if isinstance(tool, ResponseCustomTool):
        shown = custom_tool_as_function(name, tool.description, tool.grammar)
    else:
        shown = ToolDefinition(name, tool.description, tool.parameters or {}, bool(tool.strict))
    shown = replace(shown, description=join_descriptions(about, shown.description))
    return OfferedTool(shown, "custom" if isinstance(tool, ResponseCustomTool) else "function", tool.name, space)


def join_descriptions(about: str | None, description: str | None) -> str | None:
    return "\n\n".join(text for text in (about, description) if text) or None
