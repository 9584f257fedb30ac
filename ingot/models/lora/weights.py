"""An adapter's files, read: for each module that it is for, two thin matrices.

The files are mlx-lm's (`adapters.safetensors`) or PEFT's (`adapter_model.safetensors`), each beside an
`adapter_config.json`. What they hold and cannot be honoured is refused by name, before any of it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from ingot.errors import AdapterError
from ingot.models.lora.mlx_lm import MlxConfig
from ingot.models.lora.peft import PeftConfig

CONFIG: Final = "adapter_config.json"
MLX_WEIGHTS: Final = "adapters.safetensors"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
PICKLED: Final = ("adapter_model.bin", "adapter_model.pt", "adapters.npz")
LARGEST_CONFIG: Final = 1 << 20
_PEFT_NAME: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_MLX_NAME: Final = re.compile(r"(.+)\.lora_([ab])")


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """What is added to a product: x @ a @ b, its weight included."""

    a: mx.array  # [inputs, rank]
    b: mx.array  # [rank, outputs]

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    digest: str  # of its files
    pairs: Mapping[str, LoraPair]  # by the path of a module, as the files call it
    covers: Callable[[str, int], bool]  # whether its configuration is for a path, of a model with so many layers

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())


def read(folder: Path) -> LoraWeights:
    """Raises AdapterError with what is wrong with it, or cannot be honoured."""
    stated = _config(folder)
    if (folder / MLX_WEIGHTS).is_file() and "peft_type" not in stated:
        weights = folder / MLX_WEIGHTS
        return _mlx(MlxConfig.of(stated), _tensors(weights), _digest(folder / CONFIG, weights))
    if (folder / PEFT_WEIGHTS).is_file():
        weights = folder / PEFT_WEIGHTS
        return _peft(PeftConfig.of(stated), _tensors(weights), _digest(folder / CONFIG, weights))
    pickled = next((name for name in PICKLED if (folder / name).exists()), None)
    if pickled is not None:
        raise AdapterError(f"Its weights are in {pickled}, which may hold programs: save them as safetensors.")
    raise AdapterError(f"It has neither {PEFT_WEIGHTS} nor {MLX_WEIGHTS}.")


def _config(folder: Path) -> dict[str, Any]:
    try:
        raw = (folder / CONFIG).read_bytes()
        stated = json.loads(raw) if len(raw) <= LARGEST_CONFIG else None
    except OSError:
        raise AdapterError(f"There is no {CONFIG} that can be read.") from None
    except (ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        raise AdapterError(f"Its {CONFIG} is no JSON object.")
    return stated


def _tensors(file: Path) -> dict[str, mx.array]:
    try:
        found: Any = mx.load(str(file))
    except (RuntimeError, ValueError, OSError):
        raise AdapterError(f"Its {file.name} cannot be read: it is damaged, or no safetensors file.") from None
    return dict(found)


def _digest(*files: Path) -> str:
    whole = blake2b(digest_size=16)
    for file in files:
        raw = file.read_bytes()
        whole.update(len(raw).to_bytes(8, "little") + raw)
    return whole.hexdigest()


def _mlx(config: MlxConfig, tensors: Mapping[str, mx.array], digest: str) -> LoraWeights:
    halves = _halves(tensors, _MLX_NAME)
    pairs = {path: _pair(path, a, b, config.rank, config.scale) for path, (a, b) in halves.items()}
    return LoraWeights(digest, pairs, config.is_for)


def _peft(config: PeftConfig, tensors: Mapping[str, mx.array], digest: str) -> LoraWeights:
    halves = _halves(tensors, _PEFT_NAME)
    pairs = {
        path: _pair(path, a.T, b.T, config.rank_of(path), config.scale_of(path)) for path, (a, b) in halves.items()
    }
    return LoraWeights(digest, pairs, lambda path, layers: config.is_for(path))


def _halves(tensors: Mapping[str, mx.array], names: re.Pattern[str]) -> dict[str, tuple[mx.array, mx.array]]:
    found: dict[str, dict[str, mx.array]] = {}
    for name, tensor in tensors.items():
        matched = names.fullmatch(name)
        if matched is None:
            raise AdapterError(f"It holds {name[:200]}, which is no part of a plain LoRA of a linear layer.")
        if tensor.ndim != 2:
            raise AdapterError(f"{matched[1][:200]}: it adapts experts, which cannot be served.")
        found.setdefault(matched[1], {})[matched[2].lower()] = tensor
    if not found:
        raise AdapterError("It holds no weights.")
    for path, own in found.items():
        if len(own) != 2:
            raise AdapterError(f"{path[:200]}: one of its two matrices is missing.")
    return {path: (own["a"], own["b"]) for path, own in found.items()}


def _pair(path: str, a: mx.array, b: mx.array, rank: int, scale: float) -> LoraPair:
    if not a.shape[1] == b.shape[0] == rank:
        raise AdapterError(
            f"{path[:200]}: its matrices are of rank {a.shape[1]} and {b.shape[0]}, but its configuration says {rank}."
        )
    return LoraPair(a, b.astype(mx.float32) * scale)
