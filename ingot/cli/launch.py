"""`ingot launch CLIENT`: another project's client, configured for a running server, or for one that runs as long as the
client does.

The client runs in this terminal: it gets the signals, and its exit code is ours. With `--warm`, its first prompt is
recorded once, and from then on computed before the client starts. Only a real session has that prompt: clients send
other prompts when a script runs them. So the first session goes through a relay in this process, which records the
longest request without an earlier answer in it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any, Final
from urllib.parse import urlsplit

from ingot.agents import AGENTS, CLIENT_TIMEOUT_S, Agent, ClientStart, Endpoint, agent_by_name
from ingot.cli.client import ServerClient, ServerError
from ingot.cli.flags import LOCAL_SECTIONS, CommandParser, add_settings, settings_from_arguments
from ingot.config import SETTINGS, Settings
from ingot.errors import ConfigError, IngotError, ModelError
from ingot.process import signals_not_ignored
from ingot.quantities import counted

ABOUT_LAUNCH = (
    "Start a client with a running server, or with one that --model starts for it, with the right address, key, model, "
    "context and time limits. Arguments after -- go to the client. The client's own configuration is not changed."
)
ANSWERS_WITHIN_S: Final = 30.0
WILDCARD_HOSTS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run_launch(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    client_arguments = arguments[end + 1 :]
    namespace = launch_parser().parse(arguments[:end])
    config = settings_from_arguments(namespace)
    agent = agent_by_name(namespace.client)
    flags = vars(namespace)
    _check_flags(flags)
    if "print" in flags:
        snippets = agent.snippets(_running_endpoint(flags, config.settings))
        print("\n\n".join(f"# {snippet.place}\n\n{snippet.text}" for snippet in snippets))
        return 0
    program = _find_program(agent)
    start = _start_client_warm if "warm" in flags else _start_client
    if "model" not in flags:
        return start(agent, program, _running_endpoint(flags, config.settings), client_arguments)
    settings = config.settings
    if "warm" in flags and settings.cache_dir is None:
        settings = replace(settings, cache_dir=LAUNCH_CACHE_FOLDER.expanduser())
    with _private_server(settings) as endpoint:
        return start(agent, program, endpoint, client_arguments)


def launch_parser() -> CommandParser:
    parser = CommandParser("launch", ABOUT_LAUNCH)
    parser.add_argument("client", metavar="CLIENT", help=f"one of {', '.join(AGENTS)}")
    parser.flag("--url", metavar="URL", help="a running server (default: where `ingot serve` listens)")
    parser.flag("--name", metavar="NAME", help="which of the server's models to use (default: the first)")
    parser.flag(
        "--model", metavar="MODEL", help="serve this model while the client runs, specified as for `ingot serve`"
    )
    parser.flag("--print", action="store_true", help="print the client's settings to copy instead of starting it")
    parser.flag(
        "--warm",
        action="store_true",
        help="compute the client's first prompt before it starts; it is recorded in the first session",
    )
    parser.flag("--api-key", dest="api_key", metavar="KEY", help="the server's key (better: INGOT_API_KEY)")
    add_settings(parser, (*LOCAL_SECTIONS, "the rest"))
    return parser


def _check_flags(flags: Mapping[str, Any]) -> None:
    if "model" in flags:
        for name in ("url", "name", "print"):
            if name in flags:
                raise ConfigError(f"--{name} is for a running server, but --model starts one: use only one of them")
        return
    if "warm" in flags and "print" in flags:
        raise ConfigError("--print starts nothing, so there is nothing to --warm: use only one of them")
    for name in flags:
        if name in SETTINGS and SETTINGS[name].section in LOCAL_SECTIONS:
            raise ConfigError(f"{SETTINGS[name].flag} is for a model that is started here: it needs --model")


def _find_program(agent: Agent) -> str:
    found = shutil.which(agent.program)
    if found is None:
        raise IngotError(
            f"{agent.title} is not installed: there is no `{agent.program}`. To install it: {agent.install}"
        )
    return found


def _running_endpoint(flags: Mapping[str, Any], settings: Settings) -> Endpoint:
    """The server at --url, or where `ingot serve` listens. Raises IngotError with advice."""
    url = flags.get("url") or _default_server_url(settings)
    try:
        return _endpoint_at(url, settings.api_key, flags.get("name"))
    except ServerError as error:
        if error.answered in (401, 403):
            raise IngotError(f"{error.message} Give the server's key with --api-key or INGOT_API_KEY.") from error
        if error.answered is not None:
            raise
        client = flags["client"]
        raise IngotError(
            f"{error.message}. Start a server with `ingot serve MODEL`, name another one with --url, or start one "
            f"while the client runs: `ingot launch {client} --model MODEL`."
        ) from error


def _default_server_url(settings: Settings) -> str:
    host = WILDCARD_HOSTS.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _endpoint_at(url: str, key: str | None, name: str | None = None) -> Endpoint:
    client = ServerClient(url, key, timeout=ANSWERS_WITHIN_S)
    try:
        listed = {str(model["id"]): model for model in client.get("models")["data"]}
        # Embedding and reranking models are listed too.
        chat_models = [model for model, about in listed.items() if about.get("tool_format") is not None]
        model = (chat_models or list(listed))[0] if name is None else name
        if model not in listed:
            raise ConfigError(f"{url} serves {', '.join(listed)}, but not {model}")
        about = listed[model]
        context = int(about["max_model_len"])
        chats = about.get("chats", True)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise ModelError(f"{url} does not list its models with their context: it is not an ingot server") from None
    if chats is False:
        raise ModelError(
            f"{model} has no chat template: it is a base model, which only continues texts. "
            "Serve a chat model, or give this one a template with --chat-template FILE."
        )
    return Endpoint(url.rstrip("/").removesuffix("/v1"), key, model, context)


@contextlib.contextmanager
def _private_server(settings: Settings) -> Iterator[Endpoint]:
    """A server in this process. It logs to a file, because the terminal is the client's."""
    from ingot.cli.serve import local_server

    descriptor, log = tempfile.mkstemp(prefix="ingot-launch-", suffix=".log")
    os.close(descriptor)
    with local_server(settings) as url, _logging_to(Path(log)):
        endpoint = _endpoint_at(url, settings.api_key)
        print(f"ingot launch: {endpoint.model} is served at {url}; the log is {log}", file=sys.stderr)
        yield endpoint


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    root = logging.getLogger()
    before, file = root.handlers[:], logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(before[0].formatter if before else None)
    root.handlers[:] = [file]
    try:
        yield
    finally:
        root.handlers[:] = before
        file.close()


