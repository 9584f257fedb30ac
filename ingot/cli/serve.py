"""`ingot serve [MODEL]`: find the model, start the engine, listen, say that it is ready; and a server inside this
process on a free loopback port, for as long as a `with` block lasts.

What a lazy server can do without until it is ready is imported where it is needed: its start is that of its imports.
After a lost device the same command is run again in place of this one, at the same sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments
from ingot.cli.group import (
    find_group_hosts,
    inherited_listener,
    refuse_several_models,
    report_to_parent,
    run_follower,
    seconds_to_stop,
    settings_for_group,
    supervise_group,
)
from ingot.cli.servers import registered_server
from ingot.config import SETTINGS, Config, ModelEntry, Settings, model_entries, single_model_entries
from ingot.distributed.place import LISTEN_VARIABLE, RankConfig, read_rank_config
from ingot.errors import ConfigError, DeviceLost
from ingot.extras import require_extra
from ingot.kernels.device import is_device_lost
from ingot.models.files.locate import CHAT_KIND, has_vision, model_kind, model_kind_in
from ingot.quantities import counted, format_bytes

if TYPE_CHECKING:
    from ingot.config import Settings
    from ingot.distributed.heartbeat import HeartbeatSender
    from ingot.engine.engine import Engine, ModelEngine
    from ingot.engine.fleet import Fleet
    from ingot.engine.loading.model_loader import ModelLoader
    from ingot.engine.request import ModelCard
    from ingot.engine.status import ModelStatus
    from ingot.http.server import HttpServer, Listener
    from ingot.models.files.progress import TerminalProgress
    from ingot.protocol.served import TaskCard
    from ingot.text.tool_formats.registry import FoundFormat


ABOUT_SERVE = (
    "Serve a model over HTTP, in OpenAI's, Anthropic's and Ollama's words, with a page to chat at the same address. "
    "Flags of vLLM, vllm-mlx, mlx-lm and llama-server are understood, too (docs/coming-from.md)."
)
INTERRUPTED = 130
RESTARTS_VARIABLE: Final = "INGOT_RESTARTS"
"""The variable that says when a lost device made this server start again, in seconds since the epoch."""
MOST_RESTARTS: Final = 3
RESTART_WINDOW_S: Final = 600.0
"""Within which that many restarts may be. A device that is lost once more does not come back by that."""
LOST_DEVICE_GRACE_S: Final = 10.0
"""By when a server whose device is lost has ended its requests, or is started again nevertheless."""
LAST_STANDARD_FILE: Final = 2
RETURNING_NOTICE: Final = "the device was lost and the server is being started again"

log = logging.getLogger("ingot.cli")


FIRST_FLAGS: Final = (
    *("port", "host", "api_key", "served_model_name", "context"),
    *("memory", "max_sequences", "cache_dir", "speculate", "models_config"),
)
"""The settings that most users set, at the top of `--help`."""


def run_serve(arguments: list[str]) -> int:
    parser = CommandParser("serve", ABOUT_SERVE)
    known = SETTINGS["model"]
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{known.help} (default: {known.default})")
    parser.flag("--print-config", action="store_true", help="show every setting, where it came from, and stop")
    add_settings(parser, first=FIRST_FLAGS)
    parser.flag(
        "--all",
        section=known.section,
        action="store_true",
        help="serve all models in the folder that --models-dir names, by their folders' and files' names; each is "
        "loaded when a request first names it",
    )
    namespace = parser.parse(arguments)

    def read_settings() -> Config:
        config = settings_from_arguments(namespace, ambient=True)
        return with_whole_folder(config) if "all" in vars(namespace) else config

    config = read_settings()
    entries = model_entries(config.settings, model_kind)
    if "print_config" in vars(namespace):
        from ingot.cli.show import format_config

        print(format_config(config))
        return 0
    entries = entries or single_model_entries(config.settings, model_kind(config.settings.model, config.settings))
    require_extras(entries)
    require_folders(entries)
    here = read_rank_config(os.environ)
    hosts = find_group_hosts(config.settings) if here is None else None
    if here is not None or hosts is not None:
        refuse_several_models(config.settings)
    if hosts is not None:
        return supervise_group(config.settings, hosts, arguments)
    if here is not None:
        _serve_rank(config.settings, here, lambda: read_settings().settings)
        return 0
    named = config.origins["model"] != "default" or config.settings.models or config.settings.models_config
    offers = not named and sys.stdout.isatty()
    _serve_fleet(entries, config.settings, lambda: read_settings().settings, offers=offers)
    return 0


def with_whole_folder(config: Config) -> Config:
    """The same for a server of all models in the models folder. Raises ConfigError where there are none, or where the
    settings name models themselves."""
    from ingot.cli.models import models_in_folder

    settings = config.settings
    for name in ("model", "models", "models_config"):
        if config.origins[name] != "default":
            raise ConfigError(f"--all serves what is in {settings.models_dir}: do not give {name}, too")
    found = models_in_folder(settings.models_dir)
    if not found:
        raise ConfigError(f"there are no models in {settings.models_dir}; --models-dir names another folder")
    models = {
        name: {"path": str(path.absolute()), "kind": CHAT_KIND if path.is_file() else model_kind_in(path)}
        for name, path in found.items()
    }
    return replace(config, settings=replace(settings, models=models, lazy=True))


def require_extras(entries: Sequence[ModelEntry]) -> None:
    """Of models that may be loaded much later, too. Raises ConfigError where a package is missing that they, or what
    else the settings ask for, cannot do without."""
    for entry in entries:
        settings = entry.settings
        if settings.audio_model is not None:
            require_extra("audio", "--audio-model", param="audio_model")
        if entry.kind == "audio":
            require_extra("audio", f"{entry.name}, of kind audio,")
        if entry.kind == CHAT_KIND and has_vision(entry.path, settings):
            require_extra("vision", f"{entry.name}, which sees,", instead="or serve it for text alone with --text-only")
        if settings.kv_events is not None:
            require_extra("events", "--kv-events", param="kv_events")
        if settings.otlp_traces_endpoint is not None:
            require_extra("otel", "--otlp-traces-endpoint", param="otlp_traces_endpoint")


def require_folders(entries: Sequence[ModelEntry]) -> None:
    """The same of where prompts are cached. Raises ConfigError where others may have written there."""
    for folder, key_file in {(entry.settings.cache_dir, entry.settings.archive_key_file) for entry in entries}:
        if folder is not None:
            from ingot.cache.disk.store import folder_secret

            folder_secret(folder, key_file)


def _make_fleet(
    entries: Sequence[ModelEntry],
    loader: ModelLoader,
    models: Sequence[tuple[ModelEntry, ModelEngine]],
    settings: Settings,
) -> Fleet:
    """Of the resident `models`, which are loaded, or of those that are loaded on demand."""
    from ingot.engine.fleet import Fleet

    if models:
        return Fleet.of_resident(models)
    stays_s, waits_s = settings.min_residency_s, settings.swap_wait_s
    return Fleet(entries, loader, loader.memory, min_residency_s=stays_s, swap_wait_s=waits_s)


def _serve_rank(settings: Settings, here: RankConfig, settings_again: Callable[[], Settings]) -> None:
    """A process of several that run one model: the first serves, the others do what it says."""
    from ingot.distributed.heartbeat import start_heartbeats

    signs = start_heartbeats(here)
    if here.rank:
        try:
            run_follower(settings_for_group(settings, here.size), here, signs)
        except Exception as error:
            if is_device_lost(error):
                exit_lost_device(f"rank {here.rank} lost its device: {error}")
            raise
    else:
        whole = settings_for_group(settings, here.size)
        _serve_fleet(single_model_entries(whole), whole, lambda: settings_for_group(settings_again(), here.size), signs)


def _serve_fleet(
    entries: Sequence[ModelEntry],
    settings: Settings,
    settings_again: Callable[[], Settings],
    signs: HeartbeatSender | None = None,
    *,
    offers: bool = False,
) -> None:
    """Until the first interrupt, which lets running requests finish; a second one leaves at once."""
    from ingot.engine.loading.model_loader import ModelLoader
    from ingot.http.app import ENDPOINTS, build_fleet_app, import_in_background
    from ingot.http.server import make_app_server
    from ingot.models.files.progress import TerminalProgress

    # The port is taken before a model is loaded, so that a wrong one is known at once.
    returns = signs is None and LISTEN_VARIABLE in os.environ
    alone = signs is None  # a rank's parent is the server that people see
    with contextlib.closing(inherited_listener(settings)) as listener, contextlib.ExitStack() as at_end:
        names = [entry.name for entry in entries]
        own = registered_server(listener.url, names, seconds_to_stop(settings)) if alone else None
        record = None if own is None else at_end.enter_context(own)
        try:
            loader = ModelLoader(settings, entries)
            with _answering_unavailable(listener, settings) if returns else contextlib.nullcontext():
                models = load_resident_models(loader) if entries[0].resident else []
        except KeyboardInterrupt:
            exit_at_once()
        except DeviceLost:
            exit_lost_device("the device was lost") if signs is not None else restart_process(listener.sockets)

        def print_ready(url: str) -> None:
            if record is not None:
                record.keep_updated(asyncio.get_running_loop(), lambda: _status_of(server, fleet))
            if models:
                print(resident_record(url, [engine for _, engine in models], settings), flush=True)
                import_in_background(ENDPOINTS, then=app.state.service.prepare)
            else:
                print(fleet_record(url, fleet.statuses(), loader.memory, needs_key=settings.keyed), flush=True)
                import_in_background(ENDPOINTS, then=loader.warm_up)
            if signs is not None:
                signs.did(0)
            if offers:
                threading.Thread(target=_print_offer, args=(settings, loader), name="ingot-offer", daemon=True).start()

        try:
            fleet = _make_fleet(entries, loader, models, settings)
            app = build_fleet_app(fleet, loader.health, settings)
            server = make_app_server(app, settings, print_ready, listener, settings_again)
            server.leave = exit_at_once
            stopping = TerminalProgress()
            server.show = stopping.note if sys.stderr.isatty() else None
            if signs is not None:
                report_to_parent(signs, cast("Engine", models[0][1]), server)
            lost = _LostDevice(server, alone=alone)
            loader.on_device_lost(lost)
            server.run()
            stopping.finish()
        except BaseException:
            loader.close()
            raise
        loader.on_device_lost(lost.leave)
        if server.force_exit or server.fatal_error:
            exit_at_once()
        _print_saving(settings)
        with _showing_end(stopping):
            loader.close()


def _print_offer(settings: Settings, loader: ModelLoader) -> None:
    """On a terminal where no model was named: which ones fit. Nobody is asked, and nothing waits for it."""
    from ingot.cli.models import offer_models

    if (offer := offer_models(settings, loader.memory, loader.device_kind)) is not None:
        print(offer, flush=True)


def _status_of(server: HttpServer, fleet: Fleet) -> dict[str, Any]:
    """What `ingot ps` shows."""
    return {
        "state": "stopping" if server.should_exit else "ready",
        "models": [(status.name, status.state) for status in fleet.statuses()],
        "running": len(server.shared_state.live),
        "answered": sum(server.shared_state.statuses.values()),
    }


def load_resident_models(loader: ModelLoader) -> list[tuple[ModelEntry, ModelEngine]]:
    """Find the models, fetching or converting them if need be, and load them before the server is there. Raises
    IngotError."""
    from ingot.http.app import SERVICE, import_in_background
    from ingot.models.files.progress import TerminalProgress

    progress = TerminalProgress()
    if sys.stderr.isatty():
        progress("starting the engine")
    try:
        loader.warm_up()
        import_in_background(SERVICE)  # while the engine's thread reads weights
        return loader.load_resident(progress)
    except DeviceLost:  # which is no state to close anything in
        raise
    except Exception:
        loader.close()
        raise
    finally:
        progress.finish()


@contextlib.contextmanager
def _showing_end(progress: TerminalProgress) -> Iterator[None]:
    """Unloading many gigabytes takes a while, which a terminal shows."""
    if sys.stderr.isatty():
        progress("stopping: letting go of the models")
    try:
        yield
    finally:
        progress.finish()


def _print_saving(settings: Settings) -> None:
    if settings.cache_dir is not None:
        from ingot.engine.offload import OFFLOAD_CLOSING_S

        log.info("cached prompts are written to the disk, for up to %g s", OFFLOAD_CLOSING_S)


class _LostDevice:
    """How a server ends whose device is lost: requests end in words, then the process is another one. Where the server
    is a rank, its parent sees to that."""

    def __init__(self, server: HttpServer, *, alone: bool = True) -> None:
        self._server, self._alone = server, alone
        self._listening: Sequence[socket.socket] = ()
        self._late: threading.Timer | None = None

    def __call__(self) -> None:
        """The device is lost. Any thread may call it."""
        if not self._server.stopped:
            self._listening = [one.dup() for one in self._server.listener.sockets]  # its own are closed when it ends
        self._late = threading.Timer(LOST_DEVICE_GRACE_S, self.leave)
        self._late.daemon = True
        self._late.start()
        self._server.give_up(DeviceLost())

    def leave(self) -> NoReturn:
        if self._late is not None:
            self._late.cancel()
        if not self._alone:
            exit_lost_device("rank 0 lost its device")
        if self._server.stopped:
            exit_lost_device("the device was lost while the server was stopping")
        restart_process(self._listening)


@contextlib.contextmanager
def _answering_unavailable(listener: Listener, settings: Settings) -> Iterator[None]:
    """Tell clients that the server will be back, for as long as the block lasts."""
    from ingot.http.server import UnavailableServer

    unavailable = UnavailableServer(listener.sockets, settings)
    unavailable.open(RETURNING_NOTICE)
    try:
        yield
    finally:
        unavailable.close()


def restart_process(listening: Sequence[socket.socket]) -> NoReturn:
    """Run the same command in place of this one, at the same sockets. Nothing of this process is taken down, which
    would reach for a device that is lost. Who comes to this too often ends."""
    now = time.time()
    known = [int(at) for at in re.findall(r"\d+", os.environ.get(RESTARTS_VARIABLE, ""))]
    lately = [at for at in known if 0 <= now - at < RESTART_WINDOW_S]
    if len(lately) >= MOST_RESTARTS:
        times = f"{len(lately) + 1} times within {RESTART_WINDOW_S / 60:.0f} minutes"
        exit_lost_device(
            f"the device was lost {times}; the server is not started again. `ingot doctor` looks at the device."
        )
    handed = [one.fileno() for one in listening]
    os.environ[RESTARTS_VARIABLE] = ",".join(str(at) for at in (*lately, int(now)))
    if handed:
        os.environ[LISTEN_VARIABLE] = ",".join(map(str, handed))
    _print_last_line(f"the device was lost; starting again ({len(lately) + 1} of {MOST_RESTARTS} times)")
    for file in _open_files():
        with contextlib.suppress(OSError):  # a driver's file, too, or the device would not be given back
            os.set_inheritable(file, False)
    for file in handed:
        os.set_inheritable(file, True)
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError as error:
        exit_lost_device(f"the device was lost, and the server cannot be started again: {error.strerror}")


def _open_files() -> list[int]:
    """But the standard ones."""
    with contextlib.suppress(OSError):
        return [file for each in Path("/dev/fd").iterdir() if (file := int(each.name)) > LAST_STANDARD_FILE]
    return []


def exit_lost_device(message: str) -> NoReturn:
    """With the exit code that tells of a lost device, and without the usual farewells."""
    _print_last_line(message)
    os._exit(DeviceLost.exit_code)


def _print_last_line(message: str) -> None:
    """The last line, behind all others."""
    with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
        for handler in logging.getLogger().handlers:
            handler.flush()
        sys.stdout.flush()
        print(f"ingot serve: {message}", file=sys.stderr, flush=True)


def exit_at_once(signal_number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """Without the usual farewells: the engine's thread may be deep inside mlx, where nothing can interrupt it."""
    sys.stdout.flush()
    print(file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


SAMPLE_QUESTION = {"model": "default", "messages": [{"role": "user", "content": "How do plants make food?"}]}
SAMPLE_BEGINNING = {"model": "default", "prompt": "The sky is blue because", "max_tokens": 64}
MEDIA_WORDS = {"image": "images", "video": "video"}
NO_CHAT = "the model has no chat template and only goes on with texts (/v1/completions); --chat-template gives it one"


def resident_record(url: str, engines: Sequence[ModelEngine], settings: Settings) -> str:
    """Of the main model, and of those alongside it."""
    from ingot.protocol.chat.sampling_defaults import sampling_body, sampling_defaults
    from ingot.protocol.served import answer_format_of

    main = cast("Engine", engines[0])
    return ready_record(
        url,
        main.card,
        answer_format_of(main.card, main.tokenizer, settings),
        needs_key=settings.keyed,
        sampling=sampling_body(sampling_defaults(main.card.recommended, settings.override_generation_config)),
        chats=main.tokenizer.template is not None,
        further=[cast("TaskCard", engine.card) for engine in engines[1:]],
    )


def ready_record(
    url: str,
    card: ModelCard,
    found: FoundFormat,
    *,
    needs_key: bool,
    sampling: Mapping[str, float] = MappingProxyType({}),
    chats: bool = True,
    further: Sequence[TaskCard] = (),
) -> str:
    """One record: the ready line, one for each further model, a note for each thing that is guessed or could be faster,
    a curl to paste. `sampling` is where requests say nothing; `chats` says whether there is a chat template."""
    facts = (
        f"ready: {url}",
        f"{card.name} ({card.formats or card.dtype})",
        card.device,
        f"context {counted(card.context, 'token')}",
        f"memory budget {format_bytes(card.memory_budget)}",
        *([f"sees {' and '.join(MEDIA_WORDS[kind] for kind in card.sees)}"] if card.sees else []),
        *([f"tool format {found.format.name}{' (a guess)' if found.guessed else ''}"] if chats else []),
        *([f"sampling: {', '.join(f'{name} {value}' for name, value in sampling.items())}"] if sampling else []),
        *([f"speculation: {', '.join(card.proposers)}"] if card.proposers else []),
        *([f"specprefill from {counted(card.specprefill_from, 'token')}"] if card.specprefill_from else []),
        *([f"kernels: {card.kernels}"] if card.kernels else []),
        *([f"lossy: {', '.join(card.lossy)}"] if card.lossy else []),
    )
    theirs = [f"{other.name}: {note}" for other in further for note in other.notes]
    notes = [f"note: {note}" for note in (*card.notes, *theirs, *(_format_guess_note(found) if chats else [NO_CHAT]))]
    also = [f"also: {card.name} ({card.dtype}) for {card.at_ready}" for card in further]
    first = SAMPLE_REQUESTS["chat"] if chats else CONTINUES_TEXT
    return "\n".join((" | ".join(facts), *also, *notes, f"try: {_curl_command(url, needs_key, *first)}"))


def fleet_record(url: str, statuses: Iterable[ModelStatus], memory: int, *, needs_key: bool) -> str:
    """The same of several models: a line for each, with how it stands."""
    each = list(statuses)
    count = counted(len(each), "model")
    kinds = [one.kind for one in each]
    kind = "chat" if "chat" in kinds else kinds[0]
    return "\n".join(
        (
            f"ready: {url} | {count} | memory budget {format_bytes(memory)}",
            *map(_describe_state, each),
            f"try: {_curl_command(url, needs_key, *SAMPLE_REQUESTS[kind])}",
        )
    )


def _describe_state(one: ModelStatus) -> str:
    why = f": {one.failure}" if one.failure else ""
    facts = (one.kind, *(["pinned"] if one.pinned else []), f"{one.state}{why}")
    return f"model: {', '.join((one.name, *one.aliases))} ({', '.join(facts)})"


def _format_guess_note(found: FoundFormat) -> list[str]:
    unused = [f"the checkpoint's response_template is not used: {found.unused}"] if found.unused else []
    if not found.guessed:
        return unused
    why = (
        "the model shows none of its own"
        if found.source == "guess"
        else "by the model's type, as its template shows none"
    )
    return [*unused, f"tool format {found.format.name} is a guess: {why}; --tool-format names another"]


def _curl_command(url: str, needs_key: bool, path: str, arguments: str) -> str:
    key = ' -H "Authorization: Bearer $INGOT_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/{path}{key} {arguments}"


def _curl_body(value: object) -> str:
    return f"-H 'Content-Type: application/json' -d '{json.dumps(value)}'"


SAMPLE_REQUESTS: Final = {
    "chat": ("chat/completions", _curl_body(SAMPLE_QUESTION)),
    "embedding": ("embeddings", _curl_body({"input": "How do plants make food?"})),
    "rerank": (
        "rerank",
        _curl_body({"query": "How do plants make food?", "documents": ["From light, water and air.", "It rains."]}),
    ),
    "audio": ("audio/transcriptions", "-F file=@speech.mp3"),
    "speech": ("audio/speech", _curl_body({"input": "The sky is blue."}) + " -o speech.mp3"),
}
"""What to ask a model of each kind for first: where, and with what."""
CONTINUES_TEXT: Final = ("completions", _curl_body(SAMPLE_BEGINNING))


@contextlib.contextmanager
def local_server(settings: Settings, *, encoders: bool = False) -> Iterator[str]:
    """Yields the server's URL. Interrupts are the caller's: the server runs in a thread that never sees them. Models
    that make vectors and scores are left out, unless it is for `encoders`."""
    from ingot.engine.fleet import Fleet
    from ingot.engine.loading.model_loader import ModelLoader
    from ingot.http.app import build_fleet_app
    from ingot.http.server import make_app_server, open_listener

    private = replace(
        settings,
        host="127.0.0.1",
        port=0,
        api_key_file=None,
        warm_prompts=None,
        lazy=False,
        embedding_model=settings.embedding_model if encoders else None,
        rerank_model=settings.rerank_model if encoders else None,
    )
    ready: Future[str] = Future()
    loader = ModelLoader(private, single_model_entries(private))
    try:
        models = load_resident_models(loader)
    except KeyboardInterrupt:
        exit_at_once()
    try:
        app = build_fleet_app(Fleet.of_resident(models), loader.health, private)
        with _running_server(make_app_server(app, private, ready.set_result, open_listener(private)), ready) as url:
            yield url
    finally:
        loader.close()


@contextlib.contextmanager
def _running_server(server: HttpServer, ready: Future[str]) -> Iterator[str]:
    def serve() -> None:
        try:
            server.run()
        except BaseException as error:  # whatever it is, the thread that waits has to hear of it
            if ready.done():
                raise
            ready.set_exception(error)

    server_thread = threading.Thread(target=serve, name="ingot-server", daemon=True)
    server_thread.start()
    try:
        yield ready.result()
    finally:
        server.should_exit = True
        server_thread.join()
