"""The /commands of a chat: one function each, in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ingot.cli.conversation import SAMPLING, ChatSession, sampling_value
from ingot.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to do after a command: say something, ask something, or leave."""

    say: str = ""
    ask: str | None = None
    leave: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    help: str
    run: Callable[[ChatSession, str], Outcome]


def run_command(conversation: ChatSession, line: str) -> Outcome:
    """Run `/name rest`. A mistake is something to say, never an exception."""
    name, _, rest = line[1:].partition(" ")
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        return Outcome(f"unknown command /{name}; " + (f"did you mean /{near}?" if near else "see /help"))
    return COMMANDS[name].run(conversation, rest.strip())


def _system(conversation: ChatSession, text: str) -> Outcome:
    if not text:
        return Outcome(conversation.system or "no system prompt is set")
    conversation.system = None if text == "none" else text
    return Outcome("system prompt removed" if text == "none" else "system prompt set")


def _set(conversation: ChatSession, text: str) -> Outcome:
    name, _, value = text.partition(" ")
    if not name:
        return Outcome("\n".join(f"{key} {conversation.sampling.get(key, 'default')}" for key in SAMPLING))
    try:
        if value.strip() in ("", "default") and name in SAMPLING:
            conversation.sampling.pop(name, None)
            return Outcome(f"{name} is the server's default")
        conversation.sampling[name] = sampling_value(name, value.strip())
    except ConfigError as error:
        return Outcome(error.message)
    return Outcome(f"{name} is {conversation.sampling[name]}")


def _retry(conversation: ChatSession, _: str) -> Outcome:
    question = conversation.retry()
    return Outcome("nothing was asked yet") if question is None else Outcome(ask=question)


def _clear(conversation: ChatSession, _: str) -> Outcome:
    conversation.clear()
    return Outcome("the conversation starts anew (system prompt and parameters are kept)")


def _save(conversation: ChatSession, name: str) -> Outcome:
    if not name:
        return Outcome("say where to: /save FILE")
    try:
        conversation.save(Path(name).expanduser())
    except OSError as error:
        return Outcome(f"cannot save to {name}: {error.strerror}")
    return Outcome(f"saved to {name}")


def _help(_: ChatSession, __: str) -> Outcome:
    rows = [f"{command.usage:<26} {command.help}" for command in COMMANDS.values()]
    rows += [
        f"{'''line ending in a backslash''':<26} goes on in the next line",
        f"{chr(34) * 3:<26} starts and ends a text of many lines",
        f"{'Ctrl-C':<26} stops the answer; Ctrl-D leaves",
    ]
    return Outcome("\n".join(rows))


COMMANDS = {
    "system": Command("/system TEXT", "set the system prompt (/system none removes it)", _system),
    "set": Command("/set NAME VALUE", "set a sampling parameter (/set shows them all)", _set),
    "retry": Command("/retry", "ask the last question again", _retry),
    "clear": Command("/clear", "forget the conversation", _clear),
    "save": Command("/save FILE", "write the conversation to a new .md or .json file", _save),
    "help": Command("/help", "show this", _help),
    "quit": Command("/quit", "leave", lambda _, __: Outcome(leave=True)),
}
