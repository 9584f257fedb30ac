"""`ingot chat [MODEL|URL]`: a conversation in the terminal, or one question from a pipe."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import logging
import math
import mimetypes
import os
import re
import shutil
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ingot.cli.client import ServerClient, ServerError, chunk_delta, cut_short, is_url
from ingot.cli.flags import LOCAL_SECTIONS, CommandParser, add_settings, settings_from_arguments
from ingot.cli.markdown import DIM, MarkdownScreen
from ingot.config import SETTINGS, Settings
from ingot.config.field import VALUE_KINDS_IN_WORDS
from ingot.errors import ConfigError, ModelError, nearest_name

ABOUT_CHAT = "Chat with a model. MODEL runs in this process; a URL is any OpenAI-compatible server."
TEXT_FENCE = '"""'
HISTORY_LENGTH = 2000
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
        conversation = ChatSession("", system=flags.get("system"), sampling=sampling, list_models=client.served_models)
        conversation.model = flags.get("name") or _served_name(client)
        rendered = "plain" not in flags and shows_styles(sys.stdout.isatty(), os.environ)
        screen = AnswerScreen(rendered=rendered)
        return (_converse if interactive else _one_shot)(client, conversation, screen)


def _chat_parser() -> CommandParser:
    parser = CommandParser("chat", ABOUT_CHAT)
    parser.add_argument("model", nargs="?", metavar="MODEL|URL", help="the model or server to chat with", default=None)
    parser.flag("--system", metavar="TEXT", section="the chat", help="the system prompt")
    parser.flag("--name", metavar="NAME", section="the chat", help="which of the server's models to use")
    parser.flag(
        "--plain",
        action="store_true",
        section="the chat",
        help="show answers as they come, neither wrapped nor with Markdown rendered (default where the output is no "
        "terminal, or NO_COLOR is set)",
    )
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
    names = client.served_models()
    if not names:
        raise ModelError(f"{client.url} lists no models; name one with --name")
    return names[0]


def shows_styles(terminal: bool, environ: Mapping[str, str]) -> bool:
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


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
                conversation.cut = cut_short(chunk.data) or conversation.cut
                yield reasoning, text
    finally:
        if any(parts):
            conversation.add_answer("".join(parts))


def _one_shot(client: ServerClient, conversation: ChatSession, screen: AnswerScreen) -> int:
    question = sys.stdin.read().removesuffix("\n")
    if not question:
        raise ConfigError("nothing to ask: standard input is empty")
    if sys.stdout.isatty():
        for _, text in stream_chat_answer(client, conversation, question):
            screen.show("", text)
        screen.end()
    else:
        for _, text in stream_chat_answer(client, conversation, question):
            _write_now(text)
        _write_now("\n")
    if conversation.cut:
        print(f"ingot chat: {conversation.cut}", file=sys.stderr)
    return 0


def _converse(client: ServerClient, conversation: ChatSession, screen: AnswerScreen) -> int:
    _print_wrapped(f"{conversation.model} at {client.url}\n/help lists commands, Ctrl-D exits")
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
                    _print_wrapped(outcome.say)
                if outcome.leave:
                    return 0
                message = outcome.ask or ""
            if message.strip():
                _show_answer(client, conversation, message, screen)


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


class AnswerScreen:
    """Shows answers as they come: Markdown and wrapped, with thinking dim, or as they are."""

    def __init__(self, *, rendered: bool) -> None:
        self._rendered = rendered
        self._thinking = self._line_open = False
        self._part: MarkdownScreen | None = None

    def show(self, reasoning: str, text: str) -> None:
        if not reasoning and not text:
            return
        if bool(reasoning) != self._thinking:
            self.end()
        self._thinking = bool(reasoning)
        shown = printable_text(reasoning + text)
        if not self._rendered:
            self._line_open = True
            _write_now(shown)
            return
        if self._part is None:
            base = DIM if self._thinking else ""
            self._part = MarkdownScreen(_write_now, _columns, rendered=not self._thinking, base=base)
        self._part.feed(shown)

    def end(self) -> None:
        """The answer, or its thinking, has ended. The next text begins a line."""
        if self._part is not None:
            self._part.finish()
        elif self._line_open:
            _write_now("\n")
        self._part, self._thinking, self._line_open = None, False, False


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _print_wrapped(text: str, file: TextIO | None = None) -> None:
    """Lines wrapped at words; in a table of two columns, below the second one."""
    file = file or sys.stdout
    for line in text.split("\n"):
        columns = re.match(r"(\S.*? {2,})\S", line)
        indent = " " * len(columns[1]) if columns else ""
        wide = file.isatty()
        print(textwrap.fill(line, max(40, _columns() - 1), subsequent_indent=indent) if wide else line, file=file)


