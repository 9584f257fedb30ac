"""What LoRA adapters cost: decode steps of a batch with several of them, against the model alone.

python -m bench.adapters --shape llama-8b --bits 4 --rows 16 --adapters 8 --rank 16
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from bench.random_models import SHAPES, build
from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.cpu import native
from ingot.kernels.device import current_device
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.lora.weights import LoraPair, LoraWeights
from ingot.models.precision import settle_precision

PROMPT, WARM = 64, 8


def made(shape: str, bits: int | None) -> ModelAdapter:
    here = current_device()
    model = build(SHAPES[shape], dtype=mx.float32 if here.kind == "cpu" else mx.bfloat16)
    if bits is not None:
        nn.quantize(model, bits=bits, group_size=64)
    native.use_one_path()
    settle_precision(model, here, None)
    return adapt_model(model, SHAPES[shape], here)


def drawn(model: Any, rank: int, number: int) -> LoraWeights:
    """An adapter for every linear layer inside the model's layers."""
    mx.random.seed(number)
    pairs = {}
    for path, module in model.named_modules():
        if ".layers." in path and isinstance(module, nn.Linear | nn.QuantizedLinear):
            outputs, columns = module.weight.shape
            inputs = columns * 32 // module.bits if isinstance(module, nn.QuantizedLinear) else columns
            a = mx.random.normal((inputs, rank)) / inputs**0.5
            pairs[path] = LoraPair(a, 0.1 * mx.random.normal((rank, outputs)) / rank**0.5)
    return LoraWeights(str(number), pairs, lambda path, layers: True)


def decoded(model: ModelAdapter, slots: list[int], steps: int, first: int = 0) -> tuple[float, list[list[int]]]:
    """Milliseconds a step, and each row's greedy tokens. Prompts are told by rows' numbers, from `first` on."""
    rows = model.new_batch_state()
    own = [rows.new(lora=slot) for slot in slots]
    for number, row in enumerate(own, start=first):
        prompt = mx.array([(7 * number + place) % 100 for place in range(PROMPT)], mx.uint32)
        mx.eval(model.run(rows, prompt, [ForwardPart((row,), PROMPT)], [PROMPT - 1]), rows.pending())
    token, came = mx.full(len(slots), 5, mx.uint32), []
    began = 0.0
    for step in range(WARM + steps):
        if step == WARM:
            mx.eval(token, rows.pending())
            began = time.perf_counter()
        logits = model.run(rows, token, [ForwardPart(tuple(own), 1)])
        token = mx.argmax(logits, axis=-1).astype(mx.uint32)
        came.append(token)
        mx.async_eval(token, rows.pending())
    mx.eval(token, rows.pending())
    spent = 1000 * (time.perf_counter() - began) / steps
    tokens: Any = mx.stack(came, axis=1).tolist()
    for row in own:
        rows.leave(row)
    return spent, tokens


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--shape", default="llama-150m", choices=SHAPES)
    asked.add_argument("--bits", type=int)
    asked.add_argument("--rows", type=int, default=16)
    asked.add_argument("--adapters", type=int, default=8)
    asked.add_argument("--rank", type=int, default=16)
    asked.add_argument("--steps", type=int, default=60)
    asked.add_argument(
        "--alone", type=int, default=2, help="rows whose answers are compared with those that they get alone"
    )
    given = asked.parse_args()
    model = made(given.shape, given.bits)
    base, _ = decoded(model, [0] * given.rows, given.steps)
    slots = [model.loras.add(drawn(model.model, given.rank, number)) for number in range(given.adapters)]
    each = [slots[number % len(slots)] for number in range(given.rows)]
    adapted, tokens = decoded(model, each, given.steps)
    again, _ = decoded(model, [0] * given.rows, given.steps)
    one, _ = decoded(model, each[:1], given.steps)
    lone, _ = decoded(model, [0], given.steps)
    numbers = "float" if given.bits is None else f"{given.bits}-bit"
    print(f"{given.shape} {numbers}, {given.rows} rows, {given.adapters} adapters of rank {given.rank}")
    print(f"  base {base:.2f} ms (again, with adapters loaded: {again:.2f}); adapted {adapted:.2f} ms")
    print(f"  speed relative to base {base / adapted:.2f}; one row {lone:.2f} ms, adapted {one:.2f} ms")
    print(f"  adapters take {model.loras.nbytes / 1e6:.0f} MB")
    alone = [decoded(model, [each[number]], given.steps, number)[1][0] for number in range(given.alone)]
    equal = sum(own == tokens[number] for number, own in enumerate(alone))
    print(f"  rows with the same answer alone: {equal} of {given.alone}")


if __name__ == "__main__":
    main()
