"""A group without a model: the real parent, the real door and the real server, with ranks that only count steps.

`python -m tests.ranks.standin parent HOSTS PORT STALL_S` is `ingot serve --hosts HOSTS`, and starts the ranks by this
file. A rank waits as one does in a collective: whoever misses one of the others hangs for ever.
"""

from __future__ import annotations

import os
import sys

from ingot.distributed.place import Place, place
from ingot.ranks.arrival import arrive
from ingot.ranks.signs import Signs, signs_to_parent
from tests.distributed.steps import STEP


def be_rank() -> None:
    arrive()
    here = place(os.environ)
    assert here is not None
    signs = signs_to_parent(here)
    assert signs is not None
    if here.rank:
        follow(here, signs)
    else:
        from tests.distributed.standin_leader import lead

        lead(here, signs)


def follow(here: Place, signs: Signs) -> None:
    (link,) = here.links(60.0)
    signs.did(0)
    while (frame := link.receive()).kind == STEP:
        link.send(STEP, step=frame.step)
        signs.did(frame.step)


def be_parent(hosts: str, port: int, stall_s: float) -> int:
    from ingot.distributed.hosts import hosts_of
    from ingot.distributed.supervisor import Supervisor
    from ingot.http.closed import ClosedDoor
    from ingot.http.server import listen
    from ingot.observe.logs import set_up
    from tests.http.scripted import settings

    set_up("info", "text")
    options = settings(port=port)
    listener = listen(options)
    print(listener.port, flush=True)
    command = ("-P", "-m", "tests.ranks.standin", "rank")
    door = ClosedDoor(listener.sockets, options)
    return Supervisor(hosts_of(hosts), [], listener.sockets, door, stall_s, 5.0, command).run()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        be_rank()
    else:
        sys.exit(be_parent(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
