"""A LoRA adapter's files, read: for each module that it is for, two thin matrices.

The files are mlx-lm's (`adapters.safetensors`) or PEFT's (`adapter_model.safetensors`), each beside an
`adapter_config.json` that says which modules the adapter is for and how it is scaled. What cannot be honoured is
refused by name with AdapterError, before any of it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import sqrt
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from ingot.errors import AdapterError

LORA_CONFIG: Final = "adapter_config.json"
MLX_WEIGHTS: Final = "adapters.safetensors"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
PICKLED_WEIGHTS: Final = ("adapter_model.bin", "adapter_model.pt", "adapters.npz")
LARGEST_CONFIG: Final = 1 << 20
_PEFT_NAME: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_MLX_NAME: Final = re.compile(r"(.+)\.lora_([ab])")


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """What is added to a product: x @ a @ b, with the scale included."""

    a: mx.array  # [inputs, rank]
    b: mx.array  # [rank, outputs]

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    digest: str  # of its files
    pairs: Mapping[str, LoraPair]  # by the path of a module, as the files call it
    covers: Callable[[str, int], bool]  # whether its configuration is for a path, of a model with so many layers

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())


def read_lora(folder: Path) -> LoraWeights:
    """Raises AdapterError with what is wrong with it, or cannot be honoured."""
    stated = _read_lora_config(folder)
    if (folder / MLX_WEIGHTS).is_file() and "peft_type" not in stated:
        return _load_lora(folder, MLX_WEIGHTS, MlxLoraConfig.of(stated))
    if (folder / PEFT_WEIGHTS).is_file():
        return _load_lora(folder, PEFT_WEIGHTS, PeftLoraConfig.of(stated))
    pickled = next((name for name in PICKLED_WEIGHTS if (folder / name).exists()), None)
    if pickled is not None:
        raise AdapterError(f"Its weights are in {pickled}, which may hold programs: save them as safetensors.")
    raise AdapterError(f"It has neither {PEFT_WEIGHTS} nor {MLX_WEIGHTS}.")


def _read_lora_config(folder: Path) -> dict[str, Any]:
    try:
        raw = (folder / LORA_CONFIG).read_bytes()
        stated = json.loads(raw) if len(raw) <= LARGEST_CONFIG else None
    except OSError:
        raise AdapterError(f"There is no {LORA_CONFIG} that can be read.") from None
    except (ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        raise AdapterError(f"Its {LORA_CONFIG} is no JSON object.")
    return stated


def _read_lora_tensors(file: Path) -> dict[str, mx.array]:
    try:
        found: Any = mx.load(str(file))
    except (RuntimeError, ValueError, OSError):
        raise AdapterError(f"Its {file.name} cannot be read: it is damaged, or no safetensors file.") from None
    return dict(found)


def _files_digest(*files: Path) -> str:
    whole = blake2b(digest_size=16)
    for file in files:
        raw = file.read_bytes()
        whole.update(len(raw).to_bytes(8, "little") + raw)
    return whole.hexdigest()


def _load_lora(folder: Path, name: str, config: MlxLoraConfig | PeftLoraConfig) -> LoraWeights:
    is_peft = isinstance(config, PeftLoraConfig)
    halves = _matrix_pairs(_read_lora_tensors(folder / name), _PEFT_NAME if is_peft else _MLX_NAME)
    pairs = {
        path: _lora_pair(
            path, a.T if is_peft else a, b.T if is_peft else b, config.rank_of(path), config.scale_of(path)
        )
        for path, (a, b) in halves.items()
    }
    return LoraWeights(_files_digest(folder / LORA_CONFIG, folder / name), pairs, config.is_for)


def _matrix_pairs(tensors: Mapping[str, mx.array], names: re.Pattern[str]) -> dict[str, tuple[mx.array, mx.array]]:
    found: dict[str, dict[str, mx.array]] = {}
    for name, tensor in tensors.items():
        matched = names.fullmatch(name)
        if matched is None:
            raise AdapterError(f"It holds {name[:200]}, which is no part of a plain LoRA of a linear layer.")
        if tensor.ndim != 2:
            raise AdapterError(f"{matched[1][:200]}: it adapts experts, which cannot be served.")
        found.setdefault(matched[1], {})[matched[2].lower()] = tensor
    if not found:
        raise AdapterError("It holds no weights.")
    for path, own in found.items():
        if len(own) != 2:
            raise AdapterError(f"{path[:200]}: one of its two matrices is missing.")
    return {path: (own["a"], own["b"]) for path, own in found.items()}


def _lora_pair(path: str, a: mx.array, b: mx.array, rank: int, scale: float) -> LoraPair:
    if not a.shape[1] == b.shape[0] == rank:
        raise AdapterError(
            f"{path[:200]}: its matrices are of rank {a.shape[1]} and {b.shape[0]}, but its configuration says {rank}."
        )
    return LoraPair(a, b.astype(mx.float32) * scale)


ALL_LINEAR: Final = "all-linear"
CHANGED_BASE: Final = ("pissa", "olora", "corda", "loftq")
"""Initialisations that take something off the base's weights: on the unchanged base the adapter is another one."""
REFUSED_PEFT_OPTIONS: Final[Mapping[str, str]] = {
    "use_dora": "DoRA scales the base's weights by column, which is not done here",
    "lora_bias": "it adds biases of its own",
    "use_qalora": "QALoRA pools what goes in",
    "layer_replication": "it repeats layers of the base",
    "modules_to_save": "it brings whole modules of its own",
    "alora_invocation_tokens": "an activated LoRA (aLoRA) begins in the middle of a prompt",
    "trainable_token_indices": "it brings embeddings of its own",
    "target_parameters": "it adapts experts",
    "megatron_config": "it was made for Megatron's layers",
    "arrow_config": "it chooses among adapters by token",
    "loftq_config": "it goes with weights that LoftQ quantised",
}
"""Options that change more than products with weights."""


