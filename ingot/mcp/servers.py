"""The MCP servers that a server was started with: connected, their tools listed, and called on behalf of models."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from ingot.errors import ConfigError, IngotError, Unavailable
from ingot.mcp.config import McpServerConfig
from ingot.protocol.responses.tools import RemoteMcpTool, RemoteMcpTools

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger("ingot.mcp")

MOST_TOOL_PAGES: Final = 100  # of one server's list of tools
CUT_RESULT_NOTE: Final = "\n[The result is longer; the rest was cut off.]"


class ToolFailed(IngotError):
    """A tool could not be called, or reported a failure: in words for the model."""

    code = "tool_failed"


class McpServers:
    """Belongs to one event loop: `start`, calls, `stop`."""

    def __init__(self, configs: Mapping[str, McpServerConfig]) -> None:
        self._connections = {label: McpConnection(label, config) for label, config in configs.items()}

    @property
    def tools(self) -> RemoteMcpTools:
        return {label: connection.tools for label, connection in self._connections.items()}

    async def start(self) -> None:
        """Raises ConfigError where a server cannot be reached or has not the tools it should."""
        try:
            await asyncio.gather(*(connection.open() for connection in self._connections.values()))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))

    async def call(self, label: str, name: str, arguments: str) -> str:
        """What the tool returned, as text. Raises IngotError, in words for the model."""
        if label not in self._connections:
            raise Unavailable(f"There is no MCP server '{label}'.")
        return await self._connections[label].call(name, arguments)


class McpConnection:
    """One server. A task of its own holds the connection, as those who opened it have to close it."""

    def __init__(self, label: str, config: McpServerConfig) -> None:
        self.label, self.config = label, config
        self.tools: tuple[RemoteMcpTool, ...] = ()
        self._client: Client | None = None
        self._fault: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        async with self._opening:
            if self._client is not None:
                return
            await self.close()
            self._closing, self._fault = asyncio.Event(), None
            connected: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(connected), name=f"mcp-{self.label}")
            self._client = await connected

    async def close(self) -> None:
        self._closing.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._client, self._task = None, None

    async def call(self, name: str, arguments: str) -> str:
        parsed = parse_tool_arguments(arguments)
        if name not in {tool.name for tool in self.tools}:
            raise ToolFailed(f"There is no tool '{name}'.")
        try:
            await self.open()
            assert self._client is not None
            async with asyncio.timeout(self.config.timeout_s):
                result = await self._client.call_tool(name, parsed)
        except TimeoutError:
            raise ToolFailed(f"The tool did not answer within {self.config.timeout_s:g} seconds.") from None
        except ConfigError as error:
            raise ToolFailed("The tool's server cannot be reached.") from error
        except Exception as error:  # whatever its transport raises: the model gets it, and the next call reconnects
            log.warning("calling %s of the MCP server %s failed: %s", name, self.label, error)
            self._client = None
            raise ToolFailed(f"The call failed: {self._fault or first_error_text(error)}") from error
        text = cut_result(tool_result_text(result), self.config.max_result_chars)
        if result.is_error:
            raise ToolFailed(text or "The tool failed and does not say why.")
        return text

    def _note_fault(self, why: str) -> None:
        self._fault = why

    async def _run(self, connected: asyncio.Future[Client]) -> None:
        try:
            async with (
                asyncio.timeout(self.config.timeout_s) as patience,
                open_mcp_client(self.config, self._note_fault) as client,
            ):
                self.tools = await self._list_tools(client)
                patience.reschedule(None)
                connected.set_result(client)
                await self._closing.wait()
        except Exception as error:  # of any kind: the error names the server that failed, and why
            if connected.done():
                log.warning("the MCP server %s is gone: %s", self.label, first_error_text(error))
                self._client = None
            elif isinstance(error, ConfigError):
                connected.set_exception(error)
            else:
                connected.set_exception(
                    ConfigError(
                        f"the MCP server '{self.label}' cannot be reached: {self._fault or first_error_text(error)}"
                    )
                )

    async def _list_tools(self, client: Client) -> tuple[RemoteMcpTool, ...]:
        found: dict[str, RemoteMcpTool] = {}
        cursor = None
        for _ in range(MOST_TOOL_PAGES):
            page = await client.list_tools(cursor=cursor)
            found |= {tool.name: RemoteMcpTool(tool.name, tool.description, tool.input_schema) for tool in page.tools}
            cursor = page.next_cursor
            if cursor is None:
                break
        for name in self.config.tools or ():
            if name not in found:
                raise ConfigError(f"the MCP server '{self.label}' has no tool '{name}'; it has: {', '.join(found)}")
        return tuple(tool for tool in found.values() if self.config.tools is None or tool.name in self.config.tools)


@asynccontextmanager
async def open_mcp_client(config: McpServerConfig, on_fault: Callable[[str], None]) -> AsyncIterator[Client]:
    """`on_fault` gets, before any call fails, the reason why a server that sends too much was cut off."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    from ingot.mcp.transports import BoundedTransport, process_streams

    if config.command is not None:
        async with Client(process_streams(config, on_fault)) as client:
            yield client
        return
    bounded = BoundedTransport(on_fault)
    async with httpx2.AsyncClient(transport=bounded, headers=config.headers, timeout=config.timeout_s) as http:
        transport = streamable_http_client(config.url or "", http_client=http)
        async with Client(transport) as client:
            yield client


def parse_tool_arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise ToolFailed("The arguments are not valid JSON.") from None
    if not isinstance(value, dict):
        raise ToolFailed("The arguments are not a JSON object.")
    return value


def tool_result_text(result: Any) -> str:
    """A result as text. Parts that are no text are named; structured content alone becomes JSON."""
    parts = [part.text if part.type == "text" else f"[{part.type}, not shown]" for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def cut_result(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + CUT_RESULT_NOTE


def first_error_text(error: BaseException) -> str:
    """The first plain error in a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return " ".join(str(error).split())[:300] or type(error).__name__
