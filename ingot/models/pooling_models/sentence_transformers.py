"""What the sentence-transformers files beside a model say about making a vector of its hidden states.

`modules.json` lists the steps; each has a folder with its own config. Only what is understood is honoured, and the
rest is an error that names it: a vector made by another recipe looks as good as the right one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import ModelError

# In the order in which sentence-transformers joins them where there are several.
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
STATEMENTS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
INERT = ("Dropout",)


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer behind the pooling; its weights are in `folder`."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    act: str


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scale to length 1."""


RecipeStep = Dense | Normalize


@dataclass(frozen=True, slots=True)
class Recipe:
    pooling: tuple[str, ...]
    steps: tuple[RecipeStep, ...]
    length: int | None = None  # the longest input, where the files state one
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name of the one that stands before every text
    notes: tuple[str, ...] = ()

    @property
    def unit(self) -> bool:
        """Whether vectors have length 1."""
        return bool(self.steps) and isinstance(self.steps[-1], Normalize)


def read_recipe(folder: Path, *, usual: str) -> Recipe:
    """The recipe in `folder`; `usual` is the pooling to assume, with a note, where the files leave it open."""
    statement = next((found for name in STATEMENTS if (found := _object(folder / name)) is not None), {})
    library = _object(folder / "config_sentence_transformers.json") or {}
    prompts = _prompts(library)
    pooling, steps, notes = _modules(folder, usual, prompted=any(prompts.values()))
    length = statement.get("max_seq_length")
    if length is not None and type(length) is not int:
        raise ModelError(f"max_seq_length is {length!r}, which is no number of tokens")
    default = library.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(
            f"config_sentence_transformers.json names the default prompt {default!r} and has none so called"
        )
    return Recipe(pooling, steps, length, bool(statement.get("do_lower_case", False)), prompts, default, tuple(notes))


def _prompts(library: dict[str, Any]) -> dict[str, str]:
    stated = library.get("prompts") or {}
    if not isinstance(stated, dict) or not all(isinstance(text, str) for text in stated.values()):
        raise ModelError("config_sentence_transformers.json: prompts is not an object of texts")
    return stated


def _modules(folder: Path, usual: str, *, prompted: bool) -> tuple[tuple[str, ...], tuple[RecipeStep, ...], list[str]]:
    modules = _listed(folder / "modules.json")
    if modules is None:
        note = f"no modules.json: vectors are made by {usual} pooling and scaled to length 1, which is a guess"
        return (usual,), (Normalize(),), [note]
    pooling: tuple[str, ...] = ()
    steps: list[RecipeStep] = []
    notes: list[str] = []
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        place = folder / str(module.get("path", ""))
        if kind == "Transformer":
            continue
        if kind == "Pooling":
            pooling, said = _pooling(place, usual, prompted=prompted)
            notes += said
        elif kind == "Normalize":
            steps.append(Normalize())
        elif kind == "Dense":
            steps.append(_dense(place))
        elif kind not in INERT:
            raise ModelError(f"modules.json names the module {module.get('type')!r}, which ingot does not know")
    if not pooling:
        raise ModelError("modules.json names no pooling, so it is no model that makes one vector of a text")
    return pooling, tuple(steps), notes


def _pooling(place: Path, usual: str, *, prompted: bool) -> tuple[tuple[str, ...], list[str]]:
    config = _object(place / "config.json")
    if config is None:
        return (usual,), [f"{place.name}/config.json is missing: {usual} pooling is a guess"]
    modes = _modes(config)
    if unknown := [mode for mode in modes if mode not in POOLINGS]:
        raise ModelError(f"{place.name}/config.json asks for the pooling {unknown[0]!r}, which ingot does not know")
    if not modes:
        raise ModelError(f"{place.name}/config.json asks for no pooling")
    if config.get("include_prompt") is False and prompted:
        raise ModelError("The model's pooling leaves its prompts out, which ingot does not know how to do")
    return tuple(sorted(modes, key=POOLINGS.index)), []


def _modes(config: dict[str, Any]) -> list[str]:
    stated = config.get("pooling_mode")
    if isinstance(stated, str):
        return [stated]
    if isinstance(stated, list):
        return [str(mode) for mode in stated]
    return [FLAGS.get(key, key) for key, value in config.items() if key.startswith("pooling_mode") and value is True]


def _dense(place: Path) -> Dense:
    config = _object(place / "config.json") or {}
    try:
        inputs, outputs = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{place.name}/config.json does not state in_features and out_features") from error
    act = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    return Dense(place, inputs, outputs, bool(config.get("bias", True)), act)


def _object(path: Path) -> dict[str, Any] | None:
    value = _json(path)
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"{path.name} does not hold a JSON object")
    return value


def _listed(path: Path) -> list[dict[str, Any]] | None:
    value = _json(path)
    if value is not None and not (isinstance(value, list) and all(isinstance(entry, dict) for entry in value)):
        raise ModelError(f"{path.name} does not hold a list of modules")
    return value


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error
