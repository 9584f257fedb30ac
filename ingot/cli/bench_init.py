"""`ingot bench SUBJECT`: measurements of servers, each a module with `run(arguments) -> exit code`."""

from __future__ import annotations

import importlib

from ingot.errors import ConfigError, nearest

SUBJECTS = {
    "serve": "measure a running server under several loads",
    "speculate": "measure what guessing ahead gains, on several kinds of work",
}


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] not in SUBJECTS:
        near = nearest(arguments[0], SUBJECTS)
        hint = f"did you mean {near}?" if near else f"try: {', '.join(SUBJECTS)}"
        raise ConfigError(f"unknown subject {arguments[0]}; {hint}")
    code: int = importlib.import_module(f"ingot.cli.bench_{arguments[0]}").run(arguments[1:])
    return code


def _usage() -> str:
    rows = "\n".join(f"  {name:<10} {about} (ingot bench {name} --help)" for name, about in SUBJECTS.items())
    return f"usage: ingot bench SUBJECT [FLAGS]\n\n{rows}"
