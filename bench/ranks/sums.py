"""The time of a sum over all ranks, with MLX's ring.

    python -m bench.ranks sums [--ranks 2,3] [--size 576] [--sums 100] [--rounds 3]

Groups that only add, one after another, with a vector as wide as a model's hidden size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.arguments import numbers
from ingot.distributed.hosts import local_hosts, rank_environments

LIMIT_S = 120.0


def measured(ranks: int, size: int, sums: int) -> float:
    """The median of one group's sums, in milliseconds."""
    command = [sys.executable, "-m", "bench.ranks.adding", str(size), str(sums)]
    hosts = msgspec.structs.replace(local_hosts(ranks), backend="ring")
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[str]] = []
        try:
            for told in rank_environments(hosts):
                files = {name: Path(folder) / name for name in told.files}
                for name, file in files.items():
                    file.write_text(told.files[name])
                variables = {**os.environ, **told.variables, **{name: str(file) for name, file in files.items()}}
                processes.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
            return float(processes[0].communicate(timeout=LIMIT_S)[0])
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "bench.ranks sums", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=numbers, default=(2, 3))
    for name, default in (("size", 576), ("sums", 100), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args(arguments)
    for ranks in asked.ranks:
        medians = [measured(ranks, asked.size, asked.sums) for _ in range(asked.rounds)]
        print(f"{ranks} ranks, {asked.size} numbers: a sum takes {statistics.median(medians):.2f} ms", flush=True)
