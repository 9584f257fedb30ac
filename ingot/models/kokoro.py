"""Kokoro's weights under the names of its checkpoints: PyTorch's, as safetensors, and those that mlx-audio writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models import checkpoint
from ingot.models.kokoro_convolutions import Convolution, Doubling, Lengthening

RENAMED = (
    (re.compile(r"\.module\."), "."),
    (re.compile(r"\.gamma$"), ".weight"),
    (re.compile(r"\.beta$"), ".bias"),
    (re.compile(r"\.W([xh])_forward$"), lambda found: f".weight_{'ih' if found[1] == 'x' else 'hh'}_l0"),
    (re.compile(r"\.W([xh])_backward$"), lambda found: f".weight_{'ih' if found[1] == 'x' else 'hh'}_l0_reverse"),
    (re.compile(r"\.bias_(ih|hh)_forward$"), r".bias_\1_l0"),
    (re.compile(r"\.bias_(ih|hh)_backward$"), r".bias_\1_l0_reverse"),
)
UNNEEDED = (
    r"position_ids$",
    r"^bert\.pooler\.",
    r"\.norm\.(weight|bias)$",
    r"^bert\..*attention\.(full|output)_dropout",
)


def load_weights(model: nn.Module, folder: Path, packing: Mapping[str, Any]) -> None:
    """Raises ModelError that names what is missing, unknown or of another shape."""
    found = {_renamed(name): tensor for name, tensor in _unpacked(checkpoint.read(folder), packing, folder).items()}
    filters = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Convolution | Lengthening | Doubling)
    }
    for name, module in filters.items():
        for key in (f"{name}.weight", f"{name}.weight_v"):
            if key in found:
                found[key] = _with_taps_last(found[key], module)
    found = _multiplied(found)
    for name, module in filters.items():
        key = f"{name}.weight"
        if key in found and found[key].ndim == 3:
            found[key] = mx.contiguous(module.arranged(found[key]))
    for key in [name for name in found if name.endswith(".conv1x1.weight")]:
        found[key] = found[key].reshape(found[key].shape[0], -1)
    checkpoint.give(model, found, unneeded=UNNEEDED, whose=folder.name)


def load_voice(file: Path, width: int) -> mx.array:
    """Styles by the number of phonemes, [lengths, width]. Raises ModelError."""
    try:
        read = mx.load(str(file))
    except RuntimeError as error:
        raise ModelError(f"The voice {file.name} cannot be read: it is damaged or no safetensors file") from error
    assert isinstance(read, dict)
    if len(read) != 1:
        raise ModelError(f"The voice {file.name} holds {len(read)} tensors instead of one")
    (styles,) = read.values()
    if styles.size == 0 or styles.size % width or styles.shape[-1] != width:
        raise ModelError(f"The voice {file.name} is of shape {tuple(styles.shape)}; its last axis has to be {width}")
    return styles.reshape(-1, width).astype(mx.float32)


def _renamed(name: str) -> str:
    for pattern, now in RENAMED:
        name = pattern.sub(now, name)
    return name


def _unpacked(found: Mapping[str, mx.array], packing: Mapping[str, Any], folder: Path) -> dict[str, mx.array]:
    """All in float32, what mlx-audio packed in few bits too."""
    result = {}
    for name, tensor in found.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in found and name != stem:
            try:
                how = {**packing, **packing.get(stem, {})}
                tensor = mx.dequantize(
                    tensor,
                    found[f"{stem}.scales"],
                    found.get(f"{stem}.biases"),
                    how["group_size"],
                    how["bits"],
                    how.get("mode", "affine"),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(
                    f"{name} of {folder.name} is packed in a way that MLX does not know: {error}"
                ) from error
        if not name.endswith((".scales", ".biases")):
            result[name] = tensor.astype(mx.float32)
    return result


def _multiplied(found: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """With weights in place of their directions and lengths, which training keeps apart."""
    result = {}
    for name, tensor in found.items():
        if name.endswith(".weight_v"):
            stem = name.removesuffix("_v")
            length = found.get(f"{stem}_g")
            if length is None:
                raise ModelError(f"The weights hold {name} and no {stem}_g")
            norm = mx.sqrt(mx.sum(mx.square(tensor), axis=(1, 2), keepdims=True))
            result[stem] = tensor * (length.reshape(-1, 1, 1) / norm)
        elif not name.endswith(".weight_g"):
            result[name] = tensor
    return result


def _with_taps_last(weight: mx.array, module: Convolution | Lengthening | Doubling) -> mx.array:
    """As PyTorch has it; mlx-audio writes the last two axes the other way round."""
    if weight.ndim != 3 or module.arranged(weight).shape == module.weight.shape:
        return weight
    return mx.contiguous(weight.swapaxes(1, 2))
