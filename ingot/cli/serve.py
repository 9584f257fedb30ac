"""`ingot serve [MODEL]`: find the model, start the engine, open the door, say that it is ready.

What a lazy server can do without until then is imported where it is needed: its start is that of its imports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.cli.group import follow, hosts_wanted, listening, over, refuse_several_models, report, supervise
from ingot.cli.ready import fleet_record, ready_record
from ingot.config import SETTINGS, ModelEntry, Settings, lone_entry, model_entries
from ingot.models.files.kinds import CHAT, kind_of
from ingot.ranks.place import Place, place

if TYPE_CHECKING:
    from ingot.engine.encoder_request import Role
    from ingot.engine.engine import Engine
    from ingot.ranks.signs import Signs

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
    entries = model_entries(config.settings, kind_of)
    if "print_config" in vars(namespace):
        from ingot.cli.show_config import show

        print(show(config))
        return 0
    here = place(os.environ)
    hosts = hosts_wanted(config.settings) if here is None else None
    if here is not None or hosts is not None:
        refuse_several_models(config.settings)
    if hosts is not None:
        return supervise(config.settings, hosts, arguments)
    if here is not None:
        _serve_rank(config.settings, here, lambda: settle(namespace).settings)
        return 0
    alone = lone(config.settings)
    if entries or config.settings.lazy or alone.kind != CHAT:
        _serve_fleet(entries or (alone,), config.settings, lambda: settle(namespace).settings)
    else:
        _serve(config.settings, lambda: settle(namespace).settings)
    return 0


def _serve_rank(settings: Settings, here: Place, settings_again: Callable[[], Settings]) -> None:
    """A process of several that run one model: the first serves, the others do what it says."""
    from ingot.ranks.signs import signs_to_parent

    signs = signs_to_parent(here)
    if here.rank:
        follow(over(settings, here.size), here, signs)
    else:
        _serve(over(settings, here.size), lambda: over(settings_again(), here.size), signs)


def _serve(settings: Settings, settings_again: Callable[[], Settings], signs: Signs | None = None) -> None:
    """Until the first interrupt, which lets running requests finish; a second one leaves at once."""
    from ingot.http.server import make_server
    from ingot.protocol.served import format_of

    # The port is taken before the model is loaded, so that a wrong one is known at once.
    with contextlib.closing(listening(settings)) as listener:
        try:
            engine = start_engine(settings)
        except KeyboardInterrupt:
            leave_at_once()

        def say_ready(url: str) -> None:
            encoders = [offered.card for offered in engine.encoders.values()]
            found = format_of(engine.card, engine.tokenizer, settings)
            chats = engine.tokenizer.template is not None
            record = ready_record(
                url,
                engine.card,
                found,
                needs_key=settings.keyed,
                chats=chats,
                encoders=encoders,
                hearing=None if engine.hearing is None else engine.hearing.card,
                speaking=None if engine.speaking is None else engine.speaking.card,
            )
            print(record, flush=True)
            if signs is not None:
                signs.did(0)

        try:
            server = make_server(engine, settings, say_ready, listener, settings_again)
            if signs is not None:
                report(signs, engine, server)
            server.run()
        except BaseException:
            engine.close()
            raise
        if server.force_exit or server.given_up:
            leave_at_once()
        signal.signal(signal.SIGINT, leave_at_once)
        engine.close()


def _serve_fleet(entries: Sequence[ModelEntry], settings: Settings, settings_again: Callable[[], Settings]) -> None:
    """The same with several models, or with one that is loaded when it is asked for."""
    from ingot.engine.fleet.fleet import Fleet
    from ingot.engine.fleet.garage import Garage
    from ingot.http.fleet.app import build_fleet_app
    from ingot.http.fleet.later import import_soon
    from ingot.http.server import listen, server_of

    with contextlib.closing(listen(settings)) as listener:
        garage = Garage(settings, alone=len(entries) == 1)
        fleet = Fleet(entries, garage, garage.memory, settings.min_residency_s)

        def say_ready(url: str) -> None:
            print(fleet_record(url, fleet.standings(), garage.memory, needs_key=settings.keyed), flush=True)
            import_soon(then=garage.warm_up)

        server = server_of(
            build_fleet_app(fleet, garage.pulse, settings), settings, say_ready, listener, settings_again
        )
        try:
            server.run()
        except BaseException:
            garage.close()
            raise
        if server.force_exit:
            leave_at_once()
        signal.signal(signal.SIGINT, leave_at_once)
        garage.close()


def lone(settings: Settings) -> ModelEntry:
    """The one model of a server without tables, under the name that it is known by before it is found."""
    name = served_name(settings, Path(settings.model).name)
    return lone_entry(settings, name, kind_of(settings.model, settings))


def start_engine(settings: Settings) -> Engine:
    """Find the model, fetching or converting it if need be, and load it. Raises IngotError."""
    from ingot.engine.speculation.choice import Choice
    from ingot.models.files.locate import locate
    from ingot.models.files.progress import TerminalProgress

    progress = TerminalProgress()
    try:
        folder = locate(settings.model, settings, progress, in_place=True)
        further: dict[Role, str | None] = {"embedding": settings.embedding_model, "rerank": settings.rerank_model}
        encoders = {role: locate(name, settings, progress) for role, name in further.items() if name is not None}
        models = Choice.parse(settings.speculate).models
        guessing = {
            proposer: locate(name, settings, progress, in_place=proposer == "draft")
            for proposer, name in models.items()
        }
        reader = settings.specprefill_draft_model
        scorer = None if reader is None else locate(reader, settings, progress, in_place=True)
        audio, speech = settings.audio_model, settings.speech_model
        hearing = None if audio is None else locate(audio, settings, progress)
        speaking = None if speech is None else locate(speech, settings, progress)
        beside = [one for one in (scorer, hearing, speaking) if one is not None]
        named = (folder, *encoders.values(), *guessing.values(), *beside)
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
        hearing=hearing,
        speaking=speaking,
    )


def served_name(settings: Settings, own: str) -> str:
    return settings.served_model_name[0] if settings.served_model_name else own


def leave_at_once(signal_number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """Without the usual farewells: the engine's thread may be deep inside mlx, where nothing can interrupt it."""
    sys.stdout.flush()
    print(file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
