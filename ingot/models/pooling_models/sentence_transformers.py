"""How a model's sentence-transformers files make a vector of its hidden states: reading them, and pooling.

`modules.json` lists the steps; each has a folder with its own config. What is not supported is a ModelError that names
it, as a vector of another recipe looks as good as the right one. Pooling is always computed in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models import checkpoint
from ingot.models.pooling_models.encoder import PaddedTexts, activation_function

# In the order in which sentence-transformers joins them where there are several.
POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
LENGTH_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
INERT_MODULES = ("Dropout",)
LEAST_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class DenseStep:
    """A linear layer after the pooling; its weights are in `folder`."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    act: str


@dataclass(frozen=True, slots=True)
class NormalizeStep:
    """Scale to length 1."""


PoolingStep = DenseStep | NormalizeStep


@dataclass(frozen=True, slots=True)
class PoolingRecipe:
    pooling: tuple[str, ...]
    steps: tuple[PoolingStep, ...]
    length: int | None = None  # the longest input, where the files state one
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name of the prefix of every text
    notes: tuple[str, ...] = ()

    @property
    def unit(self) -> bool:
        """Whether vectors have length 1."""
        return bool(self.steps) and isinstance(self.steps[-1], NormalizeStep)


def read_pooling_recipe(folder: Path, *, usual: str) -> PoolingRecipe:
    """The recipe in `folder`; `usual` is the pooling to assume, with a note, where the files state none."""
    statement = next((found for name in LENGTH_FILES if (found := _read_object(folder / name)) is not None), {})
    library = _read_object(folder / "config_sentence_transformers.json") or {}
    prompts = _read_prompts(library)
    pooling, steps, notes = _read_modules(folder, usual, prompted=any(prompts.values()))
    length = statement.get("max_seq_length")
    if length is not None and type(length) is not int:
        raise ModelError(f"max_seq_length is {length!r}, which is no number of tokens")
    default = library.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(
            f"config_sentence_transformers.json names the default prompt {default!r}, which it does not have"
        )
    return PoolingRecipe(
        pooling, steps, length, bool(statement.get("do_lower_case", False)), prompts, default, tuple(notes)
    )


def _read_prompts(library: dict[str, Any]) -> dict[str, str]:
    stated = library.get("prompts") or {}
    if not isinstance(stated, dict) or not all(isinstance(text, str) for text in stated.values()):
        raise ModelError("config_sentence_transformers.json: prompts is not an object of strings")
    return stated


def _read_modules(
    folder: Path, usual: str, *, prompted: bool
) -> tuple[tuple[str, ...], tuple[PoolingStep, ...], list[str]]:
    modules = _read_json(folder / "modules.json")
    if modules is None:
        note = f"no modules.json: vectors are made by {usual} pooling and scaled to length 1, which may be wrong"
        return (usual,), (NormalizeStep(),), [note]
    if not (isinstance(modules, list) and all(isinstance(entry, dict) for entry in modules)):
        raise ModelError("modules.json does not hold a list of modules")
    pooling: tuple[str, ...] = ()
    steps: list[PoolingStep] = []
    notes: list[str] = []
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        step_folder = folder / str(module.get("path", ""))
        if kind == "Transformer":
            continue
        if kind == "Pooling":
            pooling, pooling_notes = _read_pooling(step_folder, usual, prompted=prompted)
            notes += pooling_notes
        elif kind == "Normalize":
            steps.append(NormalizeStep())
        elif kind == "Dense":
            steps.append(_read_dense(step_folder))
        elif kind not in INERT_MODULES:
            raise ModelError(f"modules.json names the module {module.get('type')!r}, which is not supported")
    if not pooling:
        raise ModelError("modules.json names no pooling, so it is no model that makes one vector of a text")
    return pooling, tuple(steps), notes