@dataclass(frozen=True, slots=True)
class PeftLoraConfig:
    rank: int
    alpha: float
    targets: str | tuple[str, ...]  # an expression for whole paths, or ends of them
    excluded: str | tuple[str, ...] = ()
    layers: frozenset[int] | None = None
    layer_lists: tuple[str, ...] = ()  # the names of the lists of layers
    by_root: bool = False  # rslora
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> PeftLoraConfig:
        """Raises AdapterError that names what cannot be honoured."""
        refuse_unsupported_peft(stated)
        layers = stated.get("layers_to_transform")
        lists = stated.get("layers_pattern") or ()
        try:
            _check_patterns(stated)
            return cls(
                int(stated["r"]),
                float(stated["lora_alpha"]),
                _module_names(stated["target_modules"]),
                _module_names(stated.get("exclude_modules") or ()),
                None if layers is None else frozenset([layers] if isinstance(layers, int) else layers),
                (lists,) if isinstance(lists, str) else tuple(lists),
                bool(stated.get("use_rslora")),
                dict(stated.get("rank_pattern") or {}),
                dict(stated.get("alpha_pattern") or {}),
            )
        except (KeyError, TypeError, ValueError, re.error) as error:
            raise AdapterError(f"Its adapter_config.json makes no sense: {error}.") from None

    def is_for(self, path: str, layers: int = 0) -> bool:
        """Whether PEFT adapts the module at `path`, however many layers the model has."""
        if _matches_names(self.excluded, path):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if not _matches_names(self.targets, path):
            return False
        if self.layers is None or isinstance(self.targets, str):
            return True
        number = self._layer(path)
        return number is not None and number in self.layers

    def rank_of(self, path: str) -> int:
        return self.ranks.get(_first_pattern(self.ranks, path), self.rank)

    def scale_of(self, path: str) -> float:
        rank = self.rank_of(path)
        alpha = self.alphas.get(_first_pattern(self.alphas, path), self.alpha)
        return alpha / (sqrt(rank) if self.by_root else rank)

    def _layer(self, path: str) -> int | None:
        for name in self.layer_lists or ("[^.]*",):
            found = re.match(rf".*\.{name}\.(\d+)\.", path)
            if found is not None:
                return int(found[1])
        return None


def refuse_unsupported_peft(stated: Mapping[str, Any]) -> None:
    kind = str(stated.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        raise AdapterError(f"It is an adapter of the kind {kind[:40]}; only LoRA can be served.")
    for name, why in REFUSED_PEFT_OPTIONS.items():
        if stated.get(name):
            raise AdapterError(f"{name}: {why}.")
    if stated.get("bias", "none") != "none":
        raise AdapterError("bias: it changes the base's biases.")
    initialisation = stated.get("init_lora_weights", True)
    if isinstance(initialisation, str) and initialisation.lower().startswith(CHANGED_BASE):
        raise AdapterError(
            f"init_lora_weights is {initialisation[:40]}: it was trained on a changed base. Convert it to a plain LoRA "
            "first."
        )


def _check_patterns(stated: Mapping[str, Any]) -> None:
    for name in ("target_modules", "exclude_modules"):
        if isinstance(stated.get(name), str):
            re.compile(stated[name])
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in stated.get(name) or {}:
            re.compile(pattern)


def _module_names(stated: str | Sequence[str]) -> str | tuple[str, ...]:
    return stated if isinstance(stated, str) else tuple(str(name) for name in stated)


def _matches_names(names: str | tuple[str, ...], path: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _first_pattern(patterns: Mapping[str, object], path: str) -> str:
    """The first that matches."""
    return next((name for name in patterns if re.match(rf"(.*\.)?({name})$", path)), path)


_LAYER_PATH = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class MlxLoraConfig:
    scale: float
    rank: int
    last: int  # how many layers, counted from the last one; 0: all of them
    keys: frozenset[str] | None  # the modules that are adapted in each of them; None: all that can be

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> MlxLoraConfig:
        """Raises AdapterError that names what cannot be honoured."""
        kind = stated.get("fine_tune_type", "lora")
        if kind != "lora":
            raise AdapterError(f"fine_tune_type is {str(kind)[:40]}: only lora can be served with its base.")
        try:
            lora = stated["lora_parameters"]
            keys = lora.get("keys")
            last = max(int(stated.get("num_layers", 0)), 0)
            return cls(float(lora["scale"]), int(lora["rank"]), last, None if keys is None else frozenset(keys))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AdapterError(f"Its adapter_config.json makes no sense: {error}.") from None

    def rank_of(self, path: str) -> int:
        return self.rank

    def scale_of(self, path: str) -> float:
        return self.scale

    def is_for(self, path: str, layers: int) -> bool:
        """Whether mlx-lm adapts the module at `path` of a model with so many layers."""
        if self.keys is not None and path in self.keys:
            return True
        found = _LAYER_PATH.fullmatch(path)
        if found is None:
            return False
        within = not self.last or int(found[1]) >= layers - self.last
        return within and (self.keys is None or found[2] in self.keys)
