"""The one place that imports mlx-lm, without side effects on the process.

A server needs mlx-lm's model definitions. The package itself also imports transformers and the hub, which doubles the
time of a start. So its `__init__` runs only when a name is used that is not one of its modules, and models are found
and loaded here, also those in FP8, in AWQ's and GPTQ's formats and as packed compressed tensors. Further formats of
other projects are left to mlx-lm's own loader, which is imported for those.

mlx-lm lowers RLIMIT_NOFILE when it is imported, including the hard limit, which an ordinary user cannot raise again. So
that import sees a `resource` module whose `setrlimit` does nothing; the real one is untouched.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import resource
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

PACKAGE: Final = "mlx_lm"


@contextmanager
def _process_unchanged() -> Iterator[None]:
    inert = types.ModuleType("resource")
    inert.__dict__.update({name: value for name, value in vars(resource).items() if not name.startswith("__")})
    inert.__dict__["setrlimit"] = lambda *_: None
    environment = dict(os.environ)
    sys.modules["resource"] = inert
    try:
        yield
    finally:
        sys.modules["resource"] = resource
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


class _DeferredPackage(types.ModuleType):
    """A package whose modules can be imported, and whose own code runs when any other name is used:
    `importlib.util.LazyLoader` would run it for its `__path__`, which each import of a module reads."""

    _executed = False

    def __getattr__(self, name: str) -> Any:
        """Only called for missing names."""
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}"
            )  # many packages probe all modules
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        with _DEFERRED:
            if not self._executed:
                self._executed = True
                with _process_unchanged():
                    spec.loader.exec_module(self)
        return types.ModuleType.__getattribute__(self, name)


_DEFERRED = threading.RLock()


def defer_package(name: str) -> None:
    """Put the package into sys.modules, if it is not imported already, so that its modules can be imported alone."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = _DeferredPackage(name)
    package.__spec__, package.__loader__, package.__file__, package.__package__ = spec, spec.loader, spec.origin, name
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[name] = package


def import_upstream(name: str) -> types.ModuleType:
    """Import a module of mlx-lm, or of another project's package that builds on it."""
    if name in sys.modules:
        return importlib.import_module(name)
    with _process_unchanged():
        if name.partition(".")[0] != PACKAGE:  # it may import these later, inside its functions
            importlib.import_module(f"{PACKAGE}.utils")
        return importlib.import_module(name)


defer_package(PACKAGE)

from mlx_lm.models import cache as caches  # noqa: E402
from mlx_lm.models import rope_utils  # noqa: E402
from mlx_lm.models.activations import SwigluOAI, swiglu  # noqa: E402
from mlx_lm.models.base import create_attention_mask  # noqa: E402
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear  # noqa: E402
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear, SwitchMLP  # noqa: E402

ArraysCache: Any = caches.ArraysCache
"""Typed loosely: mlx-lm declares less of it than its models use."""

CACHE_MODULES: Final = ("mlx_lm.models.cache", "mlx_vlm.models.cache")
"""The modules whose caches our states stand in for, by the classes' names."""

Classes = Callable[..., tuple[Any, Any]]
"""From `config` to the class of a model and that of its arguments."""

RENAMED: Final = {
    **{"mistral": "llama", "iquestcoder": "llama", "xverse": "llama", "llava": "mistral3", "phi-msft": "phixtral"},
    **{"falcon_mamba": "mamba", "joyai_llm_flash": "deepseek_v3", "kimi_k2": "deepseek_v3"},
    **{"deepseek_v41_text": "deepseek_v41", "qwen2_5_vl": "qwen2_vl", "minimax_m2": "minimax"},
    **{"gemma4_unified": "gemma4"},
}
"""Model types that run another type's code, as in mlx-lm."""
RENAMED_BY_CLASS: Final = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}
"""The same by the class that a config names, too."""

_TAGGED: Final = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
_MODES: Final = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""MLX's quantization modes with scales of bytes, by bits and group size."""


def load_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, with the EOS tokens of its generation_config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes(), object_hook=_untagged)
    generation = folder / "generation_config.json"
    try:
        ends = json.loads(generation.read_bytes()).get("eos_token_id") if generation.exists() else None
    except ValueError:  # not JSON
        ends = None
    return {**config, "eos_token_id": ends} if ends else config


def _untagged(found: dict[str, Any]) -> Any:
    """transformers writes numbers that JSON lacks as {"__float__": name}."""
    return _TAGGED.get(str(found["__float__"]), found) if found.keys() == {"__float__"} else found


