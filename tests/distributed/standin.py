"""A group without a model: the real parent, the real door and the real server, with ranks that only count steps.

`python -m tests.distributed.standin parent HOSTS PORT STALL_S` is `ingot serve --hosts HOSTS`, and starts the ranks by
this file. A rank waits as one does in a collective: whoever misses one of the others hangs for ever.
"""

from __future__ import annotations

import os
import sys

from ingot.distributed.heartbeat import HeartbeatSender, start_heartbeats
from ingot.distributed.hosts import read_rank_assignment
from ingot.distributed.place import RankConfig, read_rank_config
from tests.distributed.steps import STEP


def be_rank() -> None:
    read_rank_assignment()
    here = read_rank_config(os.environ)
    assert here is not None
    signs = start_heartbeats(here)
    assert signs is not None
    if here.rank:
        follow(here, signs)
    else:
        from tests.distributed.standin_leader import lead

        lead(here, signs)


def follow(here: RankConfig, signs: HeartbeatSender) -> None:
    (link,) = here.links(60.0)
    signs.did(0)
    while (frame := link.receive()).kind == STEP:
        link.send(STEP, step=frame.step)
        signs.did(frame.step)


def be_parent(hosts: str, port: int, stall_s: float) -> int:
    from ingot.distributed.hosts import parse_hosts
    from ingot.distributed.supervisor import Supervisor
    from ingot.http.server import UnavailableServer, open_listener
    from ingot.observe.logs import set_up_logging
    from tests.http.scripted import settings

    set_up_logging("info", "text")
    options = settings(port=port)
    listener = open_listener(options)
    print(listener.port, flush=True)
    command = ("-P", "-m", "tests.distributed.standin", "rank")
    door = UnavailableServer(listener.sockets, options)
    return Supervisor(parse_hosts(hosts), [], listener.sockets, door, stall_s, 5.0, command).run()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        be_rank()
    else:
        sys.exit(be_parent(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
