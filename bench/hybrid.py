"""A hybrid model (three gated delta layers, then one of attention) on CPUs: ingot's kernels against MLX's own.

python -m bench.hybrid                        prefill and decode, each in a process of its own, alternating
python -m bench.hybrid --prompt 512 --rounds 3
python -m bench.hybrid --shape small          to see that it works
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import random_models
from bench.cpu import Figure, Model

KINDS = {"ours": {}, "plain": {"INGOT_KERNELS": "mlx"}}
BITS, GROUP = 4, 64


def _hybrid(hidden: int, inner: int, layers: int, heads: int, size: int, vocab: int) -> dict[str, Any]:
    """Qwen 3.5's: `heads` of `size` in delta layers; half as many, twice as wide, where there is attention."""
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads // 2,
        "num_key_value_heads": 2,
        "head_dim": 2 * size,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
    return {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}


SHAPES = {"0.6b": _hybrid(1024, 3584, 24, 16, 128, 32768), "small": _hybrid(256, 512, 4, 4, 64, 1024)}


def write(folder: Path, shape: str) -> None:
    """A folder with random weights of that shape, packed in 4 bits."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    model = random_models.build(SHAPES[shape])
    nn.quantize(model, group_size=GROUP, bits=BITS, class_predicate=_packable)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    packing = {"group_size": GROUP, "bits": BITS, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps({**SHAPES[shape], "quantization": packing}))


def _packable(path: str, module: Any) -> bool:
    import mlx.nn as nn

    return isinstance(module, nn.Linear | nn.Embedding) and module.weight.shape[-1] % GROUP == 0


def measured(folder: Path, kind: str, prompt: int, output: int) -> dict[str, float]:
    """Tokens per second of a fresh process that uses these kernels."""
    command = [sys.executable, "-m", "bench.hybrid", "--measure", str(folder)]
    command += ["--prompt", str(prompt), "--output", str(output)]
    said = subprocess.run(command, env={**os.environ, **KINDS[kind]}, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def _measure(folder: Path, prompt: int, output: int) -> dict[str, float]:
    import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)

    model = Model(folder)
    return {"prefill": model.prefill(prompt), "decode": model.decode(prompt, output)}


def compare(folder: Path, prompt: int, output: int, rounds: int) -> list[Figure]:
    prefill, decode = Figure(f"prefill {prompt}", [], []), Figure(f"decode at {prompt}", [], [])
    for round_ in range(rounds):
        turns = list(KINDS) if round_ % 2 == 0 else list(reversed(KINDS))
        for kind in turns:
            speeds = measured(folder, kind, prompt, output)
            for figure, speed in ((prefill, speeds["prefill"]), (decode, speeds["decode"])):
                (figure.ours if kind == "ours" else figure.theirs).append(speed)
        print(f"  round {round_ + 1} of {rounds}: done", file=sys.stderr, flush=True)
    return [prefill, decode]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.hybrid", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.6b")
    parser.add_argument("--prompt", type=int, default=64, help="tokens (default 64: MLX's own kernels take a minute)")
    parser.add_argument("--output", type=int, default=8, help="tokens")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.measure is not None:
        print(json.dumps(_measure(chosen.measure, chosen.prompt, chosen.output)))
        return 0
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as folder:
        write(Path(folder), chosen.shape)
        found = compare(Path(folder), chosen.prompt, chosen.output, chosen.rounds)
    print(f"{'tokens/s':24} {'ingot':>10} {'mlx':>10} {'ratio':>9}")
    for figure in found:
        print(figure.row())
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([{**asdict(figure), "ratio": figure.ratio} for figure in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
