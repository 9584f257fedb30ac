"""Loading a tower: those weights of a checkpoint that the language model leaves, in mlx-vlm's modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.media.families.files import ProcessorFiles
from ingot.models.precision import settle
from ingot.models.vision.registry import FAMILIES, TowerFamily
from ingot.models.vision.swapping import swap_parts
from ingot.models.vision.tower import Tower
from ingot.models.vision.upstream import family_package, sanitized, unloaded_model


def has_tower(config: dict[str, Any]) -> bool:
    """Whether a checkpoint is one of a model that sees, of a family that is known."""
    stated = any(isinstance(config.get(name), dict) for name in ("vision_config", "img_processor"))
    return stated and config.get("model_type") in FAMILIES


def load_tower(folder: Path, config: dict[str, Any], device: Device, dtype: str | None = None) -> Tower:
    """The tower of the model in `folder`. Raises ModelError with what is wrong with it, or with what to install."""
    family = FAMILIES[config["model_type"]]
    try:
        model = _with_weights(folder, config, family)
    except ModelError:
        raise
    except Exception as error:  # another project's code reads this folder and may trip over anything
        raise ModelError(f"The vision tower in {folder.name} cannot be loaded: {error}") from error
    for part in _parts(model, family):
        settle(part, device, dtype)
        if device.kind == "cpu":
            swap_parts(part)
        mx.eval(part.parameters())
    return family.make(model, config, ProcessorFiles.read(folder), device)


def unread_parts(folder: Path, config: dict[str, Any]) -> list[nn.Module]:
    """The modules that hold a tower's weights, none of which is read. Raises ModelError where mlx-vlm is missing."""
    family = FAMILIES[config["model_type"]]
    return _parts(_with_weights(folder, config, family), family)


def _parts(model: Any, family: TowerFamily) -> list[nn.Module]:
    return [_module(_part(model, name)) for name in family.parts]


def _with_weights(folder: Path, config: dict[str, Any], family: TowerFamily) -> Any:
    """mlx-vlm's model, whose parts of the tower have their weights. Of the others nothing is ever read."""
    package = family_package(config)
    model = unloaded_model(package, config)
    stored: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        stored.update(loaded)
    weights = sanitized(package, model, stored)
    for name in family.parts:
        own = {path[len(name) + 1 :]: weight for path, weight in weights.items() if path.startswith(f"{name}.")}
        if not own:
            raise ModelError(f"{folder.name} holds no weights of its vision tower. Serve it with --text-only.")
        part = _module(_part(model, name))
        if part is not _part(model, name):
            own = {f"layers.{path}": weight for path, weight in own.items()}
        own = _wrapped(part, own)
        _quantize(part, own, config)
        part.load_weights(list(own.items()), strict=True)
        part.eval()
    for name in family.arrays:
        if name not in weights:
            raise ModelError(f"{folder.name} holds no {name} of its vision tower. Serve it with --text-only.")
        model[name] = weights[name]
    return model


def _wrapped(part: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Weights by the names that they have in `part`: some writers leave out that of its only module."""
    inside = [*part.children()]
    if len(inside) != 1 or any(path.startswith(f"{inside[0]}.") for path in weights):
        return weights
    return {f"{inside[0]}.{path}": weight for path, weight in weights.items()}


def _part(model: Any, name: str) -> Any:
    """By its name, which may lead through modules."""
    for step in name.split("."):
        model = model[step]
    return model


def _module(part: Any) -> Any:
    """Some parts are lists of modules, run one behind another. The list is theirs, whichever module holds it."""
    if not isinstance(part, list):
        return part
    held = nn.Sequential()
    held.layers = part
    return held


def _quantize(part: nn.Module, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Make those layers packed whose weights are."""
    packing = config.get("quantization") or {}
    if not any(path.endswith(".scales") for path in weights):
        return
    nn.quantize(
        part,
        group_size=packing["group_size"],
        bits=packing["bits"],
        mode=packing.get("mode", "affine"),
        class_predicate=lambda path, module: f"{path}.scales" in weights,
    )
