"""The machines that run a model together, MLX's environment on each, and a rank's process there.

Hostfiles are as `mlx.launch` reads them. A rank is started here or over ssh, gets its assignment over standard input,
never on a command line, and is killed with all that it started. Its standard input stays open for as long as the parent
lives: by its end a rank notices, wherever it runs, that the parent is gone. Never imports mlx.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.metadata
import ipaddress
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ingot.distributed.heartbeat import ORPHANED
from ingot.distributed.place import DEVICES_VARIABLE, HOSTFILE_VARIABLE, RANK_VARIABLE, SIZE_VARIABLE
from ingot.errors import ConfigError

BACKENDS: Final = ("ring", "nccl", "jaccl", "jaccl-ring")
LOOPBACK: Final = "127.0.0.1"
MOST_RANKS: Final = 64
RING_PORT: Final = 32323  # and those that follow, as `mlx.launch` has it
NCCL_PORT: Final = 12345
THREADS_VARIABLE: Final = "INGOT_THREADS"


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ssh` is its name for ssh, `ips` are its addresses for the other hosts, `rdma` the device to each of them;
    `python` is the interpreter that has ingot, if it is elsewhere than here."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    python: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return any(_is_own(name) for name in (self.ssh, *self.ips))


class Hosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hosts of all ranks, in order. A host may have several ranks."""

    hosts: tuple[Host, ...]
    backend: str = ""
    envs: tuple[str, ...] = ()

    @property
    def are_here(self) -> bool:
        return all(host.is_here for host in self.hosts)

    @property
    def address(self) -> str:
        """Where the others reach the first host."""
        return LOOPBACK if self.are_here else self.hosts[0].ips[0]

    @property
    def variables(self) -> dict[str, str]:
        """What the hostfile sets for every rank."""
        return dict(_split_variable(each) for each in self.envs)


class RankEnvironment(msgspec.Struct, frozen=True):
    """Variables for MLX on a rank, and files whose paths are put in variables."""

    variables: Mapping[str, str]
    files: Mapping[str, str] = {}


def parse_hosts(text: str) -> Hosts:
    """From a number of ranks on this machine, or the path of a hostfile. Raises ConfigError."""
    return local_hosts(int(text)) if text.isdecimal() else read_hosts(Path(text).expanduser())


def local_hosts(count: int) -> Hosts:
    if not 1 <= count <= MOST_RANKS:
        raise ConfigError(f"{count} ranks: there can be 1 to {MOST_RANKS} of them", param="hosts")
    return Hosts((Host(LOOPBACK, (LOOPBACK,)),) * count)