def _read_pooling(folder: Path, usual: str, *, prompted: bool) -> tuple[tuple[str, ...], list[str]]:
    config = _read_object(folder / "config.json")
    if config is None:
        return (usual,), [f"{folder.name}/config.json is missing: {usual} pooling may be wrong"]
    modes = _pooling_modes(config)
    if unknown := [mode for mode in modes if mode not in POOLING_MODES]:
        raise ModelError(f"{folder.name}/config.json states the pooling {unknown[0]!r}, which is not supported")
    if not modes:
        raise ModelError(f"{folder.name}/config.json states no pooling")
    if config.get("include_prompt") is False and prompted:
        raise ModelError("The model's pooling leaves its prompts out, which is not supported")
    return tuple(sorted(modes, key=POOLING_MODES.index)), []


def _pooling_modes(config: dict[str, Any]) -> list[str]:
    stated = config.get("pooling_mode")
    if isinstance(stated, str):
        return [stated]
    if isinstance(stated, list):
        return [str(mode) for mode in stated]
    return [
        POOLING_FLAGS.get(key, key) for key, value in config.items() if key.startswith("pooling_mode") and value is True
    ]


def _read_dense(folder: Path) -> DenseStep:
    config = _read_object(folder / "config.json") or {}
    try:
        inputs, outputs = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder.name}/config.json does not state in_features and out_features") from error
    act = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    return DenseStep(folder, inputs, outputs, bool(config.get("bias", True)), act)


def _read_object(path: Path) -> dict[str, Any] | None:
    value = _read_json(path)
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"{path.name} does not hold a JSON object")
    return value


def _read_json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error


class SentencePooling(nn.Module):
    """Makes [rows, dimension] of the last hidden states [rows, width, hidden]."""

    def __init__(self, recipe: PoolingRecipe, hidden: int) -> None:
        super().__init__()
        self._modes = recipe.pooling
        self._steps = recipe.steps
        self.dimension = hidden * len(recipe.pooling)
        self.dense = [_DenseLayer(step) for step in recipe.steps if isinstance(step, DenseStep)]
        for layer in self.dense:
            self.dimension = layer.outputs

    def __call__(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        x = x.astype(mx.float32)
        pooled = mx.concatenate([_POOLING_FUNCTIONS[mode](x, rows) for mode in self._modes], axis=-1)
        layers = iter(self.dense)
        for step in self._steps:
            pooled = _unit_length(pooled) if isinstance(step, NormalizeStep) else next(layers)(pooled)
        return pooled


class _DenseLayer(nn.Module):
    def __init__(self, step: DenseStep) -> None:
        super().__init__()
        self._act = activation_function(step.act)
        self.outputs = step.outputs
        self.linear = nn.Linear(step.inputs, step.outputs, bias=step.bias)
        checkpoint.load_tensors(
            self, checkpoint.read_checkpoint_tensors(step.folder), unneeded=(), whose=step.folder.name
        )
        self.set_dtype(mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        return self._act(self.linear(x))


def _unit_length(x: mx.array) -> mx.array:
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), LEAST_NORM)


def _weighted_mean(x: mx.array, weights: mx.array) -> mx.array:
    return (x * weights).sum(axis=1) / weights.sum(axis=1)


def _pool_mean_sqrt_len(x: mx.array, rows: PaddedTexts) -> mx.array:
    weights = rows.weights()
    return (x * weights).sum(axis=1) / mx.sqrt(weights.sum(axis=1))


def _later_tokens_more(rows: PaddedTexts) -> mx.array:
    return rows.weights() * mx.arange(1, rows.width + 1, dtype=mx.float32)[None, :, None]


_POOLING_FUNCTIONS: dict[str, Callable[[mx.array, PaddedTexts], mx.array]] = {
    "cls": lambda x, rows: x[:, 0],
    "max": lambda x, rows: mx.where(rows.weights() > 0, x, -mx.inf).max(axis=1),
    "mean": lambda x, rows: _weighted_mean(x, rows.weights()),
    "mean_sqrt_len_tokens": _pool_mean_sqrt_len,
    "weightedmean": lambda x, rows: _weighted_mean(x, _later_tokens_more(rows)),
    "lasttoken": lambda x, rows: mx.take_along_axis(x, (rows.lengths - 1)[:, None, None], axis=1)[:, 0],
}
