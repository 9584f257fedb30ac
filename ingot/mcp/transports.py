"""Transports to MCP servers that bound what a server may send.

A server that runs as our process sends one message a line over its standard streams (`process_streams`). The SDK's own
transport buffers a line of any length, so this one replaces it. A server that is reached over HTTP gets responses of
bounded size (`BoundedTransport`). Imported only when a server is opened: it needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import httpx2
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from ingot.mcp.config import MESSAGE_BYTES, McpServerConfig
from ingot.observe.logs import RareWarning

log = logging.getLogger("ingot.mcp")

MOST_UNSOLICITED_BYTES: Final = 4 * MESSAGE_BYTES  # that a server may say without answering anything
EXIT_GRACE_S: Final = 2.0  # what a process gets to exit by itself, and again after a signal
EXIT_POLL_S: Final = 0.01

Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]


class OutputTooLarge(Exception):
    """In words for the log and the model."""


@asynccontextmanager
async def process_streams(config: McpServerConfig, on_fault: Callable[[str], None]) -> AsyncIterator[tuple[Any, Any]]:
    """A transport for the SDK's client. A server that sends too much is killed, and `on_fault` gets the reason."""
    process = await start_process(config)
    incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)

    async def listen() -> None:
        async with incoming:
            try:
                await read_messages(process, incoming)
            except OutputTooLarge as fault:
                log.warning("an MCP server was ended: %s", fault)
                on_fault(str(fault))
                send_signal(process, signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        tasks.start_soon(write_messages, process, outgoing)
        try:
            yield read_stream, write_stream
        finally:
            with anyio.CancelScope(shield=True):
                await end_process(process)
                for stream in (read_stream, write_stream):
                    await stream.aclose()
            tasks.cancel_scope.cancel()


async def start_process(config: McpServerConfig) -> Process:
    assert config.command is not None
    return await asyncio.create_subprocess_exec(
        config.command,
        *config.args,
        stdin=PIPE,
        stdout=PIPE,
        env=get_default_environment() | config.env,
        cwd=config.cwd,
        start_new_session=True,  # so that what it starts can be ended with it
        limit=MESSAGE_BYTES,
    )


async def read_messages(process: Process, incoming: Incoming) -> None:
    """Hand on the server's messages until it ends. Raises OutputTooLarge."""
    assert process.stdout is not None
    junk = RareWarning(log)
    unsolicited = 0
    while True:
        try:
            line = await process.stdout.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            raise OutputTooLarge(f"it sent a message of more than {MESSAGE_BYTES >> 20} MiB") from None
        unsolicited += len(line)
        if unsolicited > MOST_UNSOLICITED_BYTES:
            raise OutputTooLarge(f"it sent {MOST_UNSOLICITED_BYTES >> 20} MiB without answering anything")
        try:
            message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            junk.warn("an MCP server wrote a line that is no message")
            continue
        if isinstance(message, mcp_types.JSONRPCResponse | mcp_types.JSONRPCError):
            unsolicited = 0
        try:
            await incoming.send(SessionMessage(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


async def write_messages(process: Process, outgoing: Outgoing) -> None:
    assert process.stdin is not None
    async with outgoing:
        with contextlib.suppress(ConnectionError):  # reading notices that it is gone
            async for each in outgoing:
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()


async def end_process(process: Process) -> None:
    """First by closing its input, as the protocol has it, then by signals to it and to what it started."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await has_exited(process):
            return
        send_signal(process, number)
    if not await has_exited(process):
        log.warning("the process %d of an MCP server does not end", process.pid)


async def has_exited(process: Process) -> bool:
    """Within the grace period. Polled rather than waited for, which would also wait for unread output."""
    until = asyncio.get_running_loop().time() + EXIT_GRACE_S
    while process.returncode is None and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(EXIT_POLL_S)
    return process.returncode is not None


def send_signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


OnFault = Callable[[str], None]


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """httpx's, for clients that gather whole answers. What is too much ends in a ReadError."""

    def __init__(self, on_fault: OnFault) -> None:
        super().__init__()
        self._on_fault = on_fault

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise self._fault("it sent a compressed answer, which was not requested")
        media = response.headers.get("content-type", "").partition(";")[0].strip()
        # Streams of events may go on for as long as the connection does; the SDK bounds each event.
        if media != "text/event-stream":
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = BoundedStream(response.stream, self._fault)
        return response

    def _fault(self, why: str) -> httpx2.ReadError:
        self._on_fault(why)
        return httpx2.ReadError(why)


class BoundedStream(httpx2.AsyncByteStream):
    """A body of bounded size."""

    def __init__(self, stream: httpx2.AsyncByteStream, fault: Callable[[str], Exception]) -> None:
        self._stream, self._fault = stream, fault

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._stream:
            size += len(piece)
            if size > MESSAGE_BYTES:
                raise self._fault(f"it sent a message of more than {MESSAGE_BYTES >> 20} MiB")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
