"""`ingot serve [MODEL]`: find the model, start the engine, open the door, say that it is ready.

What a lazy server can do without until then is imported where it is needed: its start is that of its imports.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.cli.group import follow, hosts_wanted, listening, over, refuse_several_models, report, supervise
from ingot.cli.ready import fleet_record, ready_record
from ingot.config import SETTINGS, ModelEntry, Settings, lone_entry, model_entries
from ingot.distributed.place import LISTENING, Place, place
from ingot.errors import DeviceLost
from ingot.extras import require
from ingot.kernels.device import is_lost
from ingot.models.files.kinds import CHAT, kind_of, sees

if TYPE_CHECKING:
    from ingot.engine.encoder_request import Role
    from ingot.engine.engine import Engine
    from ingot.http.server import Listener, Server
    from ingot.ranks.signs import Signs

ABOUT = "Serve a model over HTTP, in OpenAI's, Anthropic's and Ollama's words, with a page to chat at the same address."
INTERRUPTED = 130
RESTARTS: Final = "INGOT_RESTARTS"
"""The variable that says when a lost device made this server start again, in seconds since the epoch."""
MOST_RESTARTS: Final = 3
WITHIN_S: Final = 600.0
"""Within which that many restarts may be. A device that is lost once more does not come back by that."""
LAST_WORDS_S: Final = 10.0
"""By when a server whose device is lost has ended its requests, or is started again nevertheless."""
LAST_STANDARD_FILE: Final = 2
RETURNING: Final = "the device was lost and the server is being started again"

log = logging.getLogger("ingot.cli")


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
    alone = lone(config.settings)
    require_extras(entries or (alone,))
    require_folders(entries or (alone,))
    here = place(os.environ)
    hosts = hosts_wanted(config.settings) if here is None else None
    if here is not None or hosts is not None:
        refuse_several_models(config.settings)
    if hosts is not None:
        return supervise(config.settings, hosts, arguments)
    if here is not None:
        _serve_rank(config.settings, here, lambda: settle(namespace).settings)
        return 0
    if entries or config.settings.lazy or alone.kind != CHAT:
        _serve_fleet(entries or (alone,), config.settings, lambda: settle(namespace).settings)
    else:
        _serve(config.settings, lambda: settle(namespace).settings)
    return 0


def require_extras(entries: Sequence[ModelEntry]) -> None:
    """Of models that may be loaded much later, too. Raises ConfigError where a package is missing that they, or what
    else the settings ask for, cannot do without."""
    for entry in entries:
        settings = entry.settings
        if settings.audio_model is not None:
            require("audio", "--audio-model", param="audio_model")
        if entry.kind == "audio":
            require("audio", f"{entry.name}, of kind audio,")
        if entry.kind == CHAT and sees(entry.path, settings):
            require("vision", f"{entry.name}, which sees,", instead="or serve it for text alone with --text-only")
        if settings.kv_events is not None:
            require("events", "--kv-events", param="kv_events")
        if settings.otlp_traces_endpoint is not None:
            require("otel", "--otlp-traces-endpoint", param="otlp_traces_endpoint")


def require_folders(entries: Sequence[ModelEntry]) -> None:
    """The same of where prompts are kept. Raises ConfigError where others may have written there."""
    for folder, key_file in {(entry.settings.cache_dir, entry.settings.archive_key_file) for entry in entries}:
        if folder is not None:
            from ingot.cache.disk.store import folder_secret

            folder_secret(folder, key_file)


def _serve_rank(settings: Settings, here: Place, settings_again: Callable[[], Settings]) -> None:
    """A process of several that run one model: the first serves, the others do what it says."""
    from ingot.ranks.signs import signs_to_parent

    signs = signs_to_parent(here)
    if here.rank:
        try:
            follow(over(settings, here.size), here, signs)
        except Exception as error:
            if is_lost(error):
                leave_lost(f"rank {here.rank} lost its device: {error}")
            raise
    else:
        _serve(over(settings, here.size), lambda: over(settings_again(), here.size), signs)


def _serve(settings: Settings, settings_again: Callable[[], Settings], signs: Signs | None = None) -> None:
    """Until the first interrupt, which lets running requests finish; a second one leaves at once."""
    from ingot.http.server import make_server
    from ingot.protocol.served import format_of

    # The port is taken before the model is loaded, so that a wrong one is known at once.
    returns = signs is None and LISTENING in os.environ
    with contextlib.closing(listening(settings)) as listener:
        try:
            with _saying_so(listener, settings) if returns else contextlib.nullcontext():
                engine = start_engine(settings)
        except KeyboardInterrupt:
            leave_at_once()
        except DeviceLost:
            leave_lost("the device was lost") if signs is not None else start_again(listener.sockets)

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
            server.leave = leave_at_once
            if signs is not None:
                report(signs, engine, server)
            lost = _Lost(server, alone=signs is None)
            engine.when_lost(lost)
            server.run()
        except BaseException:
            engine.close()
            raise
        engine.when_lost(lost.leave)
        if server.force_exit or server.given_up:
            leave_at_once()
        _say_saving(settings)
        engine.close()


def _serve_fleet(entries: Sequence[ModelEntry], settings: Settings, settings_again: Callable[[], Settings]) -> None:
    """The same with several models, or with one that is loaded when it is asked for."""
    from ingot.engine.fleet import Fleet
    from ingot.engine.loading.model_loader import Garage
    from ingot.http.app import import_soon
    from ingot.http.fleet.app import build_fleet_app
    from ingot.http.server import server_of

    with contextlib.closing(listening(settings)) as listener:
        garage = Garage(settings, alone=len(entries) == 1)
        fleet = Fleet(
            *(entries, garage, garage.memory),
            min_residency_s=settings.min_residency_s,
            swap_wait_s=settings.swap_wait_s,
        )

        def say_ready(url: str) -> None:
            print(fleet_record(url, fleet.standings(), garage.memory, needs_key=settings.keyed), flush=True)
            import_soon(then=garage.warm_up)

        server = server_of(
            build_fleet_app(fleet, garage.pulse, settings), settings, say_ready, listener, settings_again
        )
        lost = _Lost(server)
        garage.when_lost(lost)
        server.leave = leave_at_once
        try:
            server.run()
        except BaseException:
            garage.close()
            raise
        garage.when_lost(lost.leave)
        if server.force_exit:
            leave_at_once()
        _say_saving(settings)
        garage.close()


def _say_saving(settings: Settings) -> None:
    if settings.cache_dir is not None:
        from ingot.engine.spilling import CLOSING_S

        log.info("what is kept of prompts is written to the disk, for up to %g s", CLOSING_S)


def lone(settings: Settings) -> ModelEntry:
    """The one model of a server without tables, under the name that it is known by before it is found."""
    name = served_name(settings, Path(settings.model).name)
    return lone_entry(settings, name, kind_of(settings.model, settings))


def start_engine(settings: Settings) -> Engine:
    """Find the model, fetching or converting it if need be, and load it. Raises IngotError."""
    from ingot.engine.speculation.options import Choice
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

    from ingot.engine.loading.language_model import start_engine as start

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


class _Lost:
    """How a server ends whose device is lost: requests end in words, then the process is another one. Where the server
    is a rank, its parent sees to that."""

    def __init__(self, server: Server, *, alone: bool = True) -> None:
        self._server, self._alone = server, alone
        self._listening: Sequence[socket.socket] = ()
        self._late: threading.Timer | None = None

    def __call__(self) -> None:
        """The device is lost. Any thread may call it."""
        if not self._server.stopped:
            self._listening = [one.dup() for one in self._server.listener.sockets]  # its own are closed when it ends
        self._late = threading.Timer(LAST_WORDS_S, self.leave)
        self._late.daemon = True
        self._late.start()
        self._server.give_up(DeviceLost())

    def leave(self) -> NoReturn:
        if self._late is not None:
            self._late.cancel()
        if not self._alone:
            leave_lost("rank 0 lost its device")
        if self._server.stopped:
            leave_lost("the device was lost while the server was stopping")
        start_again(self._listening)


@contextlib.contextmanager
def _saying_so(listener: Listener, settings: Settings) -> Iterator[None]:
    """Tell clients that the server will be back, for as long as the block lasts."""
    from ingot.http.closed import ClosedDoor

    door = ClosedDoor(listener.sockets, settings)
    door.open(RETURNING)
    try:
        yield
    finally:
        door.close()


def start_again(listening: Sequence[socket.socket]) -> NoReturn:
    """Run the same command in place of this one, at the same sockets. Nothing of this process is taken down, which
    would reach for a device that is lost. Who comes to this too often ends."""
    now = time.time()
    known = [int(at) for at in re.findall(r"\d+", os.environ.get(RESTARTS, ""))]
    lately = [at for at in known if 0 <= now - at < WITHIN_S]
    if len(lately) >= MOST_RESTARTS:
        times = f"{len(lately) + 1} times within {WITHIN_S / 60:.0f} minutes"
        leave_lost(f"the device was lost {times}; the server is not started again. `ingot doctor` looks at the device.")
    handed = [one.fileno() for one in listening]
    os.environ[RESTARTS] = ",".join(str(at) for at in (*lately, int(now)))
    if handed:
        os.environ[LISTENING] = ",".join(map(str, handed))
    _flush(f"the device was lost; starting again ({len(lately) + 1} of {MOST_RESTARTS} times)")
    for file in _open_files():
        with contextlib.suppress(OSError):  # a driver's file, too, or the device would not be given back
            os.set_inheritable(file, False)
    for file in handed:
        os.set_inheritable(file, True)
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError as error:
        leave_lost(f"the device was lost, and the server cannot be started again: {error.strerror}")


def _open_files() -> list[int]:
    """But the standard ones."""
    with contextlib.suppress(OSError):
        return [file for each in Path("/dev/fd").iterdir() if (file := int(each.name)) > LAST_STANDARD_FILE]
    return []


def leave_lost(said: str) -> NoReturn:
    """With the exit code that tells of a lost device, and without the usual farewells."""
    _flush(said)
    os._exit(DeviceLost.exit_code)


def _flush(said: str) -> None:
    """The last line, behind all others."""
    with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
        for handler in logging.getLogger().handlers:
            handler.flush()
        sys.stdout.flush()
        print(f"ingot serve: {said}", file=sys.stderr, flush=True)


def leave_at_once(signal_number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """Without the usual farewells: the engine's thread may be deep inside mlx, where nothing can interrupt it."""
    sys.stdout.flush()
    print(file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
