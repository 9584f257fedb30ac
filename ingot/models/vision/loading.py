"""Loading a vision tower: which one a checkpoint has, its weights in mlx-vlm's modules, and a warm-up.

The weights of a checkpoint that the language model does not load are loaded. This is the one place that imports
mlx-vlm, which comes with the extra `vision`, and only for vision models, as it takes seconds. On CPUs norms, GELUs and
gated MLPs are swapped. What MLX compiles for a tower's operations takes seconds in all; `warm_up_vision_tower` does
that at load, so that no stream waits for it. Raises ModelError with what is wrong, or with what to install.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ingot.errors import ConfigError, ModelError
from ingot.extras import require_extra
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.media.image_processors import read_processor, states_vision
from ingot.media.images import BICUBIC, DecodingMemory, Pixels, View
from ingot.media.items import MediaItem
from ingot.media.layout import ImageLayoutOptions, MediaProcessor, Size, VideoHeader, VideoLayoutOptions
from ingot.media.processor_parts import ProcessorFiles
from ingot.models.families.description import MlpSpec
from ingot.models.files.folder_checks import read_safetensors_header
from ingot.models.layers.mlp import swap_gated_mlps
from ingot.models.layers.modules import swap_each
from ingot.models.layers.norms import swap_gelus, swap_norms
from ingot.models.precision import settle_precision
from ingot.models.vision import any_size_towers, clip_towers, conv_towers, molmo_towers, qwen, siglip_towers
from ingot.models.vision.tower import EncodingBytes, LanguagePart, VisionTower
from ingot.upstream import import_upstream

TOWER_FILE: Final = "model-vision.safetensors"
"""Holds a converted model's tower, as mlx-vlm's modules have its weights."""
_TOWER_WORDS: Final = ("vision", "visual", "vpm")
"""One of them is in the names of a tower's weights, whatever the family."""


def states_vision_tower(config: dict[str, Any]) -> bool:
    """Whether a config is of a vision model of a known family."""
    return states_vision(config) and config.get("model_type") in VISION_FAMILIES


def has_vision_tower(folder: Path, config: dict[str, Any]) -> bool:
    """Whether a checkpoint holds the tower that its config states: some conversions are of the language model alone."""
    names = (name for file in folder.glob("model*.safetensors") for name in read_safetensors_header(file))
    return states_vision_tower(config) and any(word in name for name in names for word in _TOWER_WORDS)


def load_vision_tower(folder: Path, config: dict[str, Any], device: Device, dtype: str | None = None) -> VisionTower:
    """The tower of the model in `folder`. Raises ModelError with what is wrong with it, or with what to install."""
    family = VISION_FAMILIES[config["model_type"]]
    try:
        model = _load_tower_weights(folder, config, family)
    except ModelError:
        raise
    except Exception as error:  # another project's code reads this folder and may fail in any way
        raise ModelError(f"The vision tower in {folder.name} cannot be loaded: {error}") from error
    for part in _tower_parts(model, family):
        if device.kind == "cpu":
            swap_each(part, conv_towers.product_of_convolution)
        settle_precision(part, device, dtype)
        if device.kind == "cpu":
            swap_tower_modules(part)
        mx.eval(part.parameters())
    return family.make(model, config, ProcessorFiles.read(folder), device)


LARGEST_IMAGE: Final = Size(16_384, 16_384)
"""Larger than any image that a model is shown."""


USUAL_VIDEO: Final = VideoHeader(Size(1920, 1080), frames=1800, fps=30.0)
"""A minute, which there is to be memory for."""


def largest_needs(tower: VisionTower, processor: MediaProcessor) -> list[EncodingBytes]:
    """Of the largest image, and of a usual video where the model takes any."""
    layouts = [processor.image_layout(LARGEST_IMAGE, ImageLayoutOptions())]
    if "video" in processor.placeholders:
        layouts.append(processor.video_layout(USUAL_VIDEO, VideoLayoutOptions()))
    return [tower.needs(layout) for layout in layouts]


