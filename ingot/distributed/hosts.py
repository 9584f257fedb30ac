"""Which machines run a model together, and what MLX has to be told on each: hostfiles as `mlx.launch` reads them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import ipaddress
import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ingot.distributed.place import DEVICES, HOSTFILE, RANK, SIZE
from ingot.errors import ConfigError

BACKENDS: Final = ("ring", "nccl", "jaccl", "jaccl-ring")
LOOPBACK: Final = "127.0.0.1"
MOST: Final = 64
RING_PORT: Final = 32323  # and those that follow, as `mlx.launch` has it
NCCL_PORT: Final = 12345
THREADS: Final = "INGOT_THREADS"


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ssh` is what it is called there, `ips` are its addresses for the others, `rdma` the device to each of them;
    `python` is the interpreter that has ingot, where it lies elsewhere than here."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    python: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return any(_is_own(name) for name in (self.ssh, *self.ips))


class Hosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks' hosts, in their order. A host may have several."""

    hosts: tuple[Host, ...]
    backend: str = ""
    envs: tuple[str, ...] = ()

    @property
    def are_here(self) -> bool:
        return all(host.is_here for host in self.hosts)

    @property
    def address(self) -> str:
        """Where the others reach the first one."""
        return LOOPBACK if self.are_here else self.hosts[0].ips[0]

    @property
    def variables(self) -> dict[str, str]:
        """What the hostfile sets for every rank."""
        return dict(_variable(each) for each in self.envs)


class Told(msgspec.Struct, frozen=True):
    """What MLX is told on a rank: variables, and files whose paths are to be put in variables."""

    variables: Mapping[str, str]
    files: Mapping[str, str] = {}


def hosts_of(text: str) -> Hosts:
    """Of a number of ranks on this machine, or the path of a hostfile. Raises ConfigError."""
    return local_hosts(int(text)) if text.isdecimal() else read_hosts(Path(text).expanduser())


def local_hosts(count: int) -> Hosts:
    if not 1 <= count <= MOST:
        raise ConfigError(f"{count} ranks: there can be 1 to {MOST} of them", param="hosts")
    return Hosts((Host(LOOPBACK, (LOOPBACK,)),) * count)


def read_hosts(path: Path) -> Hosts:
    """Raises ConfigError, also where the first host is another machine: this one serves."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert({"hosts": said} if isinstance(said, list) else said, Hosts)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="hosts") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no hostfile: {error}", param="hosts") from error
    problem = _problem(found)
    if problem is not None:
        raise ConfigError(f"{path}: {problem}", param="hosts")
    return found


def _problem(hosts: Hosts) -> str | None:
    if not 1 <= len(hosts.hosts) <= MOST:
        return f"{len(hosts.hosts)} hosts: there can be 1 to {MOST} of them"
    if hosts.backend and hosts.backend not in BACKENDS:
        return f"backend {hosts.backend!r} is none of {', '.join(BACKENDS)}"
    for host in hosts.hosts:
        if not host.ssh or host.ssh.startswith("-"):
            return f"{host.ssh!r} is no name of a host"
        if not host.ips:
            return f"{host.ssh} has no ips: the others have to reach it"
        for ip in host.ips:
            if not _is_ip(ip):
                return f"{ip!r} of {host.ssh} is no address"
    for each in hosts.envs:
        if not _variable(each)[0].replace("_", "a").isalnum():
            return f"{each!r} in envs is not NAME=VALUE"
    if not hosts.hosts[0].is_here:
        return f"the first host, {hosts.hosts[0].ssh}, is not this machine: start ingot there, or list this one first"
    if hosts.backend.startswith("jaccl") and any(len(host.rdma) != len(hosts.hosts) for host in hosts.hosts):
        return "jaccl needs an rdma device of every host to every other one, and null to itself"
    return None


def told_to(hosts: Hosts) -> list[Told]:
    """For each rank what its backend reads, as `mlx.launch` would say it."""
    backend = hosts.backend or usual_backend()
    size = len(hosts.hosts)
    shared: dict[str, str] = {SIZE: str(size)}
    files: dict[str, str] = {}
    if backend == "ring":
        files[HOSTFILE] = json.dumps(_ring(hosts))
    elif backend == "nccl":
        shared |= {"NCCL_HOST_IP": hosts.hosts[0].ips[0], "NCCL_PORT": str(NCCL_PORT)}
    else:
        files[DEVICES] = json.dumps([host.rdma for host in hosts.hosts])
        shared["MLX_JACCL_COORDINATOR"] = f"{hosts.hosts[0].ips[0]}:{RING_PORT}"
        if backend == "jaccl-ring":
            shared["MLX_JACCL_RING"] = "1"
    told = []
    before: Counter[str] = Counter()
    for rank, host in enumerate(hosts.hosts):
        own = {RANK: str(rank)}
        if backend == "nccl":
            own["CUDA_VISIBLE_DEVICES"] = str(before[host.ssh])
        before[host.ssh] += 1
        told.append(Told(_threads(hosts) | hosts.variables | shared | own, files))
    return told


def _threads(hosts: Hosts) -> dict[str, str]:
    """Ranks on one machine share its cores, where nobody says otherwise: threads that wait for a core hold up all."""
    if not hosts.are_here or THREADS in os.environ:
        return {}
    return {THREADS: str(max(1, usable_cores() // len(hosts.hosts)))}


def usable_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ring(hosts: Hosts) -> list[list[str]]:
    """Where each rank listens. On one machine ports are taken that are free now; others cannot be asked."""
    ips = [ip for host in hosts.hosts for ip in host.ips]
    ports = iter(free_ports(len(ips)) if hosts.are_here else range(RING_PORT, RING_PORT + len(ips)))
    return [[f"{ip}:{next(ports)}" for ip in host.ips] for host in hosts.hosts]


def free_ports(count: int, host: str = LOOPBACK) -> Sequence[int]:
    """That nobody listens at, at the moment."""
    with contextlib.ExitStack() as taken:
        listening = [taken.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in listening]


def usual_backend() -> str:
    """What `mlx.launch` takes where nobody says: nccl where MLX is built for NVIDIA's GPUs."""
    for package in ("mlx-cuda-13", "mlx-cuda-12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(package)
            return "nccl"
    return "ring"


def _variable(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _is_ip(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


def _is_own(name: str) -> bool:
    """An address is this machine's where one can listen at it."""
    if name in ("localhost", socket.gethostname()):
        return True
    if not _is_ip(name):
        return False
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind((name, 0))
        return True
    return False
