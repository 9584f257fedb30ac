"""`ingot serve` over several processes: the parent that watches them, the first, which serves, and the others.

Each imports what it needs where it needs it: most servers are no group, and the parent takes no model's modules.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ingot.config import Settings
from ingot.distributed.place import LISTEN_VARIABLE, RankPlace
from ingot.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from ingot.distributed.heartbeat import HeartbeatSender
    from ingot.distributed.hosts import Hosts
    from ingot.engine.engine import Engine
    from ingot.http.server import HttpServer, Listener

GROUP_RETRY_S: Final = 2


def find_group_hosts(settings: Settings) -> Hosts | None:
    """Where the ranks of this server are to run; None: one process is enough. Raises ConfigError."""
    if settings.hosts is None and settings.ranks == 1:
        return None
    from ingot.distributed.hosts import local_hosts, parse_hosts

    if settings.hosts is None:
        return local_hosts(settings.ranks)
    hosts = parse_hosts(settings.hosts)
    settings_for_group(settings, len(hosts.hosts))
    return hosts if len(hosts.hosts) > 1 else None


def settings_for_group(settings: Settings, size: int) -> Settings:
    """The settings of a group of that size: where nobody says how to divide the model, every layer is. Raises
    ConfigError where they are for another size."""
    if settings.ranks == 1:
        return replace(settings, tensor_parallel_size=size)
    if settings.ranks != size:
        raise ConfigError(
            f"tensor_parallel_size and pipeline_parallel_size ask for {settings.ranks} ranks, and there are {size}",
            param="hosts",
        )
    return settings


def refuse_several_models(settings: Settings) -> None:
    if settings.models or settings.lazy:
        raise ConfigError("a model over several processes is the only one of its server, and loaded at the start")


def supervise_group(settings: Settings, hosts: Hosts, arguments: Sequence[str]) -> int:
    """Start the ranks and watch them until a signal ends it; gives the exit code. `arguments` are those of `serve`."""
    from ingot.distributed.supervisor import SAVING_S, Supervisor
    from ingot.http.server import UnavailableServer, open_listener

    with contextlib.closing(open_listener(settings)) as listener:
        door = UnavailableServer(listener.sockets, settings)
        ending = settings.drain_s + (0.0 if settings.cache_dir is None else SAVING_S)
        return Supervisor(hosts, arguments, listener.sockets, door, settings.rank_stall_s, ending).run()


def inherited_listener(settings: Settings) -> Listener:
    """The sockets that were handed down, by the parent or by the server that this one is in place of; or else new ones.
    Raises ConfigError."""
    from ingot.http.server import Listener, open_listener

    handed = os.environ.pop(LISTEN_VARIABLE, None)  # children have no use for it
    if handed is None:
        return open_listener(settings)
    from ingot.http.server import inherited_sockets

    sockets = tuple(inherited_sockets(handed))
    return Listener(sockets, settings.host, sockets[0].getsockname()[1])


def report_to_parent(signs: HeartbeatSender, engine: Engine, server: HttpServer) -> None:
    """Let the parent know how the first rank stands, clients how all do, and end requests when the parent says so."""
    signs.step = lambda: engine.last_step
    signs.trouble = lambda: engine.ranks_trouble
    signs.stuck_s = lambda: engine.health().stepped_ago_s
    signs.on_farewell = lambda reason: server.give_up(
        Unavailable(f"The model stopped: {reason}.", retry_after=GROUP_RETRY_S)
    )
    server.shared_state.standings = lambda: signs.standings


def run_follower(settings: Settings, here: RankPlace, signs: HeartbeatSender | None) -> None:
    """A rank other than the first: does what that one says, until it ends. Raises IngotError."""
    from ingot.models.files.locate import locate_model
    from ingot.models.files.progress import TerminalProgress

    folder = locate_model(settings.model, settings, TerminalProgress())
    from ingot.distributed.follower import run_follower as replay

    replay(settings, folder.path, here, ignore_step if signs is None else signs.did)


def ignore_step(step: int) -> None:
    """Under `mlx.launch` there is no parent that would want to know how far a rank is."""
