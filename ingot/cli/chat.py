"""`ingot chat [MODEL|URL]`: a conversation in the terminal, or one question from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.cli.client import ServerClient, ServerError, chunk_delta, is_url
from ingot.cli.flags import LOCAL_SECTIONS, CommandParser, add_settings, settings_from_arguments
from ingot.config import SETTINGS, Settings
from ingot.config.field import VALUE_KINDS_IN_WORDS
from ingot.errors import ConfigError, ModelError, nearest_name

ABOUT_CHAT = "Chat with a model. MODEL runs in this process; a URL is any OpenAI-compatible server."
TEXT_FENCE = '"""'
HISTORY_LENGTH = 2000
DIM_TEXT, PLAIN_TEXT = "\x1b[2m", "\x1b[0m"
# A model's text must not control the terminal: the only control characters are line feed and tab.
_CONTROL_CHARACTERS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x0A, 0x09})


def run_chat(arguments: list[str]) -> int:
    namespace = _chat_parser().parse(arguments)
    config = settings_from_arguments(namespace)
    if config.origins["log_level"] == "default":
        logging.getLogger("ingot").setLevel(logging.WARNING)  # the terminal belongs to the conversation
    flags = vars(namespace)
    interactive = sys.stdin.isatty()
    if interactive:
        # Ctrl-C at a terminal is meant for this program, even if it was started with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        client = _chat_client(namespace, config.settings, stack)
        sampling = {name: parse_sampling_value(name, flags[name]) for name in SAMPLING_PARAMETERS if name in flags}
        name = flags.get("name") or _served_name(client)
        conversation = ChatSession(name, system=flags.get("system"), sampling=sampling)
        return _converse(client, conversation) if interactive else _one_shot(client, conversation)


def _chat_parser() -> CommandParser:
    parser = CommandParser("chat", ABOUT_CHAT)
    parser.add_argument("model", nargs="?", metavar="MODEL|URL", help="the model or server to chat with", default=None)
    parser.flag("--system", metavar="TEXT", section="the chat", help="the system prompt")
    parser.flag("--name", metavar="NAME", section="the chat", help="which of the server's models to use")
    for name in SAMPLING_PARAMETERS:
        metavar = "N" if SAMPLING_PARAMETERS[name] is int else "X"
        about = f"{name.replace('_', ' ')} (default: the server's)"
        parser.flag("--" + name.replace("_", "-"), dest=name, metavar=metavar, section="the chat", help=about)
    add_settings(parser, (*LOCAL_SECTIONS, "the rest"))
    parser.flag("--api-key", dest="api_key", metavar="KEY", section="the chat", help="API key of the server at URL")
    return parser


def _chat_client(namespace: argparse.Namespace, settings: Settings, stack: contextlib.ExitStack) -> ServerClient:
    """A client of the server at URL, or of one in this process that stops with `stack`."""
    if not is_url(settings.model):
        from ingot.cli.serve import local_server

        return ServerClient(stack.enter_context(local_server(settings)), settings.api_key)
    for name in vars(namespace):
        if name != "model" and name in SETTINGS and SETTINGS[name].section in LOCAL_SECTIONS:
            raise ConfigError(f"{SETTINGS[name].flag} is for a model in this process, not for {settings.model}")
    return ServerClient(settings.model, settings.api_key)