def _show_answer(client: ServerClient, conversation: ChatSession, question: str, screen: AnswerScreen) -> None:
    """Ctrl-C ends the answer, not the program. After an error the chat goes on."""
    stream = stream_chat_answer(client, conversation, question)
    try:
        with _calling_at_interrupts(client.break_off):
            for reasoning, text in stream:
                screen.show(reasoning, text)
        screen.end()
        if conversation.cut:
            _print_wrapped(f"({conversation.cut})")
    except KeyboardInterrupt:
        screen.end()
        print("(stopped)")
    except ServerError as error:
        screen.end()
        _print_wrapped(f"ingot chat: {error.message}", sys.stderr)
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


def _model_command(conversation: ChatSession, name: str) -> CommandOutcome:
    try:
        served = conversation.list_models()
    except ServerError as error:
        return CommandOutcome(error.message)
    if not name:
        return CommandOutcome("\n".join(f"{'*' if each == conversation.model else ' '} {each}" for each in served))
    if name not in served:
        near = nearest_name(name, served)
        hint = f"did you mean {near}?" if near else f"served are: {', '.join(served) or 'none'}"
        return CommandOutcome(f"no model {name} is served; {hint}")
    conversation.model = name
    return CommandOutcome(f"{name} answers from now on")


def _image_command(conversation: ChatSession, name: str) -> CommandOutcome:
    if not name:
        return CommandOutcome(
            "\n".join(image.name for image in conversation.images) or "no image is attached; usage: /image FILE"
        )
    if name == "none":
        conversation.images = []
        return CommandOutcome("no image is attached any more")
    path = Path(name.strip("'\"")).expanduser()
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        return CommandOutcome(f"{name} is not named like an image, such as photo.png or photo.jpg")
    try:
        data = path.read_bytes()
    except OSError as error:
        return CommandOutcome(f"cannot read {name}: {error.strerror}")
    conversation.images.append(AttachedImage(path.name, f"data:{kind};base64,{base64.b64encode(data).decode()}"))
    return CommandOutcome(f"{path.name} goes with the next question (/image none removes it)")


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
    "model": ChatCommand(
        "/model NAME", "go on with another of the server's models (/model lists them)", _model_command
    ),
    "image": ChatCommand("/image FILE", "attach an image to the next question", _image_command),
    "retry": ChatCommand("/retry", "ask the last question again", _retry_command),
    "clear": ChatCommand("/clear", "start a new conversation", _clear_command),
    "save": ChatCommand("/save FILE", "write the conversation to a new .md or .json file", _save_command),
    "help": ChatCommand("/help", "show this", _help_command),
    "quit": ChatCommand("/quit", "exit", lambda _, __: CommandOutcome(leave=True)),
}


SessionMessage = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AttachedImage:
    name: str
    url: str  # with its data


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
    images: list[AttachedImage] = field(default_factory=list)  # for the next question
    asked_images: list[AttachedImage] = field(default_factory=list)  # of `question`
    cut: str = ""  # why its answer is not complete
    list_models: Callable[[], list[str]] = field(default=list, compare=False)

    def ask(self, text: str) -> dict[str, Any]:
        """The body of the request that asks `text`, with the images that are attached."""
        self.question, self.answered, self.cut = text, False, ""
        self.asked_images, self.images = self.images, []
        return {"model": self.model, "messages": [*self.messages, self._asked], "stream": True, **self.sampling}

    @property
    def _asked(self) -> SessionMessage:
        images = [{"type": "image_url", "image_url": {"url": image.url}} for image in self.asked_images]
        content = [*images, {"type": "text", "text": self.question}] if images else self.question
        return {"role": "user", "content": content}

    def add_answer(self, text: str) -> None:
        """Add the last question and its answer, which may be partial."""
        if self.question is None:
            raise ValueError("there is no question")
        self.turns += [self._asked, {"role": "assistant", "content": text}]
        self.answered = True

    def retry(self) -> str | None:
        """Remove the last answer and return its question; None if there is none."""
        if self.answered:
            del self.turns[-2:]
        self.answered, self.images = False, [*self.asked_images]
        return self.question

    def clear(self) -> None:
        self.turns, self.question, self.answered, self.images, self.asked_images = [], None, False, [], []

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
        return "\n".join(f"## {message['role']}\n\n{_as_text(message['content'])}\n" for message in self.messages)


def _as_text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n\n".join(part.get("text", "(an image)") for part in content)
