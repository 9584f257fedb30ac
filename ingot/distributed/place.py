"""A process's rank in a group that runs one model, by its environment.

`mlx.launch` and our own parent process (`supervisor`) set MLX's variables. Ours adds the address of rank 0's control
channel (`INGOT_CONTROL`), that of the parent's heartbeat listener (`INGOT_WATCH`), the token that proves membership of
the group (`INGOT_GROUP_TOKEN`), and the inherited sockets on which rank 0 accepts connections (`INGOT_LISTEN`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from ingot.distributed.wire import Link, accept_ranks, connect_to_host, listen_at
from ingot.errors import ConfigError

RANK_VARIABLE: Final = "MLX_RANK"
SIZE_VARIABLE: Final = "MLX_WORLD_SIZE"
HOSTFILE_VARIABLE: Final = "MLX_HOSTFILE"
DEVICES_VARIABLE: Final = "MLX_IBV_DEVICES"
CONTROL_VARIABLE: Final = "INGOT_CONTROL"
WATCH_VARIABLE: Final = "INGOT_WATCH"
TOKEN_VARIABLE: Final = "INGOT_GROUP_TOKEN"
LISTEN_VARIABLE: Final = "INGOT_LISTEN"  # file descriptors of listening sockets
SHORTEST_TOKEN: Final = 16
CONTROL_PORT: Final = 32322  # the ring's ports follow it

PerRankList = Annotated[list[Annotated[list[Any], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]
"""The addresses or devices of each rank."""


@dataclass(frozen=True, slots=True)
class HostAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RankConfig:
    rank: int
    size: int
    control: HostAddress
    watch: HostAddress | None
    token: str

    def links(self, within: float) -> list[Link]:
        """For rank 0, to the followers in order; for a follower, the one to rank 0. Raises LinkLate, LinkLost."""
        if self.rank:
            return [connect_to_host(self.control.host, self.control.port, self.token, self.rank, "rank 0", within)]
        with listen_at(self.control.host, self.control.port) as listener:
            return accept_ranks(listener, self.token, range(1, self.size), within)


def read_rank_config(environment: Mapping[str, str]) -> RankConfig | None:
    """None for a process without a group. Raises ConfigError where its variables contradict each other."""
    if RANK_VARIABLE not in environment:
        return None
    size = _group_size(environment)
    rank = _integer_variable(environment, RANK_VARIABLE)
    if not 0 <= rank < size:
        raise ConfigError(f"{RANK_VARIABLE} is {rank}, of a group of {size}.")
    if size == 1:
        return None
    token = environment.get(TOKEN_VARIABLE, "")
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(
            f"Ranks authenticate each other by {TOKEN_VARIABLE}, the same for all and at least {SHORTEST_TOKEN} "
            f"characters long: pass it to `mlx.launch` by --env, or use `ingot serve --hosts`, which makes one."
        )
    control = _address_variable(environment, CONTROL_VARIABLE) or _default_control(environment)
    return RankConfig(rank, size, control, _address_variable(environment, WATCH_VARIABLE), token)


def parse_address(text: str) -> HostAddress:
    """From `host:port`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not 0 < int(port) < 65536:
        raise ValueError(text)
    return HostAddress(host.removeprefix("[").removesuffix("]"), int(port))


def _address_variable(environment: Mapping[str, str], name: str) -> HostAddress | None:
    text = environment.get(name)
    try:
        return None if text is None else parse_address(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, not host:port.") from None


def _default_control(environment: Mapping[str, str]) -> HostAddress:
    """By default, at the address that rank 0's backend uses."""
    if environment.get(HOSTFILE_VARIABLE):
        (first, *_), *_ = _read_per_rank_list(environment, HOSTFILE_VARIABLE)
        return HostAddress(parse_address(first).host, CONTROL_PORT)
    if "NCCL_HOST_IP" in environment:
        return HostAddress(environment["NCCL_HOST_IP"], CONTROL_PORT)
    coordinator = _address_variable(environment, "MLX_JACCL_COORDINATOR")
    if coordinator is None:
        raise ConfigError(f"The address of rank 0 is unknown: set {CONTROL_VARIABLE} to its host:port.")
    return HostAddress(coordinator.host, CONTROL_PORT)


def _group_size(environment: Mapping[str, str]) -> int:
    """By the variables of MLX's backends: a number, or a list with an entry for each rank."""
    if SIZE_VARIABLE in environment:
        return _integer_variable(environment, SIZE_VARIABLE)
    for name in (HOSTFILE_VARIABLE, DEVICES_VARIABLE):
        if environment.get(name):
            return len(_read_per_rank_list(environment, name))
    return 1


def _read_per_rank_list(environment: Mapping[str, str], name: str) -> list[list[Any]]:
    try:
        return msgspec.json.decode(Path(environment[name]).read_bytes(), type=PerRankList)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{name} holds no list with an entry for each rank: {error}") from error


def _integer_variable(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(f"{name} is {environment[name]!r}, not a number.") from None
