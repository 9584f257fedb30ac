"""The language model of a checkpoint that also sees, where mlx-lm has no class for the two together: its class for the
language model alone, which is given that part of the config and of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ingot.upstream import model_classes

Classes = Callable[..., tuple[type, type]]


@dataclass(frozen=True, slots=True)
class LanguagePart:
    """What mlx-lm calls the class, and what checkpoints call its weights: names that begin so begin otherwise there.
    Of several beginnings the first that fits counts, and weights with none of them are not the language model's."""

    type: str | None  # None: the one that the language model's own config states
    renamed: tuple[tuple[str, str], ...]
    config: str = "text_config"  # where that is in the whole one


def language_classes(part: LanguagePart) -> Classes:
    """What finds the classes of such a model, from the whole config."""

    def found(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = model_classes(config=_own(config, part))

        class Language(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
                own = dict(_renamed(weights, part))
                return super().sanitize(own) if hasattr(model_class, "sanitize") else own

        class LanguageArgs(args_class):  # type: ignore[misc, valid-type]
            @classmethod
            def from_dict(cls, params: dict[str, Any]) -> Any:
                return args_class.from_dict(_own(params, part))

        return Language, LanguageArgs

    return found


def _own(config: dict[str, Any], part: LanguagePart) -> dict[str, Any]:
    own = dict(config.get(part.config) or {})
    return {**own, "model_type": part.type or own["model_type"]}


def _renamed(weights: dict[str, Any], part: LanguagePart) -> Any:
    for name, weight in weights.items():
        for begins, instead in part.renamed:
            if name.startswith(begins):
                yield instead + name[len(begins) :], weight
                break
