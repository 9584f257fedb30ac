"""How long a lazy server takes to be ready, before any model is loaded: wall time, on an idle machine, and processor
time, which other work hardly changes; for comparison, those of an empty Python. Needs /proc.

    python -m bench.lazy_start --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SERVE = "import sys; from ingot.cli.main import main; main(['serve', 'smollm2-135m', '--lazy', '--port', '0'])"
EMPTY = "print('ready:', flush=True); input()"


def seconds(program: str) -> tuple[float, float]:
    """On the wall and of the processor, until it says that it is ready."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as started:
        assert started.stdout is not None
        try:
            if not started.stdout.readline().startswith(b"ready:"):
                raise SystemExit("it did not become ready")
            wall = time.monotonic() - began
            fields = Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()
        finally:
            started.kill()
    return wall, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def medians(program: str, rounds: int) -> str:
    each = [seconds(program) for _ in range(rounds)]
    wall, processor = (statistics.median(values) for values in zip(*each, strict=True))
    return f"{wall:.2f} s, {processor:.2f} s of processor time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"an empty Python: {medians(EMPTY, rounds)}")
    print(f"a lazy server until it is ready: {medians(SERVE, rounds)}")


if __name__ == "__main__":
    main()
