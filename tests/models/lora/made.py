"""Adapters with random weights, written as mlx-lm and PEFT write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def shapes(model: Any, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers whose paths end so."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and path.endswith(tuple(names)):
            columns = module.weight.shape[1]
            packed = isinstance(module, nn.QuantizedLinear)
            found[path] = (columns * 32 // module.bits if packed else columns, module.weight.shape[0])
    return found


def matrices(sizes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> dict[str, tuple[mx.array, mx.array]]:
    made = {}
    for number, (path, (inputs, outputs)) in enumerate(sizes.items()):
        keys = mx.random.split(mx.random.key(1000 * seed + number))
        made[path] = mx.random.normal((inputs, rank), key=keys[0]), mx.random.normal((rank, outputs), key=keys[1])
    return made


def write_mlx(
    folder: Path, made: Mapping[str, tuple[mx.array, mx.array]], *, rank: int, scale: float = 0.05, **config: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    stated = {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0},
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    tensors = {f"{path}.lora_{half}": pair[index] for path, pair in made.items() for index, half in enumerate("ab")}
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    return folder


def write_peft(folder: Path, made: Mapping[str, tuple[mx.array, mx.array]], *, rank: int, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({path.rsplit(".", 1)[-1] for path in made})
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 0.4, "target_modules": names, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    tensors = {
        f"base_model.model.{path}.lora_{half}.weight": mx.contiguous(pair[index].T)
        for path, pair in made.items()
        for index, half in enumerate("AB")
    }
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    return folder
