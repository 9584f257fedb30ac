"""`ingot launch CLIENT`: another project's client, told of a running server, or of one that runs as long as it does."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ingot.agents.agent import Agent, ClientStart, Endpoint, Paste
from ingot.agents.registry import AGENTS, agent_named
from ingot.cli.client import Client, ServerError
from ingot.cli.first_prompt import PREFIXES, FirstPrompt, recording
from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.cli.foreground import run_in_foreground
from ingot.config import SETTINGS, Settings
from ingot.errors import ConfigError, IngotError, ModelError

ABOUT = (
    "Start a client against a running server, or against one that is started for it with --model, with the right "
    "address, key, model, context and time limits. What follows -- goes to the client. Nothing is written into the "
    "client's own configuration."
)
LOCAL_SECTIONS = ("the model", "the engine")  # settings that say how to run a model: of use with --model alone
ANSWERS_WITHIN_S: Final = 30.0
EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run(arguments: list[str]) -> int:
    ours, theirs = _parted(arguments)
    namespace = launch_parser().parse(ours)
    config = settle(namespace)
    agent = agent_named(namespace.client)
    given = vars(namespace)
    _check(namespace)
    if "print" in given:
        print("\n\n".join(map(_shown, agent.pastes(_running(given, config.settings)))))
        return 0
    program = _program(agent)
    start = _start_warm if "warm" in given else _start
    if "model" not in given:
        return start(agent, program, _running(given, config.settings), theirs)
    settings = config.settings
    if "warm" in given and settings.cache_dir is None:
        settings = replace(settings, cache_dir=PREFIXES.expanduser())
    with _own_server(settings) as endpoint:
        return start(agent, program, endpoint, theirs)


def _parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our words, and those after `--`."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def launch_parser() -> CommandParser:
    parser = CommandParser("launch", ABOUT)
    known = ", ".join(AGENTS)
    parser.add_argument("client", metavar="CLIENT", help=f"one of {known}")
    parser.flag("--url", metavar="URL", help="a running server (default: where `ingot serve` listens)")
    parser.flag("--name", metavar="NAME", help="which of the server's models to use (default: the first)")
    parser.flag("--model", metavar="MODEL", help="serve this one while the client runs, given as to `ingot serve`")
    parser.flag("--print", action="store_true", help="show the settings to paste instead, and start nothing")
    parser.flag(
        "--warm",
        action="store_true",
        help="have the client's first prompt computed before it starts; it is taken down in the first session",
    )
    parser.flag(
        SETTINGS["api_key"].flag, dest="api_key", metavar="KEY", help="the server's key (better: INGOT_API_KEY)"
    )
    add_settings(parser, (*LOCAL_SECTIONS, "the rest"))
    return parser


def _check(namespace: Namespace) -> None:
    given = vars(namespace)
    if "model" in given:
        for name in ("url", "name", "print"):
            if name in given:
                raise ConfigError(f"--{name} is about a running server, and --model starts one: give either")
        return
    if "warm" in given and "print" in given:
        raise ConfigError("--print starts nothing, and --warm is about a start: give either")
    for known in (SETTINGS[name] for name in given if name in SETTINGS):
        if known.section in LOCAL_SECTIONS:
            raise ConfigError(f"{known.flag} says how to run a model: it goes with --model")


def _program(agent: Agent) -> str:
    found = shutil.which(agent.program)
    if found is None:
        raise IngotError(
            f"{agent.title} is not installed: there is no `{agent.program}`. To install it: {agent.install}"
        )
    return found


def _running(given: dict[str, Any], settings: Settings) -> Endpoint:
    """What is served at the given address, or where `ingot serve` listens. Raises IngotError with what to do."""
    url = given.get("url") or _usual_url(settings)
    try:
        return _endpoint(url, settings.api_key, given.get("name"))
    except ServerError as error:
        if error.answered in (401, 403):
            raise IngotError(f"{error.message} Give the server's key with --api-key or INGOT_API_KEY.") from error
        if error.answered is not None:
            raise
        client = given["client"]
        raise IngotError(
            f"{error.message}. Start one with `ingot serve MODEL`, name another with --url, or have one started for as "
            f"long as the client runs: `ingot launch {client} --model MODEL`."
        ) from error


def _usual_url(settings: Settings) -> str:
    host = EVERYWHERE.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _endpoint(url: str, key: str | None, name: str | None = None) -> Endpoint:
    client = Client(url, key, timeout=ANSWERS_WITHIN_S)
    try:
        listed = {str(model["id"]): model for model in client.get("models")["data"]}
        # Encoders, which are listed too, write nothing.
        writing = [model for model, about in listed.items() if about.get("tool_format") is not None] or list(listed)
        model = writing[0] if name is None else name
        if model not in listed:
            raise ConfigError(f"{url} serves {', '.join(listed)}, and no {model}")
        about = listed[model]
        context = int(about["max_model_len"])
        chats = about.get("chats", True)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise ModelError(f"{url} does not tell its models and their context: it is no ingot server") from None
    if chats is False:
        raise ModelError(
            f"{model} has no chat template: it is a base model, which only goes on with texts. "
            "Serve one that was trained to answer, or give it a template with --chat-template FILE."
        )
    return Endpoint(url.rstrip("/").removesuffix("/v1"), key, model, context)


@contextlib.contextmanager
def _own_server(settings: Settings) -> Iterator[Endpoint]:
    """A server in this process. What it logs goes to a file, as the terminal is the client's."""
    from ingot.cli.local_server import local_server

    descriptor, log = tempfile.mkstemp(prefix="ingot-launch-", suffix=".log")
    os.close(descriptor)
    with local_server(settings) as url, _logging_to(Path(log)):
        endpoint = _endpoint(url, settings.api_key)
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


def _start(agent: Agent, program: str, endpoint: Endpoint, words: list[str]) -> int:
    if (warning := agent.warning(endpoint)) is not None:
        print(f"ingot launch: {warning}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="ingot-launch-") as folder:
        launch = agent.launch(endpoint, Path(folder))
        for path, text in launch.files.items():
            path.write_text(text, encoding="utf-8")
        return run_in_foreground([program, *launch.arguments, *words], _environment(launch))


def _start_warm(agent: Agent, program: str, endpoint: Endpoint, words: list[str]) -> int:
    prompt = FirstPrompt.of(agent, program, words)
    try:
        computed = prompt.compute(endpoint)
    except ServerError as error:
        computed = error.message  # it is the client's to find out what else does not work
    if computed is not None:
        print(f"ingot launch: {agent.title}: {computed}", file=sys.stderr)
        return _start(agent, program, endpoint, words)
    print(
        f"ingot launch: {agent.title}'s first prompt is taken down in this session; from the next one on it is "
        "computed before the client starts",
        file=sys.stderr,
    )
    with recording(prompt, endpoint) as relayed:
        return _start(agent, program, relayed, words)


def _environment(launch: ClientStart) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in launch.without}
    return {**kept, **launch.environment}


def _shown(paste: Paste) -> str:
    return f"# {paste.place}\n\n{paste.text}"
