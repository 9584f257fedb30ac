"""PEFT's `adapter_config.json`: which modules an adapter is for, how strongly each counts, and what we cannot honour.
Pure Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Final

from ingot.errors import AdapterError

ALL_LINEAR: Final = "all-linear"
CHANGED_BASE: Final = ("pissa", "olora", "corda", "loftq")
"""Ways to begin training that take something off the base's weights: without that the adapter is another one."""
REFUSED: Final[Mapping[str, str]] = {
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
"""What changes more than products with weights."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    rank: int
    alpha: float
    targets: str | tuple[str, ...]  # an expression for whole paths, or ends of them
    excluded: str | tuple[str, ...] = ()
    layers: frozenset[int] | None = None
    layer_lists: tuple[str, ...] = ()  # what the lists of layers are called
    by_root: bool = False  # rslora
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> PeftConfig:
        """Raises AdapterError that names what cannot be honoured."""
        refuse_what_is_not_done(stated)
        layers = stated.get("layers_to_transform")
        lists = stated.get("layers_pattern") or ()
        try:
            _check_patterns(stated)
            return cls(
                int(stated["r"]),
                float(stated["lora_alpha"]),
                _names(stated["target_modules"]),
                _names(stated.get("exclude_modules") or ()),
                None if layers is None else frozenset([layers] if isinstance(layers, int) else layers),
                (lists,) if isinstance(lists, str) else tuple(lists),
                bool(stated.get("use_rslora")),
                dict(stated.get("rank_pattern") or {}),
                dict(stated.get("alpha_pattern") or {}),
            )
        except (KeyError, TypeError, ValueError, re.error) as error:
            raise AdapterError(f"Its adapter_config.json makes no sense: {error}.") from None

    def is_for(self, path: str) -> bool:
        """Whether the module at `path` is adapted, as PEFT decides it."""
        if _matches(self.excluded, path):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if not _matches(self.targets, path):
            return False
        if self.layers is None or isinstance(self.targets, str):
            return True
        number = self._layer(path)
        return number is not None and number in self.layers

    def rank_of(self, path: str) -> int:
        return self.ranks.get(_pattern(self.ranks, path), self.rank)

    def scale_of(self, path: str) -> float:
        rank = self.rank_of(path)
        alpha = self.alphas.get(_pattern(self.alphas, path), self.alpha)
        return alpha / (sqrt(rank) if self.by_root else rank)

    def _layer(self, path: str) -> int | None:
        for name in self.layer_lists or ("[^.]*",):
            found = re.match(rf".*\.{name}\.(\d+)\.", path)
            if found is not None:
                return int(found[1])
        return None


def refuse_what_is_not_done(stated: Mapping[str, Any]) -> None:
    kind = str(stated.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        raise AdapterError(f"It is an adapter of the kind {kind[:40]}; only LoRA can be served.")
    for name, why in REFUSED.items():
        if stated.get(name):
            raise AdapterError(f"{name}: {why}.")
    if stated.get("bias", "none") != "none":
        raise AdapterError("bias: it changes the base's biases.")
    begun = stated.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower().startswith(CHANGED_BASE):
        raise AdapterError(
            f"init_lora_weights is {begun[:40]}: it was trained on a changed base. Convert it to a plain LoRA first."
        )


def _check_patterns(stated: Mapping[str, Any]) -> None:
    for name in ("target_modules", "exclude_modules"):
        if isinstance(stated.get(name), str):
            re.compile(stated[name])
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in stated.get(name) or {}:
            re.compile(pattern)


def _names(stated: str | Sequence[str]) -> str | tuple[str, ...]:
    return stated if isinstance(stated, str) else tuple(str(name) for name in stated)


def _matches(names: str | tuple[str, ...], path: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _pattern(patterns: Mapping[str, object], path: str) -> str:
    """The first that matches."""
    return next((name for name in patterns if re.match(rf"(.*\.)?({name})$", path)), path)
