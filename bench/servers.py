"""Servers under measurement that are not a peer of ingot's: ingot with flags, as one of several, and a router."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ingot.cli.client import ServerClient, ServerError
from ingot.cli.peers.processes import (
    end_process,
    free_port,
    ready_url,
    start_process,
    wait_until_ready,
)

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. `model` is what its requests call the model."""

    name: str
    client: ServerClient
    model: str
    pid: int


@contextmanager
def process_running(
    command: Sequence[str], log: Path, more: Mapping[str, str] = MappingProxyType({}), folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """For as long as the block lasts."""
    process = start_process(command, log, more, folder=folder)
    try:
        yield process
    finally:
        end_process(process)


@contextmanager
def ingot(
    folder: Path | None,
    log: Path,
    streams: int,
    *,
    own_kernels: bool = False,
    flags: Sequence[str] = (),
    scratch: Path | None = None,
) -> Iterator[Running]:
    """`ingot serve`, with its defaults, which take 32 sequences at once, and `flags`, which name the models where there
    is no folder. Without its own kernels it computes with MLX's. `scratch` is where its temporary files go."""
    flags = ["--port", "0", "--log-level", "warning", *flags]
    if streams > 32:
        flags += ["--max-sequences", str(streams)]
    command = [sys.executable, "-m", "ingot", "serve", *([] if folder is None else [str(folder)]), *flags]
    more = {} if own_kernels else {"INGOT_KERNELS": "blas"}
    if scratch is not None:
        more["TMPDIR"] = str(scratch)
    with process_running(command, log, more, ROOT) as process:
        url = wait_until_ready("ingot", process, log, lambda: ready_url(log.read_text(errors="replace")))
        yield Running("ingot", ServerClient(url), "default", process.pid)


@contextmanager
def replica(folder: Path, log: Path, name: str) -> Iterator[Running]:
    """`ingot serve` as one of several that are the same to their clients."""
    flags = ["--port", "0", "--log-level", "warning", "--served-model-name", name, "--memory", "2GB"]
    with process_running([sys.executable, "-m", "ingot", "serve", str(folder), *flags], log) as process:
        url = wait_until_ready("ingot", process, log, lambda: ready_url(log.read_text(errors="replace")))
        yield Running("ingot", ServerClient(url), name, process.pid)


@contextmanager
def smg(program: Path, behind: Sequence[Running], log: Path, name: str, flags: Sequence[str]) -> Iterator[Running]:
    """The router SMG before servers of one model, once it knows all of them."""
    port, metrics = free_port(), free_port()
    told = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
    told += ["--prometheus-port", str(metrics), "--worker-urls", *(each.client.url for each in behind)]
    client = ServerClient(f"http://127.0.0.1:{port}")

    def knows_all() -> str | None:
        try:
            workers = client.get("/workers")["workers"]
        except ServerError:
            return None
        return client.url if sum(worker["is_healthy"] for worker in workers) == len(behind) else None

    with process_running([str(program), "launch", *told, *flags], log) as process:
        wait_until_ready("smg", process, log, knows_all)
        yield Running("smg", client, name, process.pid)


def send(server: Running, number: int) -> None:
    """A signal to a server."""
    os.kill(server.pid, number)
