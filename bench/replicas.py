"""Several servers behind a router: how much of agents' sessions is reused, how even the load is, and what a lost server
costs.

python -m bench.replicas --smg /path/to/venv/bin/smg       one server, three behind the router, then one of them killed
python -m bench.replicas --smg smg --agents 4 --turns 6 --sticky

The router is SMG, from its own environment (`pip install smg`). Agents play sessions of their own at once, each turn
after the answer to the one before. `possible` is what the agent's session had computed by its turn before.
"""

from __future__ import annotations

import argparse
import io
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench import agent_models, servers
from ingot.cli.client import ServerClient, ServerError
from ingot.cli.peers.session import Course, Player, Session, reused_share
from ingot.errors import IngotError
from ingot.models.files.progress import TerminalProgress

NAME = "agents"
SMG = ("--policy", "cache_aware", "--cache-threshold", "0.5", "--balance-abs-threshold", "2")
"""Also in docs/scale.md, with reasons. The rest are its defaults."""
STICKY = ("--routing-key-override", "--routing-key-headers", "authorization", "--assignment-mode", "min_group")
"""Where a session stays is settled when it begins."""
RETRIES = 20
SERVED = re.compile(r"^vllm:request_success_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`served` requests by server; `failed` is how many an agent had to send again."""

    share: float
    seconds: float
    tokens: int
    served: tuple[int, ...]
    failed: int = 0


@contextmanager
def replicas(folder: Path, count: int) -> Iterator[list[servers.Running]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(servers.replica(folder, folder.parent / f"replica-{number}.log", NAME))
            for number in range(count)
        ]


def play(door: servers.Running, behind: Sequence[servers.Running], chosen: argparse.Namespace, seed: int) -> Outcome:
    return _play(door, behind, chosen, seed, lambda turns: None)


def lose_one(
    door: servers.Running, behind: Sequence[servers.Running], chosen: argparse.Namespace, seed: int
) -> Outcome:
    """The first server is killed when half of all turns are over."""
    killed = threading.Event()
    half = chosen.agents * chosen.turns // 2

    def kill(turns: int) -> None:
        if turns >= half and not killed.is_set():
            killed.set()
            servers.send(behind[0], signal.SIGKILL)

    return _play(door, behind[1:], chosen, seed, kill)


def _play(
    door: servers.Running,
    behind: Sequence[servers.Running],
    chosen: argparse.Namespace,
    seed: int,
    after: Callable[[int], None],
) -> Outcome:
    before = [_served(each) for each in behind]
    course, lock = Course(chosen.turns, chosen.tokens), threading.Lock()
    # Each with a key of its own, by which a router can tell sessions apart.
    doors = [replace(door, client=ServerClient(door.client.url, f"agent-{seed + n}")) for n in range(chosen.agents)]
    players = [Player(own.client, own.model, Session(True, seed=seed + n), course) for n, own in enumerate(doors)]
    done, failed, broken = 0, 0, list[IngotError]()

    def run(player: Player) -> None:
        nonlocal done, failed
        tries = 0
        while len(player.turns) < chosen.turns and tries <= RETRIES:
            try:
                player.step()
            except ServerError as error:
                tries += 1
                with lock:
                    failed += 1
                if tries > RETRIES:
                    broken.append(error)
                time.sleep(0.2)
                continue
            with lock:
                done += 1
                after(done)

    began = time.perf_counter()
    threads = [threading.Thread(target=run, args=(player,)) for player in players]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if broken:
        raise broken[0]
    turns = [turn for player in players for turn in player.turns]
    served = tuple(_served(each) - first for each, first in zip(behind, before, strict=True))
    tokens = sum(turn.heard.prompt_tokens for turn in turns)
    return Outcome(reused_share(turns) or 0.0, seconds, tokens, served, failed)


def _served(server: servers.Running) -> int:
    """Requests that a server has answered."""
    said = io.BytesIO()
    server.client.download("/metrics", said)
    return int(sum(float(number) for number in SERVED.findall(said.getvalue().decode())))


def show(name: str, found: Outcome, alone: Outcome | None = None) -> None:
    against = f", {found.share / alone.share:.1%} of one server's" if alone is not None else ""
    print(f"{name}: {found.share:.1%} of what was possible was reused{against}; {found.seconds:.1f} s")
    if len(found.served) > 1:
        least, most = min(found.served), max(found.served)
        print(f"    requests by server: {', '.join(map(str, found.served))}, {most / max(1, least):.2f}x apart")
    if found.failed:
        print(f"    failed requests, which were sent again: {found.failed}")


def run(chosen: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        agent_models.write(chosen.model, folder, TerminalProgress())
        with replicas(folder, 1) as (one,):
            alone = play(one, [one], chosen, 0)
        show("one server", alone)
        with (
            replicas(folder, chosen.replicas) as all_of_them,
            servers.smg(
                chosen.smg, all_of_them, Path(name) / "smg.log", NAME, (*SMG, *(STICKY if chosen.sticky else ()))
            ) as router,
        ):
            show(f"{chosen.replicas} servers behind SMG", play(router, all_of_them, chosen, 1000), alone)
            if chosen.replicas > 1:
                show("one of them killed halfway", lose_one(router, all_of_them, chosen, 2000), alone)


def read(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bench.replicas", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--smg", type=Path, required=True, help="the router's program")
    parser.add_argument("--sticky", action="store_true", help="sessions stay where they began, evenly spread")
    parser.add_argument("--model", choices=sorted(agent_models.CONFIGS), default="append")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=7000, help="of a session's last prompt, approximately")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = read(sys.argv[1:] if arguments is None else arguments)
    try:
        run(chosen)
    except IngotError as error:
        print(f"bench.replicas: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
