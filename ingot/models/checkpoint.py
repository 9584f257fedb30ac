"""A checkpoint's tensors, read by their Hugging Face names and given to a module that must want exactly those."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.layers.modules import parameters

NAMED = 5
"""Tensors that an error names; of the others it says how many they are."""
OLD_NAMES = ((re.compile(r"\.gamma$"), ".weight"), (re.compile(r"\.beta$"), ".bias"))


def weight_files(folder: Path) -> list[Path]:
    """Kokoro's have a name of their own, and so have Whisper's that MLX's converters wrote."""
    patterns = ("model*.safetensors", "kokoro*.safetensors", "weights*.safetensors")
    return next((found for pattern in patterns if (found := sorted(folder.glob(pattern)))), [])


def read(folder: Path) -> dict[str, mx.array]:
    """All tensors of the weights in `folder`. Lazy: nothing is read before it is used."""
    found: dict[str, mx.array] = {}
    for file in weight_files(folder):
        try:
            loaded = mx.load(str(file))
        except RuntimeError as error:
            raise ModelError(f"{file.name} cannot be read: it is damaged or no safetensors file") from error
        assert isinstance(loaded, dict)
        found |= loaded
    if not found:
        raise ModelError(f"{folder.name} has no weights in model*.safetensors")
    return found


def renamed(tensors: Mapping[str, mx.array], *, drop: str = "") -> dict[str, mx.array]:
    """The tensors under the names of today, without the prefix `drop` where they carry it."""
    result = {}
    for name, tensor in tensors.items():
        for pattern, now in OLD_NAMES:
            name = pattern.sub(now, name)
        result[name.removeprefix(drop)] = tensor
    return result


def give(module: nn.Module, tensors: Mapping[str, mx.array], *, unneeded: Iterable[str], whose: str) -> None:
    """Load `tensors` into `module`. Raises ModelError that names what is missing, unknown or of another shape.

    `unneeded` are patterns of tensors that are known and play no part here, such as the head of a training task.
    """
    skipped = [re.compile(pattern) for pattern in unneeded]
    wanted = dict(parameters(module))
    unknown = [name for name in tensors if name not in wanted and not any(pattern.search(name) for pattern in skipped)]
    problems = [
        *_said("missing", [name for name in wanted if name not in tensors]),
        *_said("unknown", unknown),
        *_said(
            "of the wrong shape",
            [
                f"{name} {tuple(tensors[name].shape)} instead of {tuple(expected.shape)}"
                for name, expected in wanted.items()
                if name in tensors and tensors[name].shape != expected.shape
            ],
        ),
    ]
    if problems:
        raise ModelError(f"The weights of {whose} do not fit its config: {'; '.join(problems)}")
    module.load_weights([(name, tensors[name]) for name in wanted])


def _said(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"{what}: {', '.join(names[:NAMED])}{more}"]
