"""Every tensor that a GGUF file must hold for a model: one for each parameter of mlx-lm's model, by the names that the
`gguf` package has for both.

What is stored otherwise is a rule: a regular expression of the parameter's name, and a function that says where it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
import numpy as np
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from gguf.tensor_mapping import TensorNameMap, get_tensor_name_map
from mlx.utils import tree_flatten

from ingot.errors import ModelError
from ingot.models.gguf.blueprint import WantedTensor
from ingot.models.gguf.file import GGUFModel
from ingot.upstream import SwitchLinear, model_classes

ARCHITECTURE_IDS: dict[str, MODEL_ARCH] = {name: number for number, name in MODEL_ARCH_NAMES.items()}
# Parts of mlx-lm's names, as regular expressions, and what the `gguf` package knows instead: what was published.
PUBLISHED_NAMES = {
    r"^(model\.language_model|language_model\.model)\.": "model.",
    r"^language_model\.lm_head": "lm_head",
    r"backbone\.layers\.(\d+)\.mixer\.switch_mlp\.fc1": r"model.layers.\1.mlp.experts.up_proj",
    r"backbone\.layers\.(\d+)\.mixer\.switch_mlp\.fc2": r"model.layers.\1.mlp.experts.down_proj",
    r"block_sparse_moe\.switch_mlp": "mlp.experts",
    r"experts\.switch_glu": "experts",
    r"switch_mlp": "experts",
    r"\.embed_q\b": ".k_b_proj",
    r"\.unembed_out\b": ".v_b_proj",
    r"\.dt_bias$": ".dt_proj.bias",
    r"(gate|block_sparse_moe)\.e_score_correction_bias$": r"\1.e_score_correction.bias",
}
BLOCK_MODULES = (nn.Linear, nn.Embedding, SwitchLinear)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model; `block` is how the names of its layer's tensors begin in the file."""

    path: str
    shape: tuple[int, ...]
    block: str
    config: Mapping[str, Any]
    file: GGUFModel


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a parameter is, unlike most: in these tensors, of this shape each, converted in this way."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    how: Mapping[str, Any]


Rule = Callable[[Parameter], Stored | None]


def build_skeleton(config: dict[str, Any]) -> nn.Module:
    """mlx-lm's model, none of whose weights is computed. Raises ModelError for a config that it cannot take."""
    model_class, args_class = model_classes(config=config)
    try:
        model: nn.Module = model_class(args_class.from_dict(config))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"what the file states of itself makes no model: {error}") from error
    return model


def wanted_tensors(
    file: GGUFModel,
    architecture: str,
    config: Mapping[str, Any],
    model: nn.Module,
    rules: Mapping[str, Rule],
) -> list[WantedTensor]:
    """Raises ModelError for a parameter that files of this architecture have no tensor for, or whose layout the header
    does not tell."""
    known = get_tensor_name_map(ARCHITECTURE_IDS[architecture], config["num_hidden_layers"])
    modules = dict(model.named_modules())
    parameters: Any = tree_flatten(model.parameters())
    return [
        _wanted_tensor(file, known, config, path, tuple(array.shape), modules[path.rpartition(".")[0]], rules)
        for path, array in parameters
    ]


def _wanted_tensor(
    file: GGUFModel,
    known: TensorNameMap,
    config: Mapping[str, Any],
    path: str,
    shape: tuple[int, ...],
    module: nn.Module,
    rules: Mapping[str, Rule],
) -> WantedTensor:
    layer = re.search(r"layers\.(\d+)\.", path)
    parameter = Parameter(path, shape, f"blk.{layer[1]}." if layer else "", config, file)
    matching = (rule for pattern, rule in {**rules, **USUAL_RULES}.items() if re.search(pattern, path))
    try:
        stored = next((found for rule in matching if (found := rule(parameter)) is not None), Stored((), (), {}))
    except KeyError as missing:
        raise ModelError(f"the header does not say {missing}, by which {path!r} is read") from None
    sources, shapes = stored.names, stored.shapes
    if not sources:
        source = _source(file, known, path)
        sources, shapes = (source,), (_shape_in_file(file, source, shape),)
    how: dict[str, Any] = {
        "plain": not (path.endswith(".weight") and hasattr(module, "to_quantized")),
        "in_blocks": type(module) in BLOCK_MODULES,
    }
    further = tuple(zip(sources[1:], shapes[1:], strict=True))
    return WantedTensor(sources[0], path, shapes[0], shape, further=further, **how | dict(stored.how))


