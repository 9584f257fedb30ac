"""The server seen from outside, while clients keep it busy and afterwards."""

from __future__ import annotations

import os
import re
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.soak.acts import Fault, Person

REST_S: Final = 60.0
"""What a server gets to end whatever runs, once nobody asks for more."""
FIGURES_S: Final = 3.0
"""After so long an idle server has measured its memory anew."""
LEFT: Final = 1.1
"""How many times the memory of a fresh server one may use that holds nothing."""
LINKS: Final = ("mlx",)
"""Folders of temporary files that are kept for the next process."""
ACTIVE: Final = 'ingot_memory_bytes{part="active"}'
HELD: Final = 'ingot_memory_bytes{part="states_held"}'
TROUBLE: Final = re.compile(r"^(?=.*(?:\bERROR\b|\bCRITICAL\b|Traceback|books wrong)).*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sight:
    """Bytes of the server's process and of its `children`; of what MLX has in use and of the KV memory in there that
    requests or cached prefixes hold, 0 where no model is loaded; and of what a GPU's driver says is taken."""

    at: float
    resident: int
    children: int
    active: float
    held: float
    device: int
    files: int
    threads: int
    temporary: int
    running: float


@dataclass
class Watch:
    """Of one server, by its administrator. `scratch` is its folder for temporary files. Needs /proc."""

    admin: Person
    pid: int
    scratch: Path
    seen: list[Sight] = field(default_factory=list)

    def note(self) -> None:
        self.seen.append(self.look())

    def look(self) -> Sight:
        """Raises Fault or OSError where there is no server any more."""
        told, process = self.metrics(), Path(f"/proc/{self.pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return Sight(
            at=time.monotonic(),
            resident=int(status["VmRSS"].split()[0]) * 1024,
            children=resident_children(self.pid),
            active=max(told.get(ACTIVE, [0.0])),
            held=sum(told.get(HELD, [0.0])),
            device=taken_on_device(),
            files=sum(1 for _ in (process / "fd").iterdir()),
            threads=int(status["Threads"]),
            temporary=sum(len(folders) + len(files) for _, folders, files in os.walk(self.scratch)) - len(LINKS),
            running=sum(sum(told.get(f"vllm:num_requests_{state}", ())) for state in ("running", "waiting")),
        )

    def metrics(self) -> dict[str, list[float]]:
        return figures(self.admin.told("/metrics", None, method="GET").raw.decode())

    def left_over(self, everyone: list[Person], beside: Sequence[str]) -> Iterator[str]:
        """What is wrong with a server that nobody asks any more, once the models `beside` the first are unloaded."""
        deadline = time.monotonic() + REST_S
        while (running := self.look().running) and time.monotonic() < deadline:
            time.sleep(0.2)
        if running:
            yield f"{running:.0f} requests still run after {REST_S:.0f} s"
        last = [(self.admin, f"/v1/models/{name}/unload", "POST") for name in beside]
        for person, path, method in [*last, *((person, "/v1/cache", "DELETE") for person in everyone)]:
            try:
                person.told(path, None, method=method)
            except Fault as fault:
                yield str(fault)
        time.sleep(FIGURES_S)
        told = self.metrics()
        if ACTIVE not in told:
            yield "the pinned model reports no memory: it is not loaded any more"
            return
        begun, ended = self.seen[0].active, max(told[ACTIVE])
        if ended > LEFT * begun:
            yield f"MLX has {ended / 1e6:.1f} MB in use when nothing is kept, and had {begun / 1e6:.1f} MB at the start"
        for name in ("vllm:kv_cache_usage_perc", HELD):
            if any(told[name]):
                yield f"{name} is {max(told[name]):g} when nothing runs and nothing is kept"


def make_scratch(folder: Path) -> Path:
    """A folder for a server's temporary files, without the kernels that MLX compiles and keeps."""
    scratch = folder / "scratch"
    scratch.mkdir()
    for name in LINKS:
        kept = Path(tempfile.gettempdir()) / name
        kept.mkdir(exist_ok=True)
        (scratch / name).symlink_to(kept)
    return scratch


def resident_children(pid: int) -> int:
    """Bytes of all processes below one."""
    below: dict[int, list[int]] = {}
    pages: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            below.setdefault(int(fields[1]), []).append(child := int(stat.parent.name))
            pages[child] = int(fields[21])
    family = [pid]
    for each in family:
        family += below.get(each, ())
    return sum(pages[child] for child in family[1:]) * resource.getpagesize()


def taken_on_device() -> int:
    """Bytes, as the driver of the GPU says; 0 where there is none or it says nothing."""
    import mlx.core as mx

    info = mx.device_info()
    return int(info["total_memory"]) - int(info["free_memory"]) if info.get("free_memory") else 0


def figures(exposed: str) -> dict[str, list[float]]:
    """What `/metrics` says, by name and the labels besides the model's and the engine's: a figure for each model."""
    found: dict[str, list[float]] = {}
    for line in exposed.splitlines():
        if not line.startswith("#"):
            name, at = line.rsplit(" ", 1)
            plain = re.sub(r'(?:model_name|engine)="[^"]*",?', "", name).replace("{}", "")
            found.setdefault(plain, []).append(float(at))
    return found


def complaints(log: str) -> list[str]:
    """Lines of a log that no server in health writes."""
    return TROUBLE.findall(log)
