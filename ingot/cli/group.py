"""`ingot serve` over several ranks: the parent process that supervises them, rank 0, which serves, and the others.

Imports are inside functions: most servers have one process, and the parent imports no model code.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ingot.cli.servers import registered_server
from ingot.config import Settings, served_name
from ingot.distributed.place import LISTEN_VARIABLE, RankConfig
from ingot.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from ingot.distributed.heartbeat import HeartbeatSender
    from ingot.distributed.hosts import Hosts
    from ingot.engine.engine import Engine
    from ingot.http.server import HttpServer, Listener

GROUP_RETRY_S: Final = 2


def find_group_hosts(settings: Settings) -> Hosts | None:
    """Where the ranks of this server run; None if one process is enough. Raises ConfigError."""
    if settings.hosts is None and settings.ranks == 1:
        return None
    from ingot.distributed.hosts import local_hosts, parse_hosts

    if settings.hosts is None:
        return local_hosts(settings.ranks)
    hosts = parse_hosts(settings.hosts)
    settings_for_group(settings, len(hosts.hosts))
    return hosts if len(hosts.hosts) > 1 else None


def settings_for_group(settings: Settings, size: int) -> Settings:
    """The settings for a group of that size: tensor parallel unless they say otherwise. Raises ConfigError if they
    ask for another size."""
    if settings.ranks == 1:
        return replace(settings, tensor_parallel_size=size)
    if settings.ranks != size:
        raise ConfigError(
            f"tensor_parallel_size and pipeline_parallel_size ask for {settings.ranks} ranks, but there are {size}",
            param="hosts",
        )
    return settings


def refuse_several_models(settings: Settings) -> None:
    if settings.models or settings.lazy:
        raise ConfigError("a model over several ranks must be the only one of its server, and is loaded at startup")


def supervise_group(settings: Settings, hosts: Hosts, arguments: Sequence[str]) -> int:
    """Start the ranks and watch them until a signal; returns the exit code. `arguments` are those of `serve`."""
    from ingot.distributed.supervisor import Supervisor
    from ingot.http.server import UnavailableServer, open_listener

    with contextlib.closing(open_listener(settings)) as listener:
        unavailable = UnavailableServer(listener.sockets, settings)
        stop_s = seconds_to_stop(settings)
        name = served_name(settings, Path(settings.model).name)
        with registered_server(listener.url, [name], stop_s) as own:
            own.update(state=f"{len(hosts.hosts)} ranks", models=[(name, "")])
            return Supervisor(hosts, arguments, listener.sockets, unavailable, settings.rank_stall_s, stop_s).run()


def seconds_to_stop(settings: Settings) -> float:
    """How long a server that was asked to stop may take."""
    from ingot.distributed.supervisor import SAVING_S

    return settings.drain_s + (0.0 if settings.cache_dir is None else SAVING_S)


def inherited_listener(settings: Settings) -> Listener:
    """The sockets inherited from the parent, or from the server that this one replaces; otherwise new ones. Raises
    ConfigError."""
    from ingot.http.server import Listener, open_listener

    inherited = os.environ.pop(LISTEN_VARIABLE, None)  # not for child processes
    if inherited is None:
        return open_listener(settings)
    from ingot.http.server import inherited_sockets

    sockets = tuple(inherited_sockets(inherited))
    return Listener(sockets, settings.host, sockets[0].getsockname()[1])


def report_to_parent(heartbeat: HeartbeatSender, engine: Engine, server: HttpServer) -> None:
    """Report rank 0's progress to the parent and all ranks' status to clients; end requests when the parent says so."""
    heartbeat.step = lambda: engine.last_step
    heartbeat.trouble = lambda: engine.ranks_trouble
    heartbeat.stuck_s = lambda: engine.health().stepped_ago_s
    heartbeat.on_farewell = lambda reason: server.give_up(
        Unavailable(f"The model stopped: {reason}.", retry_after=GROUP_RETRY_S)
    )
    server.shared_state.rank_statuses = lambda: heartbeat.rank_statuses


def run_follower(settings: Settings, here: RankConfig, heartbeat: HeartbeatSender | None) -> None:
    """Run a rank other than 0: it executes what rank 0 sends, until that ends. Raises IngotError."""
    from ingot.models.files.locate import locate_model
    from ingot.models.files.progress import TerminalProgress

    folder = locate_model(settings.model, settings, TerminalProgress())
    from ingot.distributed import follower

    # Under `mlx.launch` there is no parent to report steps to.
    follower.run_follower(settings, folder.path, here, (lambda step: None) if heartbeat is None else heartbeat.did)
