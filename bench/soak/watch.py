"""The server seen from outside, while clients keep it busy and afterwards."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.soak.acts import Fault, Person
from bench.soak.trend import Trend, trend

REST_S: Final = 60.0
"""What a server gets to end whatever runs, once nobody asks for more."""
FIGURES_S: Final = 3.0
"""After so long an idle server has measured its memory anew."""
LEFT: Final = 1.1
"""How many times the memory of a fresh server one may use that holds nothing."""
TROUBLE: Final = re.compile(r"^(?=.*(?:\bERROR\b|\bCRITICAL\b|Traceback|books wrong)).*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sight:
    """`resident` and `active` are bytes: the process's, and what MLX has of them."""

    at: float
    resident: int
    active: float
    files: int
    threads: int
    running: float


@dataclass
class Watch:
    """Of one server, by its administrator."""

    admin: Person
    pid: int
    seen: list[Sight] = field(default_factory=list)

    def look(self) -> Sight:
        told, process = self.metrics(), Path(f"/proc/{self.pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        sight = Sight(
            at=time.monotonic(),
            resident=int(status["VmRSS"].split()[0]) * 1024,
            active=max(told['ingot_memory_bytes{part="active"}']),
            files=sum(1 for _ in (process / "fd").iterdir()),
            threads=int(status["Threads"]),
            running=sum(told["vllm:num_requests_running"] + told["vllm:num_requests_waiting"]),
        )
        self.seen.append(sight)
        return sight

    def metrics(self) -> dict[str, list[float]]:
        return figures(self.admin.told("/metrics", None, method="GET").raw.decode())

    def trend(self, of: Callable[[Sight], float]) -> Trend:
        return trend([sight.at for sight in self.seen], [of(sight) for sight in self.seen])

    def left_over(self, everyone: list[Person], beside: Sequence[str]) -> Iterator[str]:
        """What is wrong with a server that nobody asks any more, once the models `beside` the first are unloaded."""
        deadline = time.monotonic() + REST_S
        while self.look().running and time.monotonic() < deadline:
            time.sleep(0.2)
        if self.seen[-1].running:
            yield f"{self.seen[-1].running:.0f} requests still run after {REST_S:.0f} s"
        last = [(self.admin, f"/v1/models/{name}/unload", "POST") for name in beside]
        for person, path, method in [*last, *((person, "/v1/cache", "DELETE") for person in everyone)]:
            try:
                person.told(path, None, method=method)
            except Fault as fault:
                yield str(fault)
        time.sleep(FIGURES_S)
        told = self.metrics()
        begun, ended = self.seen[0].active, max(told['ingot_memory_bytes{part="active"}'])
        if ended > LEFT * begun:
            yield f"MLX has {ended / 1e6:.1f} MB in use when nothing is kept, and had {begun / 1e6:.1f} MB at the start"
        for name in ("vllm:kv_cache_usage_perc", 'ingot_memory_bytes{part="states_held"}'):
            if any(told[name]):
                yield f"{name} is {max(told[name]):g} when nothing runs and nothing is kept"


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
