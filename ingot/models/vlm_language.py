"""Language models that mlx-lm lacks and mlx-vlm has, behind the interface of mlx-lm's; and what is said of a model that
neither has.

mlx-vlm's class of the whole model is built, which computes nothing; its language part is what is loaded and run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from types import ModuleType
from typing import Any

import mlx.nn as nn

from ingot.cache.own_caches import CachePerRow
from ingot.errors import ModelError
from ingot.extras import install_command, missing_packages
from ingot.models.families.registry import MODEL_FAMILIES
from ingot.models.vision.loading import sanitized_vlm_weights, unloaded_mlx_vlm_model
from ingot.upstream import RENAMED, import_upstream, model_classes

_LANGUAGE_PART = "language_model"


def language_classes_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The classes of a model and of its arguments: mlx-lm's, or else ones around mlx-vlm's language part. Raises
    ModelError where neither has any."""
    try:
        return model_classes(config)
    except ValueError as unknown:  # to mlx-lm
        package = _mlx_vlm_package(config)
        if package is None:
            raise ModelError(_why_unknown(config)) from unknown
        return _classes_around(package)


def _mlx_vlm_package(config: Mapping[str, Any]) -> ModuleType | None:
    """None where mlx-vlm has none, or is not installed."""
    if missing_packages("vision"):
        return None
    name = import_upstream("mlx_vlm.utils").MODEL_REMAPPING.get(_type_of(config), _type_of(config))
    try:
        package = import_upstream(f"mlx_vlm.models.{name}")
    except ImportError:
        return None
    return package if hasattr(package, "ModelConfig") else None


def _classes_around(package: ModuleType) -> tuple[type, type]:
    class Arguments(dict[str, Any]):
        @classmethod
        def from_dict(cls, config: Mapping[str, Any]) -> Arguments:
            return cls(config)

    class Language(_VlmLanguage):
        _package = package

    return Language, Arguments


class _VlmLanguage(nn.Module):
    """The language part of mlx-vlm's model."""

    _package: ModuleType
    language_model: Any

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model_type = _type_of(config)
        whole = unloaded_mlx_vlm_model(self._package, config)
        part = getattr(whole, _LANGUAGE_PART, None)
        if not hasattr(part, "layers"):
            raise ModelError(
                f"Models of type {self.model_type} do not continue text: mlx-vlm has no language part of them."
            )
        self.language_model = part
        # As a module of this one, its other parts would be loaded.
        vars(self)["whole"] = whole

    @property
    def layers(self) -> Any:
        return self.language_model.layers

    def make_cache(self) -> Any:
        if hasattr(self.language_model, "make_cache"):
            return self.language_model.make_cache()
        return import_upstream("mlx_vlm.models.cache").make_prompt_cache(self.language_model)

    def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Without the weights of other parts."""
        named = sanitized_vlm_weights(self._package, vars(self).pop("whole"), weights)
        return {name: weight for name, weight in named.items() if name.startswith(f"{_LANGUAGE_PART}.")}

    def __call__(self, inputs: Any, cache: Any = None) -> Any:
        first = cache[0] if cache else None
        if not isinstance(first, CachePerRow):
            return self.language_model(inputs, cache=cache).logits
        positions = first.mixed.positions.reshape(inputs.shape)
        return self.language_model(inputs, cache=cache, position_ids=positions).logits


def _type_of(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type"))


def _why_unknown(config: Mapping[str, Any]) -> str:
    """What to do about a model of a type that is not known here."""
    family = _type_of(config)
    lacking = missing_packages("vision")
    have = [f"mlx-lm {metadata.version('mlx-lm')}"] + ([] if lacking else [f"mlx-vlm {metadata.version('mlx-vlm')}"])
    advice = [f"Models of type {family} are not known to {' or '.join(have)}."]
    if lacking:
        advice.append(f"mlx-vlm may have it: run {install_command(lacking)}.")
    if written := config.get("transformers_version"):
        advice.append(f"Its config was written by transformers {written}: newer releases of ingot may have it.")
    else:
        advice.append("A newer release of ingot may have it.")
    if related := _related_types(family):
        advice.append(f"Related types that run here: {', '.join(related)}.")
    advice.append("A GGUF file of the model runs if its architecture is one of those in docs/models.md.")
    return " ".join(advice)


def _related_types(family: str) -> list[str]:
    """Known types of the same make: their names begin with the same letters."""
    maker = re.match(r"[a-z]*", family.lower())
    known = MODEL_FAMILIES.keys() | RENAMED.keys()
    return sorted(name for name in known if maker and len(maker[0]) > 2 and name.lower().startswith(maker[0]))
