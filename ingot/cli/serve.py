"""`ingot serve [MODEL]`: find the model, start the engine, open the door, say that it is ready."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.cli.ready import ready_record
from ingot.cli.show_config import show
from ingot.config import SETTINGS, Settings

if TYPE_CHECKING:
    from ingot.engine.encoder_request import Role
    from ingot.engine.engine import Engine

ABOUT = "Serve a model over HTTP, in OpenAI's, Anthropic's and Ollama's words, with a page to chat at the same address."
INTERRUPTED = 130


def run(arguments: list[str]) -> int:
    parser = CommandParser("serve", ABOUT)
    known = SETTINGS["model"]
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{known.help} (default: {known.default})")
    parser.flag("--print-config", action="store_true", help="show every setting, where it came from, and stop")
    add_settings(parser)
    namespace = parser.parse(arguments)
    config = settle(namespace)
    if "print_config" in vars(namespace):
        print(show(config))
        return 0
    _serve(config.settings, lambda: settle(namespace).settings)
    return 0


def _serve(settings: Settings, settings_again: Callable[[], Settings]) -> None:
    """Until the first interrupt, which lets running requests finish; a second one leaves at once."""
    from ingot.http.server import listen, make_server
    from ingot.protocol.served import format_of

    # The port is taken before the model is loaded, so that a wrong one is known at once.
    with contextlib.closing(listen(settings)) as listener:
        try:
            engine = start_engine(settings)
        except KeyboardInterrupt:
            leave_at_once()

        def say_ready(url: str) -> None:
            encoders = [offered.card for offered in engine.encoders.values()]
            found = format_of(engine.card, engine.tokenizer, settings)
            chats = engine.tokenizer.template is not None
            record = ready_record(url, engine.card, found, needs_key=settings.keyed, chats=chats, encoders=encoders)
            print(record, flush=True)

        try:
            server = make_server(engine, settings, say_ready, listener, settings_again)
            server.run()
        except BaseException:
            engine.close()
            raise
        if server.force_exit:
            leave_at_once()
        signal.signal(signal.SIGINT, leave_at_once)
        engine.close()


def start_engine(settings: Settings) -> Engine:
    """Find the model, fetching or converting it if need be, and load it. Raises IngotError."""
    from ingot.engine.speculation.choice import Choice
    from ingot.models.files.locate import locate
    from ingot.models.files.progress import TerminalProgress

    progress = TerminalProgress()
    try:
        folder = locate(settings.model, settings, progress)
        further: dict[Role, str | None] = {"embedding": settings.embedding_model, "rerank": settings.rerank_model}
        encoders = {role: locate(name, settings, progress) for role, name in further.items() if name is not None}
        models = Choice.parse(settings.speculate).models
        guessing = {proposer: locate(name, settings, progress) for proposer, name in models.items()}
        reader = settings.specprefill_draft_model
        scorer = None if reader is None else locate(reader, settings, progress)
        named = (folder, *encoders.values(), *guessing.values(), *(() if scorer is None else (scorer,)))
        progress(f"loading {', '.join(dict.fromkeys(found.name for found in named))}")
    finally:
        progress.finish()

    from ingot.engine.start import start_engine as start

    return start(
        settings,
        folder.path,
        name=served_name(settings, folder.name),
        source=folder.source,
        encoders=encoders,
        draft=guessing.get("draft"),
        eagle=guessing.get("eagle"),
        scorer=scorer,
    )


def served_name(settings: Settings, own: str) -> str:
    return settings.served_model_name[0] if settings.served_model_name else own


def leave_at_once(signal_number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """Without the usual farewells: the engine's thread may be deep inside mlx, where nothing can interrupt it."""
    sys.stdout.flush()
    print(file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
