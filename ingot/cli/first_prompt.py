"""`ingot launch --warm`: a client's first prompt, taken down once, and from then on computed before the client starts.

Only a real session shows it: what a client says to a terminal and to a script differs from the first line on. So the
first session goes through a relay of this process, which writes down the longest request that answers nothing yet.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ingot.agents.agent import TIMEOUT_S, Agent, Endpoint
from ingot.cli.client import Client, ServerError

FOLDER: Final = Path("~/.cache/ingot/agents")
PREFIXES: Final = FOLDER / "prefixes"
"""Where a server that runs as long as its client keeps what it computed, unless it is told another place."""
LIMITS: Final = {
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/chat/completions": "max_tokens",
}
"""Addresses that prompts come to, and what their bodies call the most tokens to generate."""
HOP: Final = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """Where a client's first prompt is kept on this machine: one for each version of it, and way of starting it."""

    path: Path

    @classmethod
    def of(cls, agent: Agent, program: str, words: list[str]) -> FirstPrompt:
        """In a terminal (without words) clients say something else than to a script."""
        about = Path(program).resolve().stat()
        told = f"{Path(program).resolve()} {about.st_size} {about.st_mtime_ns} {bool(words)}"
        digest = blake2b(told.encode(), digest_size=8).hexdigest()
        return cls(FOLDER.expanduser() / f"{agent.name}-{digest}.json")

    def read(self) -> tuple[str, dict[str, Any]] | None:
        """The address that it went to, and its body."""
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            return str(kept["path"]), dict(kept["body"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: str, body: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = self.path.with_suffix(f".{os.getpid()}.part")
        made.touch(mode=0o600)
        made.write_text(json.dumps({"path": path, "body": body}), encoding="utf-8")
        made.replace(self.path)

    def compute(self, endpoint: Endpoint) -> str | None:
        """Has the server compute it; what that came to, in words. None where there is none. Raises ServerError."""
        kept = self.read()
        if kept is None:
            return None
        path, body = kept
        began = time.monotonic()
        told = Client(endpoint.url, endpoint.key, timeout=TIMEOUT_S).post(path, shortened(path, body, endpoint))
        if told.get("error"):
            raise ServerError(f"the first prompt was not computed: {told['error'].get('message', '')}")
        prompt, found = tokens(told.get("usage") or {})
        took = time.monotonic() - began
        return f"its first prompt has {prompt} tokens; {found} were there, the rest was computed: {took:.1f} s"


def shortened(path: str, body: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The request with an answer of one token."""
    left_out = ("stream_options", "max_completion_tokens", "background")
    kept = {name: value for name, value in body.items() if name not in left_out}
    made = {**kept, "model": endpoint.model, "stream": False, LIMITS[path]: 1}
    return made | ({"store": False} if path == "/v1/responses" else {})


def tokens(usage: dict[str, Any]) -> tuple[int, int]:
    """Of the prompt, and those of them that were kept from before, in the words of any protocol."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if details is not None:
        return usage.get("prompt_tokens", usage.get("input_tokens", 0)), details.get("cached_tokens", 0)
    found = usage.get("cache_read_input_tokens") or 0
    return (usage.get("input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0) + found, found


def answers_nothing(body: dict[str, Any]) -> bool:
    """Whether nothing in the conversation was said by the model yet."""
    said = body.get("messages", body.get("input"))
    if not isinstance(said, list):
        return True
    return not any(one.get("role") == "assistant" or "call" in str(one.get("type")) for one in said)


@contextlib.contextmanager
def recording(prompt: FirstPrompt, endpoint: Endpoint) -> Iterator[Endpoint]:
    """A relay to the server, which keeps the first prompt that comes."""
    relay = Relay(prompt, endpoint)
    thread = threading.Thread(target=relay.serve_forever, name="ingot-relay", daemon=True)
    thread.start()
    try:
        yield replace(endpoint, url=f"http://127.0.0.1:{relay.server_address[1]}")
    finally:
        relay.shutdown()
        relay.server_close()


class Relay(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, prompt: FirstPrompt, endpoint: Endpoint) -> None:
        super().__init__(("127.0.0.1", 0), RelayHandler)
        self.prompt, self.upstream = prompt, urlsplit(endpoint.url)
        self._longest, self._lock = 0, threading.Lock()

    def connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.upstream.scheme == "https" else http.client.HTTPConnection
        return kind(self.upstream.hostname or "", self.upstream.port, timeout=TIMEOUT_S)

    def notice(self, path: str, raw: bytes) -> None:
        """Keeps the longest: some clients ask for a title before they ask what they were asked."""
        with self._lock:
            if path not in LIMITS or len(raw) <= self._longest:
                return
            try:
                body = json.loads(raw)
            except ValueError:
                return
            if isinstance(body, dict) and answers_nothing(body):
                self._longest = len(raw)
                self.prompt.write(path, body)


class RelayHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is the client's."""

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.command == "POST":
            self.server.notice(self.path.partition("?")[0], raw)
        upstream = self.server.connect()
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            upstream.request(self.command, self.server.upstream.path + self.path, raw or None, headers)
            if self._answered(upstream):
                self._pass_on(upstream.getresponse())
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # half an answer, or none: the client asks again
        finally:
            upstream.close()

    do_GET = do_HEAD = do_DELETE = do_POST

    def _answered(self, upstream: http.client.HTTPConnection) -> bool:
        """Waits for the server to say something; False where the client leaves before."""
        ready, _, _ = select.select([upstream.sock, self.connection], [], [])
        self.close_connection = upstream.sock not in ready
        return not self.close_connection

    def _pass_on(self, response: http.client.HTTPResponse) -> None:
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in HOP:
                self.send_header(name, value)
        length = response.getheader("content-length")
        self.send_header(*(("content-length", length) if length else ("connection", "close")))
        self.end_headers()
        while self.command != "HEAD" and (piece := response.read1(65_536)):
            self.wfile.write(piece)
            self.wfile.flush()
