"""`ingot COMMAND ...`: runs a command, and turns exceptions into one line and an exit code.

A command is a function `run_<command>(arguments) -> exit code` in a module that is imported when the command runs, so
that `--help` and `--version` are quick. Exit codes: 0 success, 1 failure, 2 wrong usage, 75 device lost, 130
interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from ingot.errors import ConfigError, IngotError, nearest_name
from ingot.version import __version__

COMMANDS = {
    "serve": "serve a model over HTTP",
    "ps": "list the servers that run on this machine",
    "stop": "stop a server",
    "chat": "chat with a model or a server in the terminal",
    "launch": "start Claude Code, Codex, opencode or aider with a server",
    "pull": "download a model, and convert it if necessary",
    "convert": "quantise a model's weights, and keep or add its draft head",
    "models": "list downloaded models, and packaged ones that can be downloaded by name",
    "show": "show what a model is and can do",
    "rm": "remove a downloaded or converted model",
    "bench": "benchmark a server, and measure what speculation gains",
    "cache": "show, explain, clear, export and import a running server's prefix cache",
    "replay": "run a captured request again, and show where the answers differ",
    "service": "install a server as a system service",
    "mcp": "offer a running server's models to MCP clients",
    "extras": "list optional packages, and install what a feature needs",
    "doctor": "check this machine: what it offers, what is missing and how to install it",
}

MODULES = {"pull": "models", "convert": "models", "rm": "models", "ps": "servers", "stop": "servers"}
"""Commands that are in another command's module."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else "--help"
    if name in ("--help", "-h", "help"):
        print(_help_text())
        return 0
    if name in ("--version", "-V", "version"):
        print(f"ingot {__version__}")
        return 0
    if name not in COMMANDS:
        return _refuse_usage(f"ingot: {_unknown_command(name)}")
    return _run_command(name, words[1:])


def _help_text() -> str:
    rows = "\n".join(f"  {name:<8} {about}" for name, about in COMMANDS.items())
    return (
        "usage: ingot COMMAND [ARGUMENTS]\n\n"
        "An inference server for language models on MLX.\n\n"
        f"commands:\n{rows}\n\n"
        "options:\n  -h, --help     show this\n  -V, --version  show the version\n\n"
        "`ingot COMMAND --help` lists a command's flags."
    )


def _unknown_command(name: str) -> str:
    what = "unknown flag" if name.startswith("-") else "unknown command"
    near = nearest_name(name, [*COMMANDS, "--help", "--version"])
    return f"{what} {name}; " + (f"did you mean {near}?" if near else f"commands: {', '.join(COMMANDS)}")


def _run_command(name: str, arguments: list[str]) -> int:
    try:
        code: int = getattr(importlib.import_module(f"ingot.cli.{MODULES.get(name, name)}"), f"run_{name}")(arguments)
        sys.stdout.flush()  # so that a closed pipe is noticed here and not at exit
        return code
    except ConfigError as error:
        return _refuse_usage(f"ingot {name}: {error.message}")
    except IngotError as error:
        return _report_failure(name, error, error.message)
    except ImportError as error:
        return _report_failure(name, error, f"{error}. `ingot doctor` shows what is missing and how to install it.")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output is gone. Python would complain when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the last resort: people read a line, not a traceback
        return _report_failure(name, error, f"{type(error).__name__}: {error}")


def _report_failure(name: str, error: Exception, message: str) -> int:
    import logging
    import traceback

    if logging.getLogger("ingot").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    print(f"ingot {name}: {' '.join(message.split())}", file=sys.stderr)
    return 1


def _refuse_usage(line: str) -> int:
    print(line, file=sys.stderr)
    return 2