def unloaded_tower_needs(folder: Path, config: dict[str, Any], device: Device) -> list[EncodingBytes] | None:
    """What the largest image and a usual video take of a tower whose weights are not read; None where its processor is
    unknown. Raises ModelError where mlx-vlm is missing."""
    family = VISION_FAMILIES[config["model_type"]]
    if (processor := read_processor(folder)) is None:
        return None
    tower = family.make(_load_tower_weights(folder, config, family), config, ProcessorFiles.read(folder), device)
    return largest_needs(tower, processor)


def write_tower(folder: Path, config: dict[str, Any], file: Path) -> None:
    """The weights of the tower of the model in `folder`, as mlx-vlm's modules have them. Raises ModelError with what is
    wrong with it, or with what to install."""
    family = VISION_FAMILIES[config["model_type"]]
    model = _load_tower_weights(folder, config, family)
    weights = {name: model[name] for name in family.arrays}
    for name in family.parts:
        part = _part_named(model, name)
        found = part.parameters() if isinstance(part, nn.Module) else [each.parameters() for each in part]
        weights |= {f"{name}.{path}": weight for path, weight in dict(tree_flatten(found)).items()}
    mx.save_safetensors(str(file), weights, {"format": "mlx"})


def unloaded_tower_parts(folder: Path, config: dict[str, Any]) -> list[nn.Module]:
    """The modules that hold a tower's weights, lazily. Raises ModelError where mlx-vlm is missing."""
    family = VISION_FAMILIES[config["model_type"]]
    return _tower_parts(_load_tower_weights(folder, config, family), family)


def _tower_parts(model: Any, family: VisionFamily) -> list[nn.Module]:
    return [_as_module(_part_named(model, name)) for name in family.parts]