def _start_client(agent: Agent, program: str, endpoint: Endpoint, words: list[str]) -> int:
    if (warning := agent.warning(endpoint)) is not None:
        print(f"ingot launch: {warning}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="ingot-launch-") as folder:
        launch = agent.launch(endpoint, Path(folder))
        for path, text in launch.files.items():
            path.write_text(text, encoding="utf-8")
        return run_in_foreground([program, *launch.arguments, *words], _client_environment(launch))


def _start_client_warm(agent: Agent, program: str, endpoint: Endpoint, words: list[str]) -> int:
    prompt = FirstPrompt.of(agent, program, words)
    try:
        computed = prompt.compute(endpoint)
    except ServerError as error:
        computed = error.message  # the client reports what else does not work
    if computed is not None:
        print(f"ingot launch: {agent.title}: {computed}", file=sys.stderr)
        return _start_client(agent, program, endpoint, words)
    print(
        f"ingot launch: the first prompt of {agent.title} is recorded in this session; from the next session on, it is "
        "computed before the client starts",
        file=sys.stderr,
    )
    with recording_relay(prompt, endpoint) as relayed:
        return _start_client(agent, program, relayed, words)


def _client_environment(launch: ClientStart) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in launch.without}
    return {**inherited, **launch.environment}


FIRST_PROMPTS_FOLDER: Final = Path("~/.cache/ingot/agents")
LAUNCH_CACHE_FOLDER: Final = FIRST_PROMPTS_FOLDER / "prefixes"
"""The default --cache-dir of a server that --model starts."""
TOKEN_LIMIT_FIELDS: Final = {
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/chat/completions": "max_tokens",
}
"""Paths that take prompts, and the field of each that limits generated tokens."""
HOP_HEADERS: Final = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """The file of a client's first prompt: one for each version of the client, with and without arguments."""

    path: Path

    @classmethod
    def of(cls, agent: Agent, program: str, words: list[str]) -> FirstPrompt:
        """Clients send other prompts in a terminal (without arguments) than in a script."""
        about = Path(program).resolve().stat()
        version = f"{Path(program).resolve()} {about.st_size} {about.st_mtime_ns} {bool(words)}"
        digest = blake2b(version.encode(), digest_size=8).hexdigest()
        return cls(FIRST_PROMPTS_FOLDER.expanduser() / f"{agent.name}-{digest}.json")

    def read(self) -> tuple[str, dict[str, Any]] | None:
        """The path that it went to, and its body."""
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            return str(record["path"]), dict(record["body"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: str, body: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}.part")
        part.touch(mode=0o600)
        part.write_text(json.dumps({"path": path, "body": body}), encoding="utf-8")
        part.replace(self.path)

    def compute(self, endpoint: Endpoint) -> str | None:
        """Let the server compute it, and describe the result. None if there is no prompt yet. Raises ServerError."""
        request = self.read()
        if request is None:
            return None
        path, body = request
        began = time.monotonic()
        client = ServerClient(endpoint.url, endpoint.key, timeout=CLIENT_TIMEOUT_S)
        answer = client.post(path, one_token_request(path, body, endpoint))
        if answer.get("error"):
            raise ServerError(f"the first prompt was not computed: {answer['error'].get('message', '')}")
        prompt, cached = prompt_usage(answer.get("usage") or {})
        seconds = time.monotonic() - began
        tokens = counted(prompt, "token")
        return f"its first prompt has {tokens}; {cached} cached, the rest took {seconds:.1f} s to compute"


def one_token_request(path: str, body: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The request with an answer of one token."""
    dropped = ("stream_options", "max_completion_tokens", "background")
    fields = {name: value for name, value in body.items() if name not in dropped}
    request = {**fields, "model": endpoint.model, "stream": False, TOKEN_LIMIT_FIELDS[path]: 1}
    return request | ({"store": False} if path == "/v1/responses" else {})


def prompt_usage(usage: dict[str, Any]) -> tuple[int, int]:
    """The tokens of the prompt, and how many of them were cached, in the fields of any protocol."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if details is not None:
        return usage.get("prompt_tokens", usage.get("input_tokens", 0)), details.get("cached_tokens", 0)
    cached = usage.get("cache_read_input_tokens") or 0
    return (usage.get("input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0) + cached, cached


def is_first_request(body: dict[str, Any]) -> bool:
    """Whether the conversation has no answer of the model yet."""
    messages = body.get("messages", body.get("input"))
    if not isinstance(messages, list):
        return True
    return not any(each.get("role") == "assistant" or "call" in str(each.get("type")) for each in messages)


@contextlib.contextmanager
def recording_relay(prompt: FirstPrompt, endpoint: Endpoint) -> Iterator[Endpoint]:
    """A relay to the server that records the first prompt."""
    relay = FirstPromptRelay(prompt, endpoint)
    thread = threading.Thread(target=relay.serve_forever, name="ingot-relay", daemon=True)
    thread.start()
    try:
        yield replace(endpoint, url=f"http://127.0.0.1:{relay.server_address[1]}")
    finally:
        relay.shutdown()
        relay.server_close()


class FirstPromptRelay(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, prompt: FirstPrompt, endpoint: Endpoint) -> None:
        super().__init__(("127.0.0.1", 0), RelayHandler)
        self.prompt, self.upstream = prompt, urlsplit(endpoint.url)
        self._longest, self._lock = 0, threading.Lock()

    def connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.upstream.scheme == "https" else http.client.HTTPConnection
        return kind(self.upstream.hostname or "", self.upstream.port, timeout=CLIENT_TIMEOUT_S)

    def record(self, path: str, raw: bytes) -> None:
        """Records the longest request: some clients ask for a title before they ask the question."""
        with self._lock:
            if path not in TOKEN_LIMIT_FIELDS or len(raw) <= self._longest:
                return
            try:
                body = json.loads(raw)
            except ValueError:
                return
            if isinstance(body, dict) and is_first_request(body):
                self._longest = len(raw)
                self.prompt.write(path, body)


class RelayHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FirstPromptRelay

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is the client's."""

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.command == "POST":
            self.server.record(self.path.partition("?")[0], raw)
        upstream = self.server.connect()
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
            upstream.request(self.command, self.server.upstream.path + self.path, raw or None, headers)
            if self._answered(upstream):
                self._pass_on(upstream.getresponse())
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # the client retries
        finally:
            upstream.close()

    do_GET = do_HEAD = do_DELETE = do_POST

    def _answered(self, upstream: http.client.HTTPConnection) -> bool:
        """Waits for the server's response; False if the client disconnects first."""
        ready, _, _ = select.select([upstream.sock, self.connection], [], [])
        self.close_connection = upstream.sock not in ready
        return not self.close_connection

    def _pass_on(self, response: http.client.HTTPResponse) -> None:
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in HOP_HEADERS:
                self.send_header(name, value)
        length = response.getheader("content-length")
        self.send_header(*(("content-length", length) if length else ("connection", "close")))
        self.end_headers()
        while self.command != "HEAD" and (piece := response.read1(65_536)):
            self.wfile.write(piece)
            self.wfile.flush()


# The terminal sends these to the program as well, which handles them; this process goes on.
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def run_in_foreground(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The program's exit code, or 128 and the number of the signal that ended it. Raises IngotError."""
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that arrived before it was started

    def forward(number: int, frame: FrameType | None) -> None:
        if started:
            started[0].send_signal(number)
        else:
            early.append(number)

    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    handlers = {
        **dict.fromkeys((*signals_not_ignored(*TERMINAL_SIGNALS), signal.SIGCHLD), ignore),
        **dict.fromkeys(signals_not_ignored(*FORWARDED_SIGNALS), forward),
    }
    with _handling_signals(handlers), _signal_wakeup() as wakeup:
        try:
            program = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise IngotError(f"cannot start {command[0]}: {error.strerror}") from error
        started.append(program)
        for number in early:
            program.send_signal(number)
        while (code := program.poll()) is None:
            wakeup.recv(1024)
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signal_wakeup() -> Iterator[socket.socket]:
    """A socket with something to read after each signal. Waiting without it would miss signals that another thread
    handles, or that arrive just before the wait."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(before)


@contextlib.contextmanager
def _handling_signals(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], Any]]) -> Iterator[None]:
    """Handlers are not inherited, unlike ignored signals: the program starts with its own, and ignores what this
    process was started to ignore."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
