"""`ingot chat [MODEL|URL]`: a conversation in the terminal, or one question from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from ingot.cli.chat_commands import run_command
from ingot.cli.client import Client, ServerError, delta_of, is_url
from ingot.cli.conversation import SAMPLING, ChatSession, sampling_value
from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.config import SETTINGS, Settings
from ingot.errors import ConfigError, ModelError

ABOUT = "Talk to a model. MODEL runs here, in this process; a URL is any OpenAI-compatible server."
LOCAL_SECTIONS = ("the model", "the engine")  # settings that say how to run a model: no use with a URL
FENCE = '"""'
HISTORY_LENGTH = 2000
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# A model's text is not to be trusted with the terminal: no control characters but line feed and tab.
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x0A, 0x09})


def run(arguments: list[str]) -> int:
    namespace = _parser().parse(arguments)
    config = settle(namespace)
    if config.origins["log_level"] == "default":
        logging.getLogger("ingot").setLevel(logging.WARNING)  # the terminal belongs to the conversation
    given = vars(namespace)
    interactive = sys.stdin.isatty()
    if interactive:
        # Whoever sits at a terminal means this program by Ctrl-C, also where a script was started to ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        client = _client(namespace, config.settings, stack)
        sampling = {name: sampling_value(name, given[name]) for name in SAMPLING if name in given}
        name = given.get("name") or _served_name(client)
        conversation = ChatSession(name, system=given.get("system"), sampling=sampling)
        return _converse(client, conversation) if interactive else _one_shot(client, conversation)


def _parser() -> CommandParser:
    parser = CommandParser("chat", ABOUT)
    parser.add_argument("model", nargs="?", metavar="MODEL|URL", help="what to talk to", default=None)
    parser.flag("--system", metavar="TEXT", section="the chat", help="the system prompt")
    parser.flag("--name", metavar="NAME", section="the chat", help="which of the server's models to ask")
    for name in SAMPLING:
        metavar = "N" if SAMPLING[name] is int else "X"
        about = f"{name.replace('_', ' ')} (default: the server's)"
        parser.flag("--" + name.replace("_", "-"), dest=name, metavar=metavar, section="the chat", help=about)
    add_settings(parser, (*LOCAL_SECTIONS, "the rest"))
    known = SETTINGS["api_key"]
    parser.flag(known.flag, dest=known.name, metavar="KEY", section="the chat", help="key of the server at URL")
    return parser


def _client(namespace: argparse.Namespace, settings: Settings, stack: contextlib.ExitStack) -> Client:
    """A client of the server at URL, or of one that is started here and lives as long as `stack`."""
    if not is_url(settings.model):
        from ingot.cli.local_server import local_server

        return Client(stack.enter_context(local_server(settings)), settings.api_key)
    useless = [SETTINGS[name] for name in vars(namespace) if name in SETTINGS and name != "model"]
    for known in useless:
        if known.section in LOCAL_SECTIONS:
            raise ConfigError(f"{known.flag} says how to run a model here; it means nothing to {settings.model}")
    return Client(settings.model, settings.api_key)


def _served_name(client: Client) -> str:
    try:
        return str(client.get("models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ModelError(f"{client.url} lists no models; name one with --name") from None


def answer(client: Client, conversation: ChatSession, question: str) -> Generator[tuple[str, str], None, None]:
    """(reasoning, text) as they arrive. What was said is kept, also when the answer is stopped or fails."""
    said: list[str] = []
    try:
        with contextlib.closing(client.stream("chat/completions", conversation.ask(question))) as chunks:
            for chunk in chunks:
                reasoning, text = delta_of(chunk.data)
                said.append(text)
                yield reasoning, text
    finally:
        if any(said):
            conversation.answered("".join(said))


def _one_shot(client: Client, conversation: ChatSession) -> int:
    question = sys.stdin.read().removesuffix("\n")
    if not question:
        raise ConfigError("nothing to ask: standard input is empty")
    clean = sys.stdout.isatty()
    for _, text in answer(client, conversation, question):
        _write(printable(text) if clean else text)
    _write("\n")
    return 0


def _converse(client: Client, conversation: ChatSession) -> int:
    print(f"{conversation.model} at {client.url} - /help lists commands, Ctrl-D leaves")
    with _history(history_path()):
        while True:
            try:
                message = read_message(input)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit leaves)")
                continue
            if message.startswith("/"):
                outcome = run_command(conversation, message)
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
    if line.lstrip().startswith(FENCE):
        lines = [line.lstrip().removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(read(". "))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip("\n")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + read(". ")
    return line


def _show_answer(client: Client, conversation: ChatSession, question: str) -> None:
    """Ctrl-C ends the answer, not the program; a failed one is said and the chat goes on."""
    stream = answer(client, conversation, question)
    thinking = False
    try:
        with _at_interrupts(client.break_off):
            for reasoning, text in stream:
                if bool(reasoning) != thinking and (reasoning or text):
                    thinking = bool(reasoning)
                    _write(DIM if thinking else f"{PLAIN}\n")
                _write(printable(reasoning + text))
        _write("\n")
    except KeyboardInterrupt:
        _write(f"{PLAIN}\n(stopped)\n")
    except ServerError as error:
        _write(f"{PLAIN}\n")
        print(f"ingot chat: {error.message}", file=sys.stderr)
    finally:
        stream.close()


@contextlib.contextmanager
def _at_interrupts(act: Callable[[], None]) -> Iterator[None]:
    """`act` is called in a thread at Ctrl-C. KeyboardInterrupt alone is not enough: a read that begins just as it comes
    is not woken by it, and a server may be silent for long."""
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


def printable(text: str) -> str:
    return text.translate(_CONTROLS)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def history_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "ingot" / "history"


@contextlib.contextmanager
def _history(path: Path) -> Iterator[None]:
    """Line editing with the lines of earlier chats; those of this one are added when it ends."""
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
