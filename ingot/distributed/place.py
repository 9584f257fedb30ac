"""Where a process stands in a group of several that run one model: what its environment says.

`mlx.launch` and our own parent process (`supervisor`) say it in MLX's variables. Ours adds where rank 0 listens for
plans (`INGOT_CONTROL`), where the parent listens for signs of life (`INGOT_WATCH`), what proves that one belongs to
the group (`INGOT_GROUP_TOKEN`), and at which sockets of the parent's rank 0 takes connections (`INGOT_LISTEN`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from ingot.distributed.wire import Link
from ingot.errors import ConfigError
from ingot.ranks.meeting import gather, join, listen

RANK: Final = "MLX_RANK"
SIZE: Final = "MLX_WORLD_SIZE"
HOSTFILE: Final = "MLX_HOSTFILE"
DEVICES: Final = "MLX_IBV_DEVICES"
CONTROL: Final = "INGOT_CONTROL"
WATCH: Final = "INGOT_WATCH"
TOKEN: Final = "INGOT_GROUP_TOKEN"
LISTENING: Final = "INGOT_LISTEN"  # numbers of open files: the sockets to take connections from
SHORTEST_TOKEN: Final = 16
CONTROL_PORT: Final = 32322  # the ring's follow it

Listed = Annotated[list[Annotated[list[Any], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]
"""What belongs to each rank: addresses, or devices."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Place:
    rank: int
    size: int
    control: Address
    watch: Address | None
    token: str

    def links(self, within: float) -> list[Link]:
        """For rank 0, to the followers in their order; for the others, the one to rank 0. Raises LinkLate, LinkLost."""
        if self.rank:
            return [join(self.control.host, self.control.port, self.token, self.rank, "rank 0", within)]
        with listen(self.control.host, self.control.port) as listener:
            return gather(listener, self.token, range(1, self.size), within)


def place(environment: Mapping[str, str]) -> Place | None:
    """None for a process that is alone. Raises ConfigError where its variables contradict each other."""
    if RANK not in environment:
        return None
    size = _size(environment)
    rank = _whole(environment, RANK)
    if not 0 <= rank < size:
        raise ConfigError(f"{RANK} is {rank}, of a group of {size}.")
    if size == 1:
        return None
    token = environment.get(TOKEN, "")
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(
            f"Ranks know each other by {TOKEN}, the same for all and at least {SHORTEST_TOKEN} characters long: "
            f"give it to `mlx.launch` by --env, or use `ingot serve --hosts`, which makes one."
        )
    control = _address(environment, CONTROL) or _usual_control(environment)
    return Place(rank, size, control, _address(environment, WATCH), token)


def address(text: str) -> Address:
    """Of `host:port`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not 0 < int(port) < 65536:
        raise ValueError(text)
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def _address(environment: Mapping[str, str], name: str) -> Address | None:
    text = environment.get(name)
    try:
        return None if text is None else address(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, which is no host:port.") from None


def _usual_control(environment: Mapping[str, str]) -> Address:
    """At the address of rank 0 that its backend is told, where nobody says."""
    if environment.get(HOSTFILE):
        (first, *_), *_ = _listed(environment, HOSTFILE)
        return Address(address(first).host, CONTROL_PORT)
    if "NCCL_HOST_IP" in environment:
        return Address(environment["NCCL_HOST_IP"], CONTROL_PORT)
    coordinator = _address(environment, "MLX_JACCL_COORDINATOR")
    if coordinator is None:
        raise ConfigError(f"Nothing says where rank 0 is: set {CONTROL} to its host:port.")
    return Address(coordinator.host, CONTROL_PORT)


def _size(environment: Mapping[str, str]) -> int:
    """As each of MLX's backends is told it: a number, or a list of what belongs to each rank."""
    if SIZE in environment:
        return _whole(environment, SIZE)
    for name in (HOSTFILE, DEVICES):
        if environment.get(name):
            return len(_listed(environment, name))
    return 1


def _listed(environment: Mapping[str, str], name: str) -> list[list[Any]]:
    try:
        return msgspec.json.decode(Path(environment[name]).read_bytes(), type=Listed)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{name} holds no list with an entry for each rank: {error}") from error


def _whole(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(f"{name} is {environment[name]!r}, which is no number.") from None