def _served_name(client: ServerClient) -> str:
    try:
        return str(client.get("models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ModelError(f"{client.url} lists no models; name one with --name") from None


def stream_chat_answer(
    client: ServerClient, conversation: ChatSession, question: str
) -> Generator[tuple[str, str], None, None]:
    """Reasoning and text as they arrive. A partial answer stays in the conversation."""
    parts: list[str] = []
    try:
        with contextlib.closing(client.stream("chat/completions", conversation.ask(question))) as chunks:
            for chunk in chunks:
                reasoning, text = chunk_delta(chunk.data)
                parts.append(text)
                yield reasoning, text
    finally:
        if any(parts):
            conversation.add_answer("".join(parts))


def _one_shot(client: ServerClient, conversation: ChatSession) -> int:
    question = sys.stdin.read().removesuffix("\n")
    if not question:
        raise ConfigError("nothing to ask: standard input is empty")
    clean = sys.stdout.isatty()
    for _, text in stream_chat_answer(client, conversation, question):
        _write_now(printable_text(text) if clean else text)
    _write_now("\n")
    return 0


def _converse(client: ServerClient, conversation: ChatSession) -> int:
    print(f"{conversation.model} at {client.url} - /help lists commands, Ctrl-D exits")
    with _line_history(history_path()):
        while True:
            try:
                message = read_message(input)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit exits)")
                continue
            if message.startswith("/"):
                outcome = run_chat_command(conversation, message)
                if outcome.say:
                    print(outcome.say)
                if outcome.leave:
                    return 0
                message = outcome.ask or ""
            if message.strip():
                _show_answer(client, conversation, message)


def read_message(read: Callable[[str], str]) -> str:
    """One message: a line, lines joined by a backslash at their end, or a block between two `\"\"\"`."""
    line = read("> ")
    if line.lstrip().startswith(TEXT_FENCE):
        lines = [line.lstrip().removeprefix(TEXT_FENCE)]
        while not lines[-1].rstrip().endswith(TEXT_FENCE):
            lines.append(read(". "))
        lines[-1] = lines[-1].rstrip().removesuffix(TEXT_FENCE)
        return "\n".join(lines).strip("\n")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + read(". ")
    return line


def _show_answer(client: ServerClient, conversation: ChatSession, question: str) -> None:
    """Ctrl-C ends the answer, not the program. After an error the chat goes on."""
    stream = stream_chat_answer(client, conversation, question)
    thinking = False
    try:
        with _calling_at_interrupts(client.break_off):
            for reasoning, text in stream:
                if bool(reasoning) != thinking and (reasoning or text):
                    thinking = bool(reasoning)
                    _write_now(DIM_TEXT if thinking else f"{PLAIN_TEXT}\n")
                _write_now(printable_text(reasoning + text))
        _write_now("\n")
    except KeyboardInterrupt:
        _write_now(f"{PLAIN_TEXT}\n(stopped)\n")
    except ServerError as error:
        _write_now(f"{PLAIN_TEXT}\n")
        print(f"ingot chat: {error.message}", file=sys.stderr)
    finally:
        stream.close()


@contextlib.contextmanager
def _calling_at_interrupts(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in a thread at Ctrl-C. KeyboardInterrupt is not enough: it does not wake a read that begins at that
    moment, and a server may be silent for long."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def watch() -> None:
        while signals := ours.recv(64):
            if signal.SIGINT in signals:
                act()

    watcher = threading.Thread(target=watch, name="ingot-interrupts", daemon=True)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()
        watcher.join()
        ours.close()


def printable_text(text: str) -> str:
    return text.translate(_CONTROL_CHARACTERS)


def _write_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def history_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "ingot" / "history"


@contextlib.contextmanager
def _line_history(path: Path) -> Iterator[None]:
    """Line editing with the history of earlier chats, to which this one is added when it ends."""
    try:
        import readline
    except ImportError:  # a Python built without it still reads lines
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LENGTH)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            readline.write_history_file(path)
        except OSError as error:
            print(f"ingot chat: the history was not saved: {error}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """What to do after a command: print something, ask something, or exit."""

    say: str = ""
    ask: str | None = None
    leave: bool = False


@dataclass(frozen=True, slots=True)
class ChatCommand:
    usage: str
    help: str
    run: Callable[[ChatSession, str], CommandOutcome]


def run_chat_command(conversation: ChatSession, line: str) -> CommandOutcome:
    """Run `/name arguments`. Mistakes are printed, not raised."""
    name, _, argument = line[1:].partition(" ")
    if name not in CHAT_COMMANDS:
        near = nearest_name(name, CHAT_COMMANDS)
        return CommandOutcome(f"unknown command /{name}; " + (f"did you mean /{near}?" if near else "see /help"))
    return CHAT_COMMANDS[name].run(conversation, argument.strip())


def _system_command(conversation: ChatSession, text: str) -> CommandOutcome:
    if not text:
        return CommandOutcome(conversation.system or "no system prompt is set")
    conversation.system = None if text == "none" else text
    return CommandOutcome("system prompt removed" if text == "none" else "system prompt set")


def _set_command(conversation: ChatSession, text: str) -> CommandOutcome:
    name, _, value = text.partition(" ")
    if not name:
        return CommandOutcome(
            "\n".join(f"{key} {conversation.sampling.get(key, 'default')}" for key in SAMPLING_PARAMETERS)
        )
    try:
        if value.strip() in ("", "default") and name in SAMPLING_PARAMETERS:
            conversation.sampling.pop(name, None)
            return CommandOutcome(f"{name} is the server's default")
        conversation.sampling[name] = parse_sampling_value(name, value.strip())
    except ConfigError as error:
        return CommandOutcome(error.message)
    return CommandOutcome(f"{name} is {conversation.sampling[name]}")


def _retry_command(conversation: ChatSession, _: str) -> CommandOutcome:
    question = conversation.retry()
    return CommandOutcome("there is no question yet") if question is None else CommandOutcome(ask=question)


def _clear_command(conversation: ChatSession, _: str) -> CommandOutcome:
    conversation.clear()
    return CommandOutcome("new conversation, with the same system prompt and parameters")


def _save_command(conversation: ChatSession, name: str) -> CommandOutcome:
    if not name:
        return CommandOutcome("usage: /save FILE")
    try:
        conversation.save(Path(name).expanduser())
    except OSError as error:
        return CommandOutcome(f"cannot save to {name}: {error.strerror}")
    return CommandOutcome(f"saved to {name}")


def _help_command(_: ChatSession, __: str) -> CommandOutcome:
    rows = [f"{command.usage:<26} {command.help}" for command in CHAT_COMMANDS.values()]
    rows += [
        f"{'''line ending in a backslash''':<26} continues in the next line",
        f"{chr(34) * 3:<26} starts and ends a text of several lines",
        f"{'Ctrl-C':<26} stops the answer; Ctrl-D exits",
    ]
    return CommandOutcome("\n".join(rows))


CHAT_COMMANDS = {
    "system": ChatCommand("/system TEXT", "set the system prompt (/system none removes it)", _system_command),
    "set": ChatCommand("/set NAME VALUE", "set a sampling parameter (/set shows them all)", _set_command),
    "retry": ChatCommand("/retry", "ask the last question again", _retry_command),
    "clear": ChatCommand("/clear", "start a new conversation", _clear_command),
    "save": ChatCommand("/save FILE", "write the conversation to a new .md or .json file", _save_command),
    "help": ChatCommand("/help", "show this", _help_command),
    "quit": ChatCommand("/quit", "exit", lambda _, __: CommandOutcome(leave=True)),
}


SessionMessage = dict[str, str]

# Only types are checked here; the server checks bounds.
SAMPLING_PARAMETERS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}


def parse_sampling_value(name: str, text: str) -> int | float:
    """Raises ConfigError for an unknown name or a value of the wrong type."""
    if name not in SAMPLING_PARAMETERS:
        near = nearest_name(name, SAMPLING_PARAMETERS)
        raise ConfigError(
            f"unknown parameter {name}; " + (f"did you mean {near}?" if near else ", ".join(SAMPLING_PARAMETERS))
        )
    try:
        value = SAMPLING_PARAMETERS[name](text)
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is not {VALUE_KINDS_IN_WORDS[SAMPLING_PARAMETERS[name]]}") from None
    if not math.isfinite(value):
        raise ConfigError(f"{name}: {text} is not a finite number")
    return value


@dataclass
class ChatSession:
    """Turns alternate between user and assistant. A question without an answer is not a turn, but can be retried."""

    model: str
    system: str | None = None
    sampling: dict[str, int | float] = field(default_factory=dict)
    turns: list[SessionMessage] = field(default_factory=list)
    question: str | None = None
    answered: bool = False  # whether `question` and its answer are the last turn

    def ask(self, text: str) -> dict[str, Any]:
        """The body of the request that asks `text`."""
        self.question, self.answered = text, False
        messages = [*self.messages, {"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "stream": True, **self.sampling}

    def add_answer(self, text: str) -> None:
        """Add the last question and its answer, which may be partial."""
        if self.question is None:
            raise ValueError("there is no question")
        self.turns += [{"role": "user", "content": self.question}, {"role": "assistant", "content": text}]
        self.answered = True

    def retry(self) -> str | None:
        """Remove the last answer and return its question; None if there is none."""
        if self.answered:
            del self.turns[-2:]
        self.answered = False
        return self.question

    def clear(self) -> None:
        self.turns, self.question, self.answered = [], None, False

    @property
    def messages(self) -> list[SessionMessage]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def save(self, path: Path) -> None:
        """As JSON if the name ends in .json, else as Markdown. Raises FileExistsError."""
        with path.open("x", encoding="utf-8") as file:
            file.write(self._json() if path.suffix == ".json" else self._markdown())

    def _json(self) -> str:
        whole = {"model": self.model, "messages": self.messages, "sampling": self.sampling}
        return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"

    def _markdown(self) -> str:
        return "\n".join(f"## {message['role']}\n\n{message['content']}\n" for message in self.messages)
