"""The servers that ingot is compared with, one row each: how a server is found, installed, started and recognised.

A peer lives in an environment of its own, `PEERS_FOLDER/NAME`, where `--install` puts it, or on the PATH. Its command
has its best settings as far as its sources or its documentation tell them: prefix caching on, as many sequences at once
as the load has, and its cache on disk where it has one. Words in braces are filled in where it is started:

`{program}` the program; `{model}` the folder or GGUF file; `{name}` what requests call the model; `{models}` a folder
that holds only the model; `{port}`; `{streams}` sequences at once; `{context}` tokens of a sequence and `{contexts}`
those of all; `{threads}`; `{cache}` a folder that outlives the server.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ingot.cli.peers import llama_cpp
from ingot.errors import ConfigError, IngotError
from ingot.kernels.cpu import fastblas
from ingot.models.files.progress import Progress

PEERS_FOLDER: Final = Path("~/.local/share/ingot/peers")
OURS: Final = "ingot"
Weights = Literal["folder", "gguf"]
PROBE_S: Final = 60.0
"""For a program that is asked for its version."""
FRAGILE: Final = "torchvision"
"""A package that transformers imports wherever it is found, and that does not import beside another build of torch than
its own. Peers do without it, but for some models' images."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server. `weights` are the forms of a model that it loads, the best one first. `body` are fields of its own that
    make an answer as long as it may be. `before` are commands that run beside it once it answers."""

    name: str
    program: str
    weights: tuple[Weights, ...]
    command: tuple[str, ...]
    requirements: tuple[str, ...] = ()  # from a package index
    get: str = ""  # where else it is from
    macos: bool = False  # it runs nowhere else
    mlx: bool = False  # it computes with MLX, whose CPU build wants a fast BLAS
    model: str = "default"
    ready: str = "/health"
    health: str = "/health"
    version: tuple[str, ...] = ("{program}", "--version")
    before: tuple[tuple[str, ...], ...] = ()
    after: tuple[str, ...] = ()  # what stops it, where it leaves processes behind
    environment: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)


INGOT: Final = Peer(
    name=OURS,
    program=sys.executable,
    weights=("folder", "gguf"),
    command=(
        *("{program}", "-m", "ingot", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
        *("--served-model-name", "default", "--max-sequences", "{streams}", "--cache-dir", "{cache}"),
        *("--log-level", "warning"),
    ),
    ready="/health/ready",
    version=("{program}", "-m", "ingot", "--version"),
    body={"ignore_eos": True},
)
PEERS: Final = (
    Peer(
        name="mlx_lm.server",
        program="mlx_lm.server",
        weights=("folder",),
        command=(
            *("{program}", "--model", "{model}", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "ERROR"),
            *("--decode-concurrency", "{streams}"),
        ),
        requirements=("mlx-lm",),
        mlx=True,
        model="default_model",
        version=("{python}", "mlx-lm"),
    ),
    Peer(
        name="vllm-mlx",
        program="vllm-mlx",
        weights=("folder",),
        command=(
            *("{program}", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
            *("--served-model-name", "default", "--continuous-batching", "--max-num-seqs", "{streams}"),
            *("--ssd-cache-dir", "{cache}", "--enable-auto-tool-choice", "--tool-call-parser", "auto"),
        ),
        requirements=("vllm-mlx",),
        mlx=True,
        version=("{python}", "vllm-mlx"),
    ),
    Peer(
        name="rapid-mlx",
        program="rapid-mlx",
        weights=("folder",),
        command=(
            *("{program}", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
            *("--served-model-name", "default", "--max-num-seqs", "{streams}"),
            *("--hybrid-cache-entries", "{streams}"),
        ),
        requirements=("rapid-mlx",),
        mlx=True,
        version=("{python}", "rapid-mlx"),
        environment={"DO_NOT_TRACK": "1"},
    ),
    Peer(
        name="omlx",
        program="omlx",
        weights=("folder",),
        command=(
            *("{program}", "serve", "--model-dir", "{models}", "--host", "127.0.0.1", "--port", "{port}"),
            *("--max-concurrent-requests", "{streams}", "--paged-ssd-cache-dir", "{cache}"),
        ),
        get="`brew tap jundot/omlx https://github.com/jundot/omlx && brew install omlx`",
        macos=True,
        model="{name}",
    ),
    Peer(
        name="lm-studio",
        program="lms",
        weights=("folder", "gguf"),
        command=("{program}", "server", "start", "--port", "{port}"),
        get="https://lmstudio.ai, whose app has to be started once; the model must be in its folder of models",
        model="{name}",
        ready="/v1/models",
        health="/v1/models",
        version=("{program}", "version"),
        before=(("{program}", "load", "{name}", "--identifier", "{name}", "--context-length", "{context}", "-y"),),
        after=("{program}", "server", "stop"),
    ),
    Peer(
        name="ollama",
        program="ollama",
        weights=("gguf",),
        command=("{program}", "serve"),
        get="https://ollama.com/download",
        model="{name}",
        ready="/api/version",
        health="/api/version",
        before=(("{program}", "create", "{name}", "-f", "{modelfile}"),),
        environment={
            "OLLAMA_HOST": "127.0.0.1:{port}",
            "OLLAMA_NUM_PARALLEL": "{streams}",
            "OLLAMA_CONTEXT_LENGTH": "{context}",
            "OLLAMA_KEEP_ALIVE": "-1",
            "OLLAMA_FLASH_ATTENTION": "1",
        },
    ),
    Peer(
        name="llama-server",
        program="llama-server",
        weights=("gguf",),
        command=(
            *("{program}", "-m", "{model}", "--host", "127.0.0.1", "--port", "{port}", "-t", "{threads}"),
            *("-fa", "on", "-np", "{streams}", "-c", "{contexts}", "--kv-unified", "--jinja", "--log-verbosity", "0"),
        ),
        body={"ignore_eos": True},
    ),
    Peer(
        name="vllm-metal",
        program="vllm",
        weights=("folder",),
        command=(
            *("{program}", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
            *("--served-model-name", "default", "--enable-prefix-caching", "--max-num-seqs", "{streams}"),
        ),
        get="https://github.com/vllm-project/vllm-metal, by its install.sh",
        macos=True,
        body={"ignore_eos": True},
    ),
)
PEER_NAMES: Final = tuple(peer.name for peer in PEERS)


def find_peer(name: str) -> Peer:
    return next(peer for peer in (INGOT, *PEERS) if peer.name == name)


def own_environment(peer: Peer) -> Path:
    return PEERS_FOLDER.expanduser() / peer.name


def find_program(peer: Peer) -> Path | None:
    """Where it is installed: in its own environment, then where it was built, then on the PATH."""
    if peer.name == OURS:
        return Path(sys.executable)
    own = own_environment(peer) / "bin" / peer.program
    if os.access(own, os.X_OK):
        return own
    if peer.name == "llama-server" and (built := llama_cpp.built_server()) is not None:
        return built
    found = shutil.which(peer.program)
    return None if found is None else Path(found)


def absence(peer: Peer) -> str:
    """What to say of one that was not found."""
    if peer.macos and sys.platform != "darwin":
        return "runs on macOS alone"
    if can_install(peer):
        return "not found; `--install` installs it"
    return f"not found; get it from {peer.get}"


def can_install(peer: Peer) -> bool:
    return bool(peer.requirements) or peer.name == "llama-server"


def install(peer: Peer, progress: Progress) -> None:
    """Into an environment of its own, or built from its sources. Raises IngotError."""
    if peer.name == "llama-server":
        llama_cpp.build(progress)
        return
    if not can_install(peer):
        raise ConfigError(f"{peer.name} is on no package index: get it from {peer.get}")
    folder = own_environment(peer)
    progress(f"installing {peer.name} into {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Without it, MLX's packages for Linux compute nothing.
    backend = ["mlx[cpu]"] if peer.mlx and sys.platform == "linux" and not shutil.which("nvidia-smi") else []
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "pip"), "install", "--quiet", *peer.requirements, *backend],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()[-3:]
            raise IngotError(f"{peer.name} could not be installed: {' '.join(said)[:600]}")
    programs = folder / "bin"
    if subprocess.run([programs / "python", "-c", f"import {FRAGILE}"], capture_output=True, check=False).returncode:
        subprocess.run([programs / "pip", "uninstall", "--quiet", "--yes", FRAGILE], capture_output=True, check=False)


def version_of(peer: Peer, program: Path) -> str:
    """As it says, or as its environment says; `unknown` if neither does."""
    if peer.version[0] == "{python}":
        return _distribution_version(program.resolve().parent, peer.version[1])
    command = [word.replace("{program}", str(program)) for word in peer.version]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return read_version(done.stdout + done.stderr)


def read_version(said: str) -> str:
    """The first line with a number in it, without the program's name: `0.4.1`, or `1 (unknown)`."""
    for line in said.splitlines():
        if found := re.search(r"v?\d[\w.+-]*( \([^)]+\))?", line):
            return found[0].removeprefix("v")
    return "unknown"


