"""`ingot serve [MODEL]`: find the model, start the engine, open the door, say that it is ready."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.cli.show_config import show
from ingot.config import Settings

if TYPE_CHECKING:
    from ingot.engine.engine import Engine
    from ingot.engine.request import ModelCard

ABOUT = "Serve a model over HTTP, with the protocols of OpenAI, and a page to chat at the same address."


def run(arguments: list[str]) -> int:
    parser = CommandParser("serve", ABOUT)
    about = "local folder, .gguf file, hub id, or the name of a packaged model"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    parser.flag("--print-config", action="store_true", help="show every setting, where it came from, and stop")
    add_settings(parser)
    namespace = parser.parse(arguments)
    config = settle(namespace)
    if "print_config" in vars(namespace):
        print(show(config))
        return 0
    return _serve(config.settings)


def _serve(settings: Settings) -> int:
    engine = start_engine(settings)
    try:
        open_door(engine, settings, lambda url: print(ready_record(url, engine.card, settings), flush=True))
    finally:
        with second_interrupt_exits():
            engine.close()
    return 0


def start_engine(settings: Settings) -> Engine:
    """Find (fetch, convert) the model and load it. Raises IngotError."""
    from ingot.engine.engine import Engine
    from ingot.models.locate import locate
    from ingot.models.progress import TerminalProgress

    progress = TerminalProgress()
    folder = locate(settings.model, settings, progress)
    progress.finish()
    return Engine.start(settings, folder)


def open_door(engine: Engine, settings: Settings, on_ready: Callable[[str], None]) -> None:
    """Serve until interrupted; `on_ready` gets the URL once requests are answered."""
    from ingot.http.server import serve

    serve(engine, settings, on_ready)
