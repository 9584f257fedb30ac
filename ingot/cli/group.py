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
from ingot.distributed.place import LISTENING, Place
from ingot.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from ingot.distributed.hosts import Hosts
    from ingot.engine.engine import Engine
    from ingot.http.server import Listener, Server
    from ingot.ranks.signs import Signs

RETRY_S: Final = 2


def hosts_wanted(settings: Settings) -> Hosts | None:
    """Where the ranks of this server are to run; None: one process is enough. Raises ConfigError."""
    if settings.hosts is None and settings.ranks == 1:
        return None
    from ingot.distributed.hosts import hosts_of, local_hosts

    if settings.hosts is None:
        return local_hosts(settings.ranks)
    hosts = hosts_of(settings.hosts)
    over(settings, len(hosts.hosts))
    return hosts if len(hosts.hosts) > 1 else None


def over(settings: Settings, size: int) -> Settings:
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


def supervise(settings: Settings, hosts: Hosts, arguments: Sequence[str]) -> int:
    """Start the ranks and watch them until a signal ends it; gives the exit code. `arguments` are those of `serve`."""
    from ingot.distributed.supervisor import SAVING_S, Supervisor
    from ingot.http.closed import ClosedDoor
    from ingot.http.server import listen

    with contextlib.closing(listen(settings)) as listener:
        door = ClosedDoor(listener.sockets, settings)
        ending = settings.drain_s + (0.0 if settings.cache_dir is None else SAVING_S)
        return Supervisor(hosts, arguments, listener.sockets, door, settings.rank_stall_s, ending).run()


def listening(settings: Settings) -> Listener:
    """The sockets that were handed down, by the parent or by the server that this one is in place of; or else new ones.
    Raises ConfigError."""
    from ingot.http.server import Listener, listen

    handed = os.environ.pop(LISTENING, None)  # children have no use for it
    if handed is None:
        return listen(settings)
    from ingot.http.closed import inherited

    sockets = tuple(inherited(handed))
    return Listener(sockets, settings.host, sockets[0].getsockname()[1])


def report(signs: Signs, engine: Engine, server: Server) -> None:
    """Let the parent know how the first rank stands, clients how all do, and end requests when the parent says so."""
    signs.step = lambda: engine.last_step
    signs.trouble = lambda: engine.ranks_trouble
    signs.stuck_s = lambda: engine.health().stepped_ago_s
    signs.on_farewell = lambda reason: server.give_up(Unavailable(f"The model stopped: {reason}.", retry_after=RETRY_S))
    server.hall.standings = lambda: signs.standings


def follow(settings: Settings, here: Place, signs: Signs | None) -> None:
    """A rank other than the first: does what that one says, until it ends. Raises IngotError."""
    from ingot.models.files.locate import locate
    from ingot.models.files.progress import TerminalProgress

    folder = locate(settings.model, settings, TerminalProgress())
    from ingot.ranks.follower import follow as replay

    replay(settings, folder.path, here, nobody_counts if signs is None else signs.did)


def nobody_counts(step: int) -> None:
    """Under `mlx.launch` there is no parent that would want to know how far a rank is."""
