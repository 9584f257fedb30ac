"""llama.cpp, built from the sources inside the package `llama-cpp-python`, to measure against."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import IngotError
from ingot.models.files.progress import Progress

PACKAGE = "llama-cpp-python==0.3.36"
TARGETS = ("llama-bench", "llama-server")
FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF")
AMX_FILE = "ggml/src/ggml-cpu/amx/mmq.cpp"
KEPT = Path("~/.cache/ingot/bench")


class BuildError(IngotError):
    pass


@dataclass(frozen=True, slots=True)
class Build:
    bench: Path
    server: Path

    def measure(self, weights: Path, *, threads: int, prompt: int = 0, output: int = 0, depth: int = 0) -> float:
        """Tokens per second of one run: of a prompt, or of an answer that begins at some depth."""
        command = [self.bench, "-m", weights, "-t", threads, "-p", prompt, "-n", output, "-d", depth]
        command += ["-fa", "1", "-r", "1", "-o", "json", "-ngl", "0"]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"llama-bench failed: {done.stderr[-500:]}")
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return float(found[0]["avg_ts"])


def build(progress: Progress, folder: Path | None = None) -> Build:
    """Fetched and compiled once, which takes minutes; kept in the cache folder."""
    home = _home(folder)
    made = home / "build" / "bin"
    if not all((made / target).exists() for target in TARGETS):
        home.mkdir(parents=True, exist_ok=True)
        progress("fetching llama.cpp")
        sources = _sources(home)
        _mend(sources)
        progress("building llama.cpp, which takes minutes")
        _run(["cmake", "-S", sources, "-B", home / "build", *FLAGS])
        _run(["cmake", "--build", home / "build", "--target", *TARGETS, "-j", os.cpu_count() or 1])
    return Build(made / TARGETS[0], made / TARGETS[1])


def built_server() -> Path | None:
    """`llama-server`, if it was built."""
    server = _home(None) / "build" / "bin" / TARGETS[1]
    return server if server.exists() else None


def _home(folder: Path | None) -> Path:
    return (folder or KEPT).expanduser() / PACKAGE.replace("==", "-")


def _sources(home: Path) -> Path:
    name = PACKAGE.partition("==")[0]
    _run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, "--dest", home, PACKAGE])
    with tarfile.open(next(home.glob("*.tar.gz"))) as archive:
        archive.extractall(home, filter="data")
    return next(home.glob("*/vendor/llama.cpp"))


def _mend(sources: Path) -> None:
    """gcc 12 may drop what is stored before a tile configuration is loaded; a barrier keeps it."""
    path = sources / AMX_FILE
    if platform.machine() != "x86_64" or not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    mended = re.sub(
        r"^(\s*)(_tile_loadconfig\(&tc\);)", r'\1asm volatile("" : : "m"(tc) : "memory");\n\1\2', text, flags=re.M
    )
    path.write_text(mended, encoding="utf-8")


def _run(command: list[Any]) -> None:
    if shutil.which(command[0]) is None:
        raise BuildError(f"llama.cpp is built with {command[0]}, which is not installed")
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {(done.stderr or done.stdout)[-800:]}")
