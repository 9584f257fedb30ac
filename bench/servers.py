"""Servers under measurement: each a process of its own on a loopback port, for as long as a `with` block lasts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ingot.cli.client import ServerClient, ServerError

START_S = 300.0
POLL_S = 0.1
STOP_S = 15.0
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. `model` is what its requests call the model."""

    name: str
    client: ServerClient
    model: str
    pid: int


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
    is no folder. Without its own kernels it computes with MLX's, as the servers do that it is compared with. `scratch`
    is where its temporary files go."""
    flags = ["--port", "0", "--log-level", "warning", *flags]
    if streams > 32:
        flags += ["--max-sequences", str(streams)]
    command = [sys.executable, "-m", "ingot", "serve", *([] if folder is None else [str(folder)]), *flags]
    more = {} if own_kernels else {"INGOT_KERNELS": "blas"}
    if scratch is not None:
        more["TMPDIR"] = str(scratch)
    with _process(command, log, more) as process:
        url = _wait("ingot", process, log, lambda: ready_url(log.read_text(errors="replace")))
        yield Running("ingot", ServerClient(url), "default", process.pid)


@contextmanager
def replica(folder: Path, log: Path, name: str) -> Iterator[Running]:
    """`ingot serve` as one of several that are the same to their clients."""
    flags = ["--port", "0", "--log-level", "warning", "--served-model-name", name, "--memory", "2GB"]
    with _process([sys.executable, "-m", "ingot", "serve", str(folder), *flags], log) as process:
        url = _wait("ingot", process, log, lambda: ready_url(log.read_text(errors="replace")))
        yield Running("ingot", ServerClient(url), name, process.pid)


@contextmanager
def smg(program: Path, behind: Sequence[Running], log: Path, name: str, flags: Sequence[str]) -> Iterator[Running]:
    """The router SMG before servers of one model, once it knows all of them."""
    port, metrics = _free_port(), _free_port()
    told = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
    told += ["--prometheus-port", str(metrics), "--worker-urls", *(each.client.url for each in behind)]
    client = ServerClient(f"http://127.0.0.1:{port}")

    def knows_all() -> str | None:
        try:
            workers = client.get("/workers")["workers"]
        except ServerError:
            return None
        return client.url if sum(worker["is_healthy"] for worker in workers) == len(behind) else None

    with _process([str(program), "launch", *told, *flags], log) as process:
        _wait("smg", process, log, knows_all)
        yield Running("smg", client, name, process.pid)


def send(server: Running, number: int) -> None:
    """A signal to a server."""
    os.kill(server.pid, number)


@contextmanager
def mlx_lm(folder: Path, log: Path, streams: int) -> Iterator[Running]:
    """`mlx_lm.server`, quiet, and allowed to decode all streams together. It prefills eight prompts at a time, its
    default: more make each of them wait for all, and one alone is slower where a step costs more than its tokens."""
    port = _free_port()
    flags = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR"]
    flags += ["--decode-concurrency", str(max(streams, 32))]
    client = ServerClient(f"http://127.0.0.1:{port}")
    with _process([sys.executable, "-m", "bench.mlx_lm_launcher", *flags], log) as process:
        _wait("mlx_lm.server", process, log, lambda: _answers(client))
        yield Running("mlx_lm.server", client, "default_model", process.pid)


@contextmanager
def llama_cpp(program: Path, weights: Path, log: Path, streams: int, threads: int) -> Iterator[Running]:
    """`llama-server` with a slot of 1,024 tokens for each stream, and flash attention."""
    port = _free_port()
    flags = ["-m", str(weights), "--host", "127.0.0.1", "--port", str(port), "-t", str(threads), "-fa", "on"]
    flags += ["-np", str(streams), "-c", str(1024 * streams), "--no-warmup", "-ngl", "0"]
    client = ServerClient(f"http://127.0.0.1:{port}")
    with _process([str(program), *flags], log) as process:
        _wait("llama-server", process, log, lambda: _answers(client))
        yield Running("llama-server", client, "default", process.pid)


@contextmanager
def vllm_mlx(program: Path, folder: Path, log: Path) -> Iterator[Running]:
    """`vllm-mlx serve`, from an environment of its own, with its defaults, which keep prefixes."""
    port = _free_port()
    flags = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "default"]
    client = ServerClient(f"http://127.0.0.1:{port}")
    with _process([str(program), *flags], log) as process:
        _wait("vllm-mlx", process, log, lambda: _answers(client))
        yield Running("vllm-mlx", client, "default", process.pid)


def ready_url(said: str) -> str | None:
    """The address in ingot's ready line, once it is there."""
    found = re.search(r"^ready: (\S+)", said, re.MULTILINE)
    return found[1] if found else None


def environment() -> dict[str, str]:
    """This process's, without what would set ingot up differently; threads and instruction set hold for all."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INGOT_")}
    machine = {name: value for name, value in os.environ.items() if name in ("INGOT_THREADS", "INGOT_ISA")}
    return kept | machine | {"INGOT_CONFIG": os.devnull}


@contextmanager
def _process(
    command: Sequence[str], log: Path, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment() | dict(more),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(name: str, process: subprocess.Popen[bytes], log: Path, ready: Callable[[], str | None]) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := ready():
            return found
        time.sleep(POLL_S)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise ServerError(f"{name} did not start; the end of what it said:\n{last}")


def _answers(client: ServerClient) -> str | None:
    try:
        client.get("/health")
    except ServerError:
        return None
    return client.url


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
