"""A small client for OpenAI-compatible servers: JSON in and out, and server-sent events as they arrive.

Blocking, with one connection per call. Closing a stream closes its connection, which cancels the request.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from ingot.errors import ConfigError, IngotError
from ingot.version import __version__

Payload = Mapping[str, Any] | BinaryIO | None
_READ_BYTES = 1 << 16
_LONGEST_ERROR = 1 << 20


class ServerError(IngotError):
    """The server could not be reached, refused, or ended an answer early. `answered` is its HTTP status, if any."""

    def __init__(self, message: str, answered: int | None = None) -> None:
        super().__init__(message)
        self.answered = answered


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """One event of a stream, and when its last byte was read, by time.perf_counter()."""

    at: float
    data: Mapping[str, Any]


def is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


class ServerClient:
    """`url` is a server's root (`http://host:8000`) or its API's base (`http://host:8000/v1`)."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"{url} has no valid port") from None
        if not is_url(url) or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} is not a server address; write it like http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise ConfigError("give the key with --api-key or INGOT_API_KEY, not in the address")
        self.host, self.port, self.tls = parts.hostname, port, parts.scheme.lower() == "https"
        self.base = parts.path.rstrip("/") or "/v1"
        self.url, self.timeout = url, timeout
        self._streaming: socket.socket | None = None
        self._headers = {"Content-Type": "application/json", "User-Agent": f"ingot/{__version__}"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """The JSON at `path` below the API's base, or below the server's root if `path` starts with `/`."""
        return self._json("GET", path, None)

    def served_models(self) -> list[str]:
        """Their names, the main one first."""
        try:
            return [str(model["id"]) for model in self.get("models")["data"]]
        except (KeyError, TypeError):
            return []

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._json("POST", path, body)

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path, None)

    def download(self, path: str, file: BinaryIO) -> None:
        """Write the response of `path` to a file. Raises ServerError, also if it ends early."""
        connection = self._connect()
        try:
            response = self._request(connection, "GET", path, None)
            while piece := self._read(response):
                file.write(piece)
            if response.length:
                raise ServerError("the server closed the connection before the file's end")
        finally:
            connection.close()

    def upload(self, path: str, file: BinaryIO) -> Any:
        return self._json("POST", path, file)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[TimedEvent, None, None]:
        """The events of a streamed answer, up to `[DONE]`. Raises ServerError, also if it ends early."""
        connection = self._connect()
        try:
            try:
                connection.connect()
            except OSError as error:
                raise self._connection_error(error) from error
            self._streaming = connection.sock  # the connection drops its reference when the response starts
            response = self._request(connection, "POST", path, body)
            events = EventLines()
            while piece := self._read(response):
                now = time.perf_counter()
                for data in events.feed(piece):
                    if data == b"[DONE]":
                        return
                    yield TimedEvent(now, _parse_event(data))
            raise ServerError("the server closed the stream before its end")
        finally:
            self._streaming = None
            connection.close()

    def break_off(self) -> None:
        """End the stream that is being read, from any thread."""
        if (connection := self._streaming) is not None:
            with contextlib.suppress(OSError):  # it has just ended
                connection.shutdown(socket.SHUT_RDWR)

    def _json(self, method: str, path: str, body: Payload) -> Any:
        connection = self._connect()
        try:
            response = self._request(connection, method, path, body)
            return json.loads(response.read())
        except ValueError:
            raise ServerError(f"{self.url} did not answer {path} with JSON") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._connection_error(error) from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self.tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Payload
    ) -> http.client.HTTPResponse:
        target = path if path.startswith("/") else f"{self.base}/{path}"
        try:
            if body is None or isinstance(body, Mapping):
                payload = None if body is None else json.dumps(body).encode()
                connection.request(method, target, body=payload, headers=self._headers)
            else:
                length = str(body.seek(0, os.SEEK_END))
                body.seek(0)
                file_headers = {"Content-Type": "application/octet-stream", "Content-Length": length}
                connection.request(method, target, body=body, headers=self._headers | file_headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            text = response.read(_LONGEST_ERROR)
        except (OSError, http.client.HTTPException) as error:
            raise self._connection_error(error) from error
        raise ServerError(_refusal_text(response.status, text), response.status)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(_READ_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._connection_error(error) from error

    def _connection_error(self, error: Exception) -> ServerError:
        if isinstance(error, ConnectionRefusedError):
            return ServerError(f"no server answers at {self.url}")
        if isinstance(error, TimeoutError):
            return ServerError(f"{self.url} did not answer for {self.timeout:g} s")
        return ServerError(f"the connection to {self.url} failed: {error or type(error).__name__}")


class EventLines:
    """Parses the data of events from a `text/event-stream`, split in any way."""

    def __init__(self) -> None:
        self._incomplete = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        *lines, self._incomplete = (self._incomplete + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data


def chunk_delta(chunk: Mapping[str, Any]) -> tuple[str, str]:
    """The reasoning and the text that a chunk of a chat or a completion adds."""
    choices = chunk.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return delta.get("reasoning_content") or "", delta.get("content") or choices[0].get("text") or ""


def cut_short(chunk: Mapping[str, Any]) -> str:
    """Why a chunk ends an answer that is not complete; empty for others."""
    choice = (chunk.get("choices") or [{}])[0]
    if choice.get("stop_reason") == "repetition_detected":
        return "the answer repeated itself without end, and was ended"
    return "the answer reached its limit of tokens" if choice.get("finish_reason") == "length" else ""


def _parse_event(data: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise ServerError(f"the server sent an event that is not JSON: {data[:80]!r}") from None
    if not isinstance(event, dict):
        raise ServerError(f"the server sent an event that is not an object: {data[:80]!r}")
    if event.get("error"):
        raise ServerError(_error_message(event) or "the server reported an error")
    return event


def _refusal_text(status: int, text: bytes) -> str:
    try:
        message = _error_message(json.loads(text))
    except ValueError:
        message = text.decode("utf-8", "replace").strip()[:200]
    return f"{message or http.client.responses.get(status, 'refused')} (HTTP {status})"


def _error_message(body: Any) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return error if isinstance(error, str) else None