def model_classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes for a model and its arguments. Raises ValueError where it has none."""
    named, architectures = config["model_type"], config.get("architectures") or ()
    architectures = (architectures,) if isinstance(architectures, str) else architectures
    by_class = [RENAMED_BY_CLASS[named, each] for each in architectures if (named, each) in RENAMED_BY_CLASS]
    try:
        family = importlib.import_module(f"{PACKAGE}.models.{[*by_class, RENAMED.get(named, named)][0]}")
    except ImportError:  # a newer mlx-lm may have further names
        parameter = inspect.signature(import_upstream(f"{PACKAGE}.utils").load_model).parameters["get_model_classes"]
        found: tuple[Any, Any] = parameter.default(config=config)
        return found
    return family.Model, family.ModelArgs


def load_model(
    folder: Path,
    *,
    model_config: Mapping[str, Any] | None = None,
    get_model_classes: Classes = model_classes,
    stored: dict[str, mx.array] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The model in a folder, with lazily read weights, and its config updated by `model_config`. The arrays of its
    files are added to `stored`, by name, where mlx-lm converts nothing. Raises whatever the model's own code raises for
    a folder that it cannot read."""
    config = {**load_config(folder), **(model_config or {})}
    blocks = _fp8_blocks(folder, config)
    packing = _packing_by_others(folder, config)
    form = _integer_form(packing) if config.get("quantization") is None else None
    if blocks is None and form is None and is_packed_by_others(folder, config):
        loaded: tuple[Any, dict[str, Any]] = import_upstream(f"{PACKAGE}.utils").load_model(
            folder, lazy=True, model_config=model_config, get_model_classes=get_model_classes
        )
        return loaded
    if config.get("model_file") is not None:
        raise ValueError(f"it has code of its own, {config['model_file']!r}, which is not run")
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no weights (model*.safetensors) in {folder}")
    weights = {name: array for file in files for name, array in _arrays(file).items()}
    if stored is not None:
        stored |= weights
    if blocks is not None:
        weights, config = _without_fp8(weights, config, blocks)
    elif form is not None:
        weights, config = _without_codes(weights, packing, form), {**config, "quantization": form}
    model_class, args_class = get_model_classes(config=config)
    model = model_class(args_class.from_dict(config))
    if hasattr(model, "sanitize"):
        weights = _sanitized(model, weights)
    if form is not None:
        weights = _without_zero_biases(weights, model)
    if config.get("quantization") is not None:
        _pack(model, config["quantization"], weights)
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    return model, config


