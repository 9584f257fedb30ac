"""The operations of a decode step's graph on a GPU, counted on any machine. Views launch nothing, but the host pays for
them, too.

python -m bench.operations
python -m bench.operations --shape llama-8b --rows 8
python -m bench.operations --family qwen3
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from bench.random_models import SHAPES, build
from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig
from ingot.models.adapter import ModelAdapter, adapt_model

VIEWS = {"Reshape", "Slice", "Split", "Transpose", "ExpandDims", "Squeeze", "Broadcast", "Flatten", "Unflatten"}
"""Launch nothing where memory lies as it should."""
DEVICES = ("cuda", "metal")
NARROW = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 96}
"""How wide layers are changes nothing, but the time that this takes."""


@contextmanager
def recorded() -> Iterator[list[tuple[str, list[mx.array]]]]:
    """While this is open no kernel runs: each is written down, with its inputs, and gives zeros."""
    launched: list[tuple[str, list[mx.array]]] = []

    def launch(self: Emulator, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        launched.append((kernel.name, inputs))
        made = [mx.zeros(output.shape, output.dtype) for output in work.outputs]
        mx.eval(made)
        return made

    with patch.object(Emulator, "__call__", launch):
        yield launched


def counted(adapter: ModelAdapter, rows: int, widths: int = 1) -> Counter[str]:
    """The operations of one forward pass over so many rows of one new token each, by name."""
    states = adapter.new_batch_state()
    running = [states.new() for _ in range(rows)]
    for number, row in enumerate(running):
        mx.eval(adapter.run(states, mx.arange(3 + number), [ForwardPart((row,), 3 + number)]), states.pending())
    with recorded() as launched:
        logits = adapter.run(states, mx.zeros(rows * widths, mx.int32), [ForwardPart(tuple(running), widths)])
    kernels = Counter(name for name, _ in launched)
    return kernels + _primitives([logits, *(array for _, inputs in launched for array in inputs)])


def _primitives(roots: list[mx.array]) -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *roots)
        return Counter(re.findall(r'label ="(\w+)"', file.read_text()))


def a_layer(config: dict[str, Any], device: Device, rows: int = 1) -> Counter[str]:
    """What one more layer adds."""
    few, more = (
        counted(adapt_model(build({**config, "num_hidden_layers": layers}, dtype=mx.float16), config, device), rows)
        for layers in (2, 3)
    )
    return _as_on_gpus(more - few)


def _as_on_gpus(operations: Counter[str]) -> Counter[str]:
    """With each norm as one operation, which MLX takes apart on CPUs."""
    norm = _primitives([mx.fast.rms_norm(mx.zeros((1, 1, 64), mx.float16), mx.ones(64, mx.float16), 1e-5)])
    norms = operations["Rsqrt"]
    return operations - Counter({name: count * norms for name, count in norm.items()}) + Counter({"RMSNorm": norms})


def launches(operations: Counter[str]) -> int:
    return sum(count for name, count in operations.items() if name not in VIEWS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.operations", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--family", default=None, help="another family with layers of that shape, such as qwen3")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    arguments = parser.parse_args()
    config = {**SHAPES[arguments.shape], **NARROW}
    config["model_type"] = arguments.family or config["model_type"]
    found = a_layer(config, Device(arguments.device, "a GPU", 1), arguments.rows)
    print(f"{launches(found)} launches per layer, and {sum(found.values()) - launches(found)} views")
    for name, count in found.most_common():
        print(f"{count:4} {name}{' (a view)' if name in VIEWS else ''}")


if __name__ == "__main__":
    main()