def _distribution_version(programs: Path, name: str) -> str:
    """With what it lacks of what it asks for, if `install` removed that."""
    script = f"""
from importlib import metadata, util
lacks = util.find_spec({FRAGILE!r}) is None and any(
    needed.startswith({FRAGILE!r}) for needed in metadata.requires({name!r}) or ()
)
print(metadata.version({name!r}) + " (without {FRAGILE})" * lacks)
"""
    python = next((each for each in (programs / "python", programs / "python3") if each.exists()), None)
    if python is None:
        return "unknown"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def fast_blas(peer: Peer) -> dict[str, str]:
    """Variables that give a peer on Linux CPUs the BLAS that ingot gives MLX, in place of a reference one that would
    decide every comparison, and as many threads for it as ingot's kernels have; empty where there is none, or MLX does
    not need it."""
    libraries = fastblas.libraries() if peer.mlx and sys.platform == "linux" else None
    if libraries is None:
        return {}
    found = {"PYTHONPATH": str(SITE), "INGOT_PEER_BLAS": os.pathsep.join(map(str, libraries))}
    return found | {"OPENBLAS_NUM_THREADS": threads()}


def threads() -> str:
    """Of every server that computes on CPUs."""
    return os.environ.get("INGOT_THREADS", str(os.cpu_count() or 1))


SITE: Final = Path(__file__).parent / "site"
"""Holds the sitecustomize.py that reads `INGOT_PEER_BLAS`."""


def modelfile(weights: Path) -> Path:
    """For Ollama, which takes a GGUF file by way of such a file."""
    with tempfile.NamedTemporaryFile("w", prefix="ingot-", suffix=".modelfile", delete=False) as file:
        file.write(f"FROM {weights}\n")
    return Path(file.name)
