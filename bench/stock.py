"""Plain mlx-lm on CPUs, without ingot: `python -m bench.stock FOLDER`, a process of its own.

It is slow, so few tokens are measured; if float16 is even slower, `--prompt 8 --output 2` saves minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PROMPT, OUTPUT = 128, 4


def measured(folder: Path) -> dict[str, float]:
    """Tokens per second of prefill and of decode."""
    command = [sys.executable, "-m", "bench.stock", str(folder)]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(said.stdout.splitlines()[-1])
    return found


def _measure(folder: Path, prompt: int, output: int) -> dict[str, float]:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    cache = make_prompt_cache(model)
    tokens = mx.random.randint(0, 1000, (1, prompt))
    mx.eval(model.parameters(), tokens)
    began = time.perf_counter()
    mx.eval(model(tokens, cache=cache)[:, -1])
    prompted = time.perf_counter()
    for _ in range(output):
        mx.eval(model(tokens[:, :1], cache=cache))
    ended = time.perf_counter()
    return {"prefill": prompt / (prompted - began), "decode": output / (ended - prompted)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser("bench.stock", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens to prefill (default: %(default)s)")
    parser.add_argument("--output", type=int, default=OUTPUT, help="tokens to decode (default: %(default)s)")
    chosen = parser.parse_args()
    print(json.dumps(_measure(chosen.folder, chosen.prompt, chosen.output)))