def is_packed_by_others(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether weights are in a format that mlx-lm converts, or activations are quantised, too."""
    inside = (config.get("text_config") or {}).get("quantization_config")
    quantization = config.get("quantization_config") or inside or (folder / "hf_quant_config.json").exists()
    return bool(config.get("quantization") is None and quantization) or bool(config.get("quantize_activations"))


def has_packed_integers(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether weights are in GPTQ's or AWQ's format, or packed compressed tensors."""
    return config.get("quantization") is None and _integer_form(_packing_by_others(folder, config)) is not None


def _packing_by_others(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    inside = (config.get("text_config") or {}).get("quantization_config")
    stated: dict[str, Any] = config.get("quantization_config") or inside or {}
    separate = folder / "hf_quant_config.json"
    if not stated and separate.exists():
        stated = json.loads(separate.read_bytes())
    return {**stated, **(stated.get("quantization") or {})}


def _fp8_blocks(folder: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block sizes of weights that are 8-bit floats with scales for blocks, rows or whole matrices; None for other
    weights. With powers of two for 32 numbers they are MLX's own mxfp8."""
    packing = _packing_by_others(folder, config)
    groups = [group.get("weights") or {} for group in (packing.get("config_groups") or {}).values()]
    block = packing.get("weight_block_size") or next((own.get("block_structure") for own in groups), None) or (128, 128)
    is_mxfp8 = packing.get("scale_fmt") == "ue8m0" and list(block) == [32, 32]
    is_fp8 = (
        (packing.get("quant_method") == "fp8" and not is_mxfp8)
        or packing.get("quant_algo") == "FP8"
        or (bool(groups) and all((own.get("type"), own.get("num_bits")) == ("float", 8) for own in groups))
    )
    return (int(block[0]), int(block[1])) if is_fp8 and config.get("quantization") is None else None


_FP8_SCALES: Final = ("_scale_inv", "_scale")
_FP8_OTHERS: Final = re.compile(r"\.(input|activation|k|v|q|output)_scale$|\.(weight|input)_zero_point$")


def _without_fp8(
    weights: Mapping[str, mx.array], config: dict[str, Any], blocks: tuple[int, int]
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Weights and config of the model whose weights were rounded to 8 bits, in bfloat16: exact but for the rounding of
    products with their scales. Scales of activations are for other machines' products."""
    found = dict[str, mx.array]()
    for name, array in weights.items():
        owner = next((name.removesuffix(end) for end in _FP8_SCALES if name.endswith(f"weight{end}")), name)
        if _FP8_OTHERS.search(name) or (owner != name and owner in weights):
            continue
        scale = next((weights[name + end] for end in _FP8_SCALES if name + end in weights), None)
        found[name] = array if scale is None or array.dtype != mx.uint8 else _unpacked_fp8(name, array, scale, blocks)
    texts = {key: {**part} for key, part in config.items() if key == "text_config" and isinstance(part, dict)}
    for part in texts.values():
        part.pop("quantization_config", None)
    return found, {**config, **texts, "quantization_config": None}


def _unpacked_fp8(name: str, weight: mx.array, scale: mx.array, blocks: tuple[int, int]) -> mx.array:
    scale = scale.astype(mx.float32)
    if scale.size == 1:
        scale = scale.reshape(-1)
    elif scale.ndim == weight.ndim - 1:  # one for each row
        scale = scale[..., None]
    for axis, block in zip((-2, -1), blocks, strict=True):
        size = weight.shape[axis]
        if scale.size > 1 and scale.shape[axis] not in (1, size):
            if -(-size // block) != scale.shape[axis]:
                raise ValueError(f"{name} has scales for {scale.shape[axis]} blocks, and {size} numbers")
            scale = mx.take(mx.repeat(scale, block, axis=axis), mx.arange(size), axis=axis)
    return (mx.from_fp8(weight, dtype=mx.float32) * scale).astype(mx.bfloat16)


def _integer_form(packing: Mapping[str, Any]) -> dict[str, int] | None:
    """MLX's form of GPTQ's and AWQ's weights, and of compressed tensors whose codes have scales for groups and no
    zeros."""
    if packing.get("quant_method") in ("awq", "gptq"):
        return {"group_size": int(packing.get("group_size", 128)), "bits": int(packing.get("bits", 4))}
    groups = [group.get("weights") or {} for group in (packing.get("config_groups") or {}).values()]
    if packing.get("format") != "pack-quantized" or len(groups) != 1:
        return None
    stated = groups[0]
    usual = {"type": "int", "strategy": "group", "symmetric": True}
    if any(stated.get(name) != value for name, value in usual.items()):
        raise ValueError(f"packed compressed tensors need {usual}, and have {stated}")
    return {"group_size": int(stated["group_size"]), "bits": int(stated["num_bits"])}


def _without_codes(
    weights: Mapping[str, mx.array], packing: Mapping[str, Any], form: Mapping[str, int]
) -> dict[str, mx.array]:
    """GPTQ's and AWQ's weights and compressed tensors in MLX's format, with the same values. mlx-lm reads GPTQ's files
    as AWQ's, which pack another axis, or refuses them; knows no experts in either; and reads compressed tensors of a
    few families alone. It would pack the two halves of latents' projections anew, with other groups: they are unpacked.
    """
    found = dict[str, mx.array]()
    bits, is_awq = form["bits"], packing.get("quant_method") == "awq"
    one_less = not is_awq and packing.get("checkpoint_format", "gptq") != "gptq_v2"
    if is_awq and bits != 4:
        raise ValueError(f"AWQ's weights of {bits} bits are not supported: those of 4 are")
    for name, array in weights.items():
        path, _, part = name.rpartition(".")
        if part in ("qweight", "weight_packed"):
            order = weights.get(f"{path}.g_idx", weights.get(f"{path}.weight_g_idx"))
            if order is not None and not mx.array_equal(order, mx.arange(order.size) // form["group_size"]).item():
                raise ValueError(f"{path} was packed in another order of its inputs (desc_act), which MLX lacks")
        if part == "qweight":
            scales = mx.contiguous(weights[f"{path}.scales"].T)
            places = mx.array(_AWQ_ORDER if is_awq else tuple(range(32 // bits)), mx.uint32)
            middle = _codes(weights[f"{path}.qzeros"], places, bits).T.astype(mx.float32) + one_less
            found[f"{path}.weight"] = (
                _packed_codes(mx.contiguous(_codes(array, places, bits).T), bits)
                if is_awq
                else mx.contiguous(array.T).view(mx.uint32)
            )
        elif part == "weight_packed":
            scales, middle = weights[f"{path}.weight_scale"], mx.array(1 << (bits - 1), mx.float32)
            found[f"{path}.weight"] = array.view(mx.uint32)
        elif part in ("g_idx", "weight_g_idx", "qzeros", "weight_shape", "weight_scale"):
            continue
        else:
            if part != "scales":
                found[name] = array
            continue
        found |= {f"{path}.scales": scales, f"{path}.biases": (-middle * scales).astype(scales.dtype)}
        if path.endswith(".kv_b_proj"):
            weight, scales, biases = (found.pop(f"{path}.{name}") for name in ("weight", "scales", "biases"))
            found[f"{path}.weight"] = mx.dequantize(weight, scales, biases, form["group_size"], bits)
    return found


_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the code of each of eight columns is in their word."""


def _codes(words: mx.array, places: mx.array, bits: int) -> mx.array:
    return ((words.view(mx.uint32)[..., None] >> (places * bits)) & ((1 << bits) - 1)).reshape(len(words), -1)


def _packed_codes(codes: mx.array, bits: int) -> mx.array:
    each = 32 // bits
    return (codes.reshape(len(codes), -1, each) << (mx.arange(each, dtype=mx.uint32) * bits)).sum(axis=-1)


_OF_EXPERT: Final = re.compile(r"\.experts\.\d+\.[^.]+\.(scales|biases)$")


def _sanitized(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Weights by a model's own names. Most families' code stacks the weights of experts alone: it is given their scales
    and their biases as such."""
    further = {name for name in weights if _OF_EXPERT.search(name)}
    own = {name: array for name, array in weights.items() if name not in further}
    found: dict[str, mx.array] = model.sanitize(dict(own))
    for part in ("scales", "biases") if further else ():
        named = {f"{name.removesuffix(part)}weight": weights[name] for name in further if name.endswith(f".{part}")}
        for name, array in model.sanitize(own | named).items():
            if "switch_mlp" in name and name.endswith(".weight") and name not in own:
                found[f"{name.removesuffix('weight')}{part}"] = array
    return found


def _without_zero_biases(weights: Mapping[str, mx.array], model: Any) -> dict[str, mx.array]:
    """GPTQ's files have biases also for layers without any."""
    own = dict(tree_flatten(model.parameters()))
    return {
        name: array
        for name, array in weights.items()
        if name in own or not name.endswith(".bias") or mx.any(array != 0).item()
    }


def _arrays(file: Path) -> dict[str, mx.array]:
    arrays, metadata = mx.load(str(file), return_metadata=True)
    assert isinstance(arrays, dict) and isinstance(metadata, dict)
    for path, parts in json.loads(metadata.get("expert_records", "{}")).items():
        arrays |= _parts_of_records(path, arrays.pop(f"{path}.expert_records"), parts)
    return arrays


def _parts_of_records(path: str, records: mx.array, parts: Any) -> Iterator[tuple[str, mx.array]]:
    """The arrays [experts, ...] of a layer whose experts' bytes lie beside each other."""
    begin = 0
    for projection, name, dtype, shape in parts:
        kind = getattr(mx, dtype)
        end = begin + math.prod(shape) * kind.size
        own = mx.contiguous(records[:, begin:end]).view(kind)
        yield f"{path}.{projection}.{name}", own.reshape(records.shape[0], *shape)
        begin = end


def _pack(model: Any, quantization: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Give the model quantised layers where its weights are quantised: by the config, or as they are."""

    def layer_quantization(path: str, module: Any) -> bool | dict[str, Any]:
        if path in quantization:
            own: bool | dict[str, Any] = quantization[path]
            return own
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        found = packing_of(path, module, weights)
        takes_scale = "global_scale" in inspect.signature(module.to_quantized).parameters
        return {**found, "global_scale": True} if takes_scale and f"{path}.global_scale" in weights else found

    mode = quantization.get("mode", "affine")
    nn.quantize(model, quantization["group_size"], quantization["bits"], mode=mode, class_predicate=layer_quantization)


def packing_of(path: str, module: Any, weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """The quantization of a layer's weights in the files. Raises ValueError where MLX has no such mode."""
    scales, columns = weights[f"{path}.scales"], module.weight.shape[-1]
    group, bits = columns // scales.shape[-1], weights[f"{path}.weight"].shape[-1] * 32 // columns
    mode = _MODES.get((bits, group)) if scales.dtype == mx.uint8 else "affine"
    if mode is None:
        raise ValueError(f"{path} has no quantization mode of MLX: {bits} bits in groups of {group}, scales of bytes")
    return {"group_size": group, "bits": bits, "mode": mode}


__all__ = [
    "CACHE_MODULES",
    "ArraysCache",
    "MultiLinear",
    "QuantizedMultiLinear",
    "QuantizedSwitchLinear",
    "SwiGLU",
    "SwigluOAI",
    "SwitchGLU",
    "SwitchLinear",
    "SwitchMLP",
    "caches",
    "create_attention_mask",
    "defer_package",
    "import_upstream",
    "load_config",
    "load_model",
    "model_classes",
    "packing_of",
    "rope_utils",
    "swiglu",
]