def read_hosts(path: Path) -> Hosts:
    """Raises ConfigError, also where the first host is not this machine, which serves."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert({"hosts": content} if isinstance(content, list) else content, Hosts)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="hosts") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no hostfile: {error}", param="hosts") from error
    problem = _hosts_problem(found)
    if problem is not None:
        raise ConfigError(f"{path}: {problem}", param="hosts")
    return found


def _hosts_problem(hosts: Hosts) -> str | None:
    if not 1 <= len(hosts.hosts) <= MOST_RANKS:
        return f"{len(hosts.hosts)} hosts: there can be 1 to {MOST_RANKS} of them"
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
        if not _split_variable(each)[0].replace("_", "a").isalnum():
            return f"{each!r} in envs is not NAME=VALUE"
    if not hosts.hosts[0].is_here:
        return f"the first host, {hosts.hosts[0].ssh}, is not this machine: start ingot there, or list this one first"
    if hosts.backend.startswith("jaccl") and any(len(host.rdma) != len(hosts.hosts) for host in hosts.hosts):
        return "jaccl needs an rdma device of every host to every other one, and null to itself"
    return None


def rank_environments(hosts: Hosts) -> list[RankEnvironment]:
    """For each rank what its backend reads, as `mlx.launch` would set it."""
    backend = hosts.backend or default_backend()
    size = len(hosts.hosts)
    shared: dict[str, str] = {SIZE_VARIABLE: str(size)}
    files: dict[str, str] = {}
    if backend == "ring":
        files[HOSTFILE_VARIABLE] = json.dumps(_ring_addresses(hosts))
    elif backend == "nccl":
        shared |= {"NCCL_HOST_IP": hosts.hosts[0].ips[0], "NCCL_PORT": str(NCCL_PORT)}
    else:
        files[DEVICES_VARIABLE] = json.dumps([host.rdma for host in hosts.hosts])
        shared["MLX_JACCL_COORDINATOR"] = f"{hosts.hosts[0].ips[0]}:{RING_PORT}"
        if backend == "jaccl-ring":
            shared["MLX_JACCL_RING"] = "1"
    environments = []
    before: Counter[str] = Counter()
    for rank, host in enumerate(hosts.hosts):
        own = {RANK_VARIABLE: str(rank)}
        if backend == "nccl":
            own["CUDA_VISIBLE_DEVICES"] = str(before[host.ssh])
        before[host.ssh] += 1
        environments.append(RankEnvironment(_thread_variables(hosts) | hosts.variables | shared | own, files))
    return environments


def _thread_variables(hosts: Hosts) -> dict[str, str]:
    """Ranks on one machine share its cores by default: threads that wait for a core delay all ranks."""
    if not hosts.are_here or THREADS_VARIABLE in os.environ:
        return {}
    return {THREADS_VARIABLE: str(max(1, usable_cores() // len(hosts.hosts)))}


def usable_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ring_addresses(hosts: Hosts) -> list[list[str]]:
    """Where each rank listens: on this machine at free ports, on others at fixed ones, as they cannot be asked."""
    ips = [ip for host in hosts.hosts for ip in host.ips]
    ports = iter(free_ports(len(ips)) if hosts.are_here else range(RING_PORT, RING_PORT + len(ips)))
    return [[f"{ip}:{next(ports)}" for ip in host.ips] for host in hosts.hosts]


def free_ports(count: int, host: str = LOOPBACK) -> Sequence[int]:
    """Ports that are free at the moment."""
    with contextlib.ExitStack() as taken:
        listening = [taken.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in listening]


def default_backend() -> str:
    """As for `mlx.launch`: nccl where MLX is built for NVIDIA GPUs, else ring."""
    for package in ("mlx-cuda-13", "mlx-cuda-12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(package)
            return "nccl"
    return "ring"


def _split_variable(text: str) -> tuple[str, str]:
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


RANK_COMMAND: Final = ("-P", "-m", "ingot.cli.rank")
SSH_COMMAND: Final = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"),
)
PASSED_ON: Final = ("INGOT_", "MLX_", "HF_")  # prefixes of variables that are passed to other machines, too
KILL_S: Final = 5.0


class RankAssignment(msgspec.Struct, frozen=True):
    """The arguments of `ingot serve`, variables, and files whose paths are put in variables."""

    arguments: Sequence[str]
    variables: Mapping[str, str]
    files: Mapping[str, str]


class RankProcess:
    """Owns the process. To be made by a thread that lives as long as the parent."""

    def __init__(
        self, host: Host, assignment: RankAssignment, inherited: Sequence[int], command: Sequence[str]
    ) -> None:
        """`inherited` are open files that a rank on this machine gets, under their numbers."""
        self.host = host
        self.is_here = host.is_here
        if not self.is_here:
            passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
            assignment = msgspec.structs.replace(assignment, variables=passed | dict(assignment.variables))
        self._process = subprocess.Popen(
            [sys.executable, *command] if self.is_here else ssh_command_line(host, command),
            stdin=subprocess.PIPE,
            pass_fds=tuple(inherited),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once, which is noticed elsewhere
            self._process.stdin.write(msgspec.json.encode(assignment) + b"\n")
            self._process.stdin.flush()

    def wait(self, within: float | None = None) -> int:
        """Its exit code, negative for a signal. Raises TimeoutError."""
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self, remote_pid: int = 0) -> None:
        """With all that it started; on another machine, too, where its pid there is known."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone, or about to be
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if not self.is_here and remote_pid:
            _kill_remote(self.host, remote_pid)


def ssh_command_line(host: Host, command: Sequence[str]) -> list[str]:
    """In the parent's working directory, if it exists there: models may be named by relative paths."""
    python = host.python or sys.executable
    folder = shlex.quote(str(Path.cwd()))
    return [*SSH_COMMAND, host.ssh, f"cd {folder} 2>/dev/null; exec {shlex.join((python, *command))}"]


def _kill_remote(host: Host, pid: int) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*SSH_COMMAND, host.ssh, f"kill -9 {pid}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=KILL_S,
            check=False,
        )


PR_SET_PDEATHSIG: Final = 1


def read_rank_assignment() -> RankAssignment:
    """From the parent, with its variables set and its files written. To be called first, by the main thread."""
    if sys.platform == "linux":  # elsewhere the end of the parent's pipe has to do
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(ORPHANED)
    assignment = msgspec.json.decode(line, type=RankAssignment)
    os.environ.update(assignment.variables)
    for name, content in assignment.files.items():
        os.environ[name] = _write_private_file(content)
    threading.Thread(target=_end_with_parent, name="ingot-parent", daemon=True).start()
    return assignment


def _write_private_file(content: str) -> str:
    """The path of a file for this process alone; on Linux it vanishes with the process."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("ingot-rank")
        path = f"/proc/self/fd/{descriptor}"
    else:
        descriptor, path = tempfile.mkstemp(prefix="ingot-rank-")
        atexit.register(os.unlink, path)
    os.write(descriptor, content.encode())
    return path


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(ORPHANED)