def _source(file: GGUFModel, known: TensorNameMap, path: str) -> str:
    if path.endswith("lm_head.weight") and "output.weight" not in file.tensors:
        return "token_embd.weight"
    published = path
    for ours, theirs in PUBLISHED_NAMES.items():
        published = re.sub(ours, theirs, published)
    name: str | None = known.get_name(published, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise ModelError(f"files of this architecture have no tensor for {path!r}")
    ends = (name, f"{name}.weight", f"{name}.bias")
    return next((end for end in ends if end in file.tensors), name)


def _shape_in_file(file: GGUFModel, source: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The file's own shape, if it differs from the model's only in axes of one, or in that a vector is a matrix."""
    entry = file.tensors.get(source)
    if entry is not None and math.prod(entry.shape) == math.prod(shape):
        squeezed = [[size for size in each if size != 1] for each in (entry.shape, shape)]
        if squeezed[0] == squeezed[1] or len(squeezed[1]) == 1:
            return entry.shape
    return shape


def as_stored(**how: Any) -> Stored:
    """Of the usual name and shape, but converted."""
    return Stored((), (), how)


def from_rows(name: str, shape: tuple[int, ...], rows: np.ndarray) -> Stored:
    """Some rows of a tensor of another shape."""
    return Stored((name,), (shape,), {"rows": rows})


def stored_as(end: str) -> Rule:
    """Of another name."""
    return lambda parameter: Stored((parameter.block + end,), (parameter.shape,), {})


def one_behind_another(*ends: str) -> Rule:
    """The rows of several tensors of equal shape."""

    def rule(parameter: Parameter) -> Stored:
        *outer, rows, columns = parameter.shape
        shape = (*outer, rows // len(ends), columns)
        return Stored(tuple(parameter.block + end for end in ends), (shape,) * len(ends), {})

    return rule


def gate_or_up_half(half: int) -> Rule:
    """The first or the second half of each expert's rows, where a file has both in one tensor; else nothing."""

    def rule(parameter: Parameter) -> Stored | None:
        name, (experts, inner, columns) = parameter.block + "ffn_gate_up_exps.weight", parameter.shape
        if name not in parameter.file.tensors:
            return None
        rows = np.arange(2 * experts * inner).reshape(experts, 2, inner)[:, half].ravel()
        return from_rows(name, (experts, 2 * inner, columns), rows)

    return rule


def plus_one(parameter: Parameter) -> Stored:
    """Norms whose factors are stored, where the model has their difference from one."""
    return as_stored(convert=lambda values: values - np.float32(1))


def interleaved(heads: str) -> Rule:
    return lambda parameter: as_stored(heads=parameter.config[heads])


INTERLEAVED: dict[str, Rule] = {
    r"self_attn\.q_proj\.": interleaved("num_attention_heads"),
    r"self_attn\.k_proj\.": interleaved("num_key_value_heads"),
}
"""Rows of queries and keys come in interleaved rotary order."""
PLUS_ONE: dict[str, Rule] = {r"norm\.weight$": plus_one}


def log_of_negated(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(-values).astype(np.float32)


USUAL_RULES: dict[str, Rule] = {
    r"\.A_log$": lambda parameter: as_stored(convert=log_of_negated),
    r"(mlp\.experts|switch_mlp|switch_glu)\.gate_proj\.weight$": gate_or_up_half(0),
    r"(mlp\.experts|switch_mlp|switch_glu)\.up_proj\.weight$": gate_or_up_half(1),
}


def in_other_layer(item: WantedTensor, layer: int, module: str) -> WantedTensor:
    """The same tensor of the file's layer `layer`, as a part of `module`."""
    source = re.sub(r"^blk\.\d+\.", f"blk.{layer}.", item.source)
    further = tuple((re.sub(r"^blk\.\d+\.", f"blk.{layer}.", name), shape) for name, shape in item.further)
    target = re.sub(r"^.*layers\.\d+", module, item.target)
    return replace(item, source=source, target=target, further=further)
