"""The doctor's single examinations: each looks at one thing and says what it found. None imports mlx."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.config import GIB, Settings
from ingot.extras import EXTRAS, install_command, missing
from ingot.kernels import device

REQUIRED = ("mlx-lm", "transformers", "tokenizers", "safetensors", "gguf", "starlette", "uvicorn")
USES = {
    "vision": "models that see",
    "audio": "speech",
    "mcp": "tools of MCP servers",
    "events": "`--kv-events`",
    "otel": "`--otlp-traces-endpoint`",
    "bench": "plots of `ingot bench`",
}
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve")
PROBE_SECONDS = 120
LEAST_DISK = 2 * GIB
LEAST_FILES = 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """`missing`: required and not there; `note`: works, and could be better; `advice`: what to do about it."""

    name: str
    state: Literal["ok", "note", "missing"]
    detail: str
    advice: str | None = None


def python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def processor() -> Finding:
    cores = f"{os.cpu_count()} cores"
    features = ", ".join(_features())
    return Finding("processor", "ok", "; ".join(part for part in (device.cpu_name(), cores, features) if part))


def _features() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return []
    for line in cpuinfo.read_text().splitlines():
        if line.lower().startswith(("flags", "features")):
            present = set(line.partition(":")[2].split())
            return [feature for feature in FEATURES if feature in present]
    return []


def probe_mlx(model: Path | None = None) -> dict[str, Any] | str:
    """What `probe_mlx` printed, or why it could not. `model` is a folder that it looks into as well."""
    command = [sys.executable, "-m", "ingot.cli.probe_mlx", *([] if model is None else [str(model)])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"mlx did nothing for {PROBE_SECONDS} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"mlx died with code {done.returncode}"])[-1]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def mlx(probed: dict[str, Any] | str) -> Iterator[Finding]:
    if isinstance(probed, str):
        extra = "" if sys.platform == "darwin" else ", with one of its extras [cpu] and [cuda]"
        yield Finding("mlx", "missing", probed, f"install ingot again{extra}")
        return
    speed = f"{probed['gflops']:.0f} GFLOP/s in float32"
    yield Finding("mlx", "ok", f"{probed['version']} on {probed['kind']} ({probed['name']}), {speed}")
    if probed["kind"] == "cpu" and sys.platform == "linux":
        blas = "OpenBLAS" if probed["fast_blas"] else "mlx's reference BLAS (slow)"
        yield Finding("BLAS", "note" if probed["blas_advice"] else "ok", blas, probed["blas_advice"])
        kernels = probed["native"] or "none: packed weights are unpacked"
        yield Finding("native kernels", "note" if probed["native_advice"] else "ok", kernels, probed["native_advice"])
    if probed["kind"] != "cpu":
        yield _kernel("paged attention", probed["paged"], "attention gathers pages instead")
    if probed["kind"] == "cuda":
        yield _kernel("gated delta", probed["delta"], "its tokens run one after another instead")
    if "compiled" in probed:
        slower = probed["compiled_slower"]
        advice = "install CUDA's compiler (nvidia-cuda-nvrtc) and headers (nvidia-cuda-runtime) beside mlx"
        yield Finding("kernels", "note" if slower else "ok", slower or probed["compiled"], advice if slower else None)


def model(probed: dict[str, Any] | str, folder: Path) -> Iterator[Finding]:
    """What of a model in a folder runs slower than it could."""
    if isinstance(probed, str):
        return
    if not (folder / "config.json").is_file():
        yield Finding("model", "note", f"{folder} is no folder with a config.json", "give the folder of a model")
        return
    for said in probed["slower"]:
        yield Finding("model", "note", f"{folder.name}: {said}")
    if not probed["slower"]:
        yield Finding("model", "ok", f"{folder.name}: its attention runs by ingot's own modules")


def _kernel(name: str, wrong: str | None, instead: str) -> Finding:
    if wrong is None:
        return Finding(name, "ok", "right", None)
    return Finding(name, "note", f"not used: {wrong}", f"{instead}, slower; tell the project what it says here")


def nvidia(probed: dict[str, Any] | str) -> Iterator[Finding]:
    """Nothing where there is no NVIDIA GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("NVIDIA GPU", "note", f"nvidia-smi failed: {error}", "check the driver")
        return
    if done.returncode != 0:
        yield Finding("NVIDIA GPU", "note", "nvidia-smi finds no working GPU", "check the driver")
        return
    unused = isinstance(probed, dict) and probed["kind"] == "cpu"
    advice = "mlx runs on the CPU: install ingot into a fresh environment, with its extra [cuda]"
    detail = "; ".join(done.stdout.strip().splitlines())
    yield Finding("NVIDIA GPU", "note" if unused else "ok", detail, advice if unused else None)


def packages() -> Iterator[Finding]:
    for name in REQUIRED:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "not installed", install_command([name]))


def compiler(name: str, programs: Sequence[str], use: str) -> Finding:
    found = next((path for program in programs if (path := shutil.which(program))), None)
    if found is None:
        return Finding(name, "note", f"none; {use}", "apt-get install g++ (or your system's package)")
    return Finding(name, "ok", found)


def memory() -> Finding:
    total, available = device.total_memory(), device.available_memory()
    return Finding("memory", "ok", f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB")


def disk(folder: Path) -> Finding:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    detail = f"{free / GIB:.1f} GiB free for {folder}"
    if not os.access(there, os.W_OK):
        return Finding("models folder", "missing", f"{there} cannot be written", "choose another: --models-dir")
    if free < LEAST_DISK:
        return Finding("models folder", "note", detail, "make room, or choose another folder: --models-dir")
    return Finding("models folder", "ok", detail)


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{_limit(soft)} (at most {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        return Finding("open files", "note", detail, f"each client needs one: ulimit -n {LEAST_FILES}")
    return Finding("open files", "ok", detail)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def extras() -> Iterator[Finding]:
    for extra, use in USES.items():
        if wanted := missing(extra):
            lacks = ", ".join(requirement.partition(">")[0] for requirement in wanted)
            yield Finding(extra, "note", f"without {lacks}; for {use}", install_command(wanted))
        else:
            names = [requirement.partition(">")[0] for requirement in EXTRAS[extra].values()]
            yield Finding(extra, "ok", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))


def hub(settings: Settings) -> Finding:
    """Whether the model hub answers; not asked when the settings forbid the network."""
    if settings.offline:
        return Finding("model hub", "ok", "not asked: offline")
    from huggingface_hub.constants import ENDPOINT as address  # follows the user's own settings for the hub

    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=10):
            return Finding("model hub", "ok", f"{address} answers")
    except urllib.error.HTTPError as error:
        return Finding("model hub", "ok", f"{address} answers (HTTP {error.code})")
    except (OSError, ValueError) as error:
        return Finding(
            "model hub", "note", f"{address} cannot be reached: {error}", "check the network, or use --offline"
        )