def _load_tower_weights(folder: Path, config: dict[str, Any], family: VisionFamily) -> Any:
    """mlx-vlm's model with the weights of its tower. Those of its other parts are never read."""
    config = family.stated(config)
    package = mlx_vlm_package(config)
    model = unloaded_mlx_vlm_model(package, config)
    alone = (folder / TOWER_FILE).is_file()
    weights: dict[str, mx.array] = {}
    for file in [folder / TOWER_FILE] if alone else sorted(folder.glob("model*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        weights.update(loaded)
    if not alone:
        weights = sanitized_vlm_weights(package, model, weights)
    for name in family.parts:
        own = {path[len(name) + 1 :]: weight for path, weight in weights.items() if path.startswith(f"{name}.")}
        if not own:
            raise ModelError(f"{folder.name} holds no weights of its vision tower. Serve it with --text-only.")
        part = _as_module(_part_named(model, name))
        if part is not _part_named(model, name):
            own = {f"layers.{path}": weight for path, weight in own.items()}
        own = _with_inner_name(part, own)
        _quantize_part(part, own, config)
        part.load_weights(list(own.items()), strict=True)
        part.eval()
    for name in family.arrays:
        if name not in weights:
            raise ModelError(f"{folder.name} holds no {name} of its vision tower. Serve it with --text-only.")
        model[name] = weights[name]
    return model


def _with_inner_name(part: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Weights by their names in `part`: some checkpoints leave out the name of its only module."""
    inside = [*part.children()]
    if len(inside) != 1 or any(path.startswith(f"{inside[0]}.") for path in weights):
        return weights
    return {f"{inside[0]}.{path}": weight for path, weight in weights.items()}


def _part_named(model: Any, name: str) -> Any:
    """By its dotted path."""
    for step in name.split("."):
        model = model[step]
    return model


def _as_module(part: Any) -> Any:
    """Some parts are lists of modules, run one after another; they become a module that shares the list."""
    if not isinstance(part, list):
        return part
    sequence = nn.Sequential()
    sequence.layers = part
    return sequence


def _quantize_part(part: nn.Module, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Quantise the layers whose weights are quantised."""
    form = config.get("quantization") or {}
    if not any(path.endswith(".scales") for path in weights):
        return
    nn.quantize(
        part,
        group_size=form["group_size"],
        bits=form["bits"],
        mode=form.get("mode", "affine"),
        class_predicate=lambda path, module: f"{path}.scales" in weights,
    )


MakeVisionTower = Callable[[Any, dict[str, Any], ProcessorFiles, Device], VisionTower]
"""From mlx-vlm's model, of which only `parts` have weights, the config, the processors' files and the device."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    make: MakeVisionTower
    parts: tuple[str, ...]  # paths of the tower's modules in mlx-vlm's class of the whole model
    language: LanguagePart | None = None  # where mlx-lm has no class of this type that leaves the tower out
    arrays: tuple[str, ...] = ()  # further weights of the tower, which are in no module
    stated: Callable[[dict[str, Any]], dict[str, Any]] = dict  # the config as mlx-vlm's package takes it


_QWEN = VisionFamily(qwen.QwenVisionTower, qwen.QWEN_PARTS)
_IDEFICS = VisionFamily(siglip_towers.idefics_tower, siglip_towers.IDEFICS_PARTS, siglip_towers.IDEFICS_LANGUAGE)
_PIXTRAL = VisionFamily(clip_towers.pixtral_tower, clip_towers.PIXTRAL_PARTS)
_GLM = any_size_towers.glm_tower, any_size_towers.GLM_PARTS
_MINICPM_RESAMPLED = VisionFamily(
    siglip_towers.minicpm_resampled_tower,
    siglip_towers.MINICPM_RESAMPLED_PARTS,
    siglip_towers.MINICPM_RESAMPLED_LANGUAGE,
    stated=siglip_towers.minicpm_stated,
)
_LFM = VisionFamily(any_size_towers.lfm_tower, any_size_towers.LFM_PARTS, any_size_towers.LFM_LANGUAGE)

VISION_FAMILIES: Final[Mapping[str, VisionFamily]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "gemma3": VisionFamily(siglip_towers.gemma_tower, siglip_towers.GEMMA_PARTS),
    **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS),
    "internvl": VisionFamily(
        siglip_towers.internvl_tower, siglip_towers.INTERNVL_PARTS, siglip_towers.INTERNVL_LANGUAGE
    ),
    "internvl_chat": VisionFamily(
        siglip_towers.internvl_chat_tower, siglip_towers.INTERNVL_CHAT_PARTS, siglip_towers.INTERNVL_LANGUAGE
    ),
    "llava": VisionFamily(clip_towers.llava_tower, clip_towers.LLAVA_PARTS, clip_towers.LLAVA_LANGUAGE),
    "llava_next": VisionFamily(
        clip_towers.llava_next_tower,
        clip_towers.LLAVA_PARTS,
        clip_towers.LLAVA_LANGUAGE,
        arrays=(clip_towers.LLAVA_LINE_END,),
    ),
    "phi3_v": VisionFamily(clip_towers.phi3_tower, clip_towers.PHI_PARTS, clip_towers.PHI_LANGUAGE),
    **dict.fromkeys(("pixtral", "mistral3"), _PIXTRAL),
    "gemma3n": VisionFamily(conv_towers.gemma3n_tower, conv_towers.GEMMA3N_PARTS, conv_towers.GEMMA3N_LANGUAGE),
    "gemma4": VisionFamily(any_size_towers.gemma4_tower, any_size_towers.GEMMA4_PARTS),
    "gemma4_unified": VisionFamily(any_size_towers.gemma4_unified_tower, any_size_towers.GEMMA4_UNIFIED_PARTS),
    "minimax_m3_vl": VisionFamily(any_size_towers.minimax_tower, any_size_towers.MINIMAX_PARTS),
    **dict.fromkeys(("glm4v", "glm_ocr"), VisionFamily(*_GLM, any_size_towers.GLM_LANGUAGE)),
    "glm4v_moe": VisionFamily(*_GLM, any_size_towers.GLM_MOE_LANGUAGE),
    "kimi_k25": VisionFamily(any_size_towers.kimi_tower, any_size_towers.KIMI_K25_PARTS),
    "kimi_vl": VisionFamily(
        any_size_towers.kimi_tower, any_size_towers.KIMI_VL_PARTS, any_size_towers.KIMI_VL_LANGUAGE
    ),
    **dict.fromkeys(("lfm2_vl", "lfm2-vl"), _LFM),
    "minicpmv4_6": VisionFamily(
        siglip_towers.minicpm_tower, siglip_towers.MINICPM_PARTS, siglip_towers.MINICPM_LANGUAGE
    ),
    "deepseekocr": VisionFamily(
        conv_towers.deepseek_ocr_tower,
        conv_towers.DEEPSEEK_OCR_PARTS,
        conv_towers.DEEPSEEK_OCR_LANGUAGE,
        arrays=conv_towers.DEEPSEEK_OCR_ARRAYS,
    ),
    **dict.fromkeys(("minicpmo", "minicpmv"), _MINICPM_RESAMPLED),
    "phi4-siglip": VisionFamily(
        any_size_towers.phi4_tower,
        any_size_towers.PHI4_PARTS,
        any_size_towers.PHI4_LANGUAGE,
        stated=any_size_towers.phi4_stated,
    ),
    "molmo": VisionFamily(
        molmo_towers.molmo_tower,
        molmo_towers.MOLMO_PARTS,
        molmo_towers.MOLMO_LANGUAGE,
        stated=molmo_towers.molmo_stated,
    ),
    "molmo2": VisionFamily(molmo_towers.molmo2_tower, molmo_towers.MOLMO_PARTS, molmo_towers.MOLMO2_LANGUAGE),
    "llama4": VisionFamily(siglip_towers.llama4_tower, siglip_towers.LLAMA4_PARTS),
    "paddleocr_vl": VisionFamily(
        any_size_towers.paddle_tower, any_size_towers.PADDLE_PARTS, any_size_towers.PADDLE_LANGUAGE
    ),
}
"""By model_type."""


_MODULE_CONFIGS: Final = ("text", "vision", "audio", "perceiver", "projector")


def require_vision() -> None:
    """Raises ModelError where a package for vision is missing."""
    try:
        require_extra("vision", "A vision model", instead="or serve it for text alone with --text-only")
    except ConfigError as error:
        raise ModelError(error.message) from error


def mlx_vlm_package(config: dict[str, Any]) -> ModuleType:
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


def unloaded_mlx_vlm_model(package: ModuleType, config: dict[str, Any]) -> Any:
    """The model of a package by its config, without weights. Nothing is computed."""
    language = config.get("llm_config") or {}  # its key in some checkpoints
    stated = {"text_config": language, "vision_config": {}, "audio_config": {}, **config}
    utils = import_upstream("mlx_vlm.utils")
    described = package.ModelConfig.from_dict(stated)  # which may add what it finds elsewhere in it
    return package.Model(utils.update_module_configs(described, package, stated, _MODULE_CONFIGS))


def sanitized_vlm_weights(package: ModuleType, model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's weights in the names and shapes of the package's classes."""
    utils = import_upstream("mlx_vlm.utils")
    weights = utils.sanitize_weights(model, weights)
    if hasattr(package, "VisionModel"):
        weights = utils.sanitize_weights(package.VisionModel, weights, model.config.vision_config)
    return weights


_GATED_NAMES: Final = ("gate_proj", "up_proj", "down_proj")


def swap_tower_modules(part: nn.Module) -> None:
    """For CPUs, after the precision of its weights is settled."""
    swap_gated_mlps(part, _tower_mlp_spec)
    if native.available():
        swap_gelus(part)
        swap_norms(part)


def _tower_mlp_spec(module: nn.Module) -> MlpSpec | None:
    """mlx-vlm's towers have gated MLPs of one kind, in classes that are all called MLP."""
    return MlpSpec() if type(module).__name__ == "MLP" and all(name in module for name in _GATED_NAMES) else None


WARM_UP_SIZE: Final = Size(64, 64)
LONGEST_WARM_UP_S: Final = 10.0
"""Of processor time, without the compiler's processes. A tower's layers are alike: where the smallest image takes
longer, the rest of it compiles little more."""


@dataclass(frozen=True, slots=True)
class _GreyImage:
    size: Size = WARM_UP_SIZE

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        return DecodingMemory(0, 0, self.size)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        for view in views or ((self.size,),):
            width, height = view[-1]
            yield np.full((height, width, 3), 127, dtype=np.uint8)


def warm_up_vision_tower(tower: VisionTower, processor: MediaProcessor) -> None:
    """Encode a small grey image, or as much of it as there is time for. For the engine thread."""
    layout = processor.image_layout(WARM_UP_SIZE, ImageLayoutOptions())
    runs = ((0, layout.features),)
    end = time.process_time() + LONGEST_WARM_UP_S
    for arrays in tower.encode(tower.pixels(MediaItem("image", b"", runs, layout, _GreyImage())), layout):
        mx.eval(*arrays)
        if time.process_time() > end:
            return
