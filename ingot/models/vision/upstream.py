"""The one place that imports mlx-vlm, which comes with the extra `vision`. Only models that see pay for it: it takes
seconds."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from ingot.errors import ConfigError, ModelError
from ingot.extras import require
from ingot.upstream import import_upstream

_PARTS: Final = ("text", "vision", "perceiver", "projector")


def require_vision() -> None:
    """Raises ModelError where anything is missing that a model sees with."""
    try:
        require("vision", "A model that sees", instead="or serve it for text alone with --text-only")
    except ConfigError as error:
        raise ModelError(error.message) from error


def family_package(config: dict[str, Any]) -> ModuleType:
    """mlx-vlm's package of a model type. Raises ModelError where it is not installed or has none."""
    require_vision()
    utils = import_upstream("mlx_vlm.utils")
    try:
        package: ModuleType = utils.get_model_and_args(config)[0]
    except (ImportError, KeyError, ValueError) as unknown:
        raise ModelError(
            f"mlx-vlm has no vision tower for models of type {config.get('model_type')}. Serve it with --text-only."
        ) from unknown
    return package


def unloaded_model(package: ModuleType, config: dict[str, Any]) -> Any:
    """The model of a package as its config describes it, whose weights are still to come. Nothing is computed."""
    language = config.get("llm_config") or {}  # as some checkpoints call it
    stated = {"text_config": language, "vision_config": {}, "audio_config": {}, **config}
    utils = import_upstream("mlx_vlm.utils")
    described = package.ModelConfig.from_dict(dict(stated))
    return package.Model(utils.update_module_configs(described, package, stated, _PARTS))


def sanitized(package: ModuleType, model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's weights by the names and in the shapes that the package's classes want."""
    utils = import_upstream("mlx_vlm.utils")
    weights = utils.sanitize_weights(model, weights)
    if hasattr(package, "VisionModel"):
        weights = utils.sanitize_weights(package.VisionModel, weights, model.config.vision_config)
    return weights
