"""The language model of a checkpoint that also sees, where mlx-lm has no class for the two together: its class for the
language model alone, which is given that part of the config and of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ingot.upstream import model_classes

OLDER_NAME = "llm_config"
"""What some checkpoints call it instead."""

OverEmbeddings = Callable[[Any, Any, Any], Any]
"""From the model, embeddings and the layers' states to logits."""

Classes = Callable[..., tuple[type, type]]


@dataclass(frozen=True, slots=True)
class LanguagePart:
    """What mlx-lm calls the class, and what checkpoints call its weights: names that begin so begin otherwise there.
    Of several beginnings the first that fits counts, and weights with none of them are not the language model's."""

    type: str | None  # None: the one that the language model's own config states
    renamed: tuple[tuple[str, str], ...]
    config: str | None = "text_config"  # where that is in the whole one; None: it is the whole one
    over: OverEmbeddings | None = None  # how the model runs over embeddings, where mlx-lm's class takes tokens alone


BESIDE: Final = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)
"""What checkpoints call a language model that stands beside its tower, older ones and newer."""


def language_classes(part: LanguagePart) -> Classes:
    """What finds the classes of such a model, from the whole config."""

    def found(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = model_classes(config=_own(config, part))

        class Language(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
                own = dict(_renamed(weights, part))
                return super().sanitize(own) if hasattr(model_class, "sanitize") else own

            def __call__(self, inputs: Any, cache: Any = None, **given: Any) -> Any:
                embeddings = given.get("input_embeddings")
                if part.over is None or embeddings is None:
                    return super().__call__(inputs, cache=cache, **given)
                return part.over(self, embeddings, cache)

        class LanguageArgs(args_class):  # type: ignore[misc, valid-type]
            @classmethod
            def from_dict(cls, params: dict[str, Any]) -> Any:
                return args_class.from_dict(_own(params, part))

        return Language, LanguageArgs

    return found


def _own(config: dict[str, Any], part: LanguagePart) -> dict[str, Any]:
    own = dict(config if part.config is None else config.get(part.config) or config.get(OLDER_NAME) or {})
    return {**own, "model_type": part.type or own["model_type"]}


def _renamed(weights: dict[str, Any], part: LanguagePart) -> Any:
    for name, weight in weights.items():
        for begins, instead in part.renamed:
            if name.startswith(begins):
                yield instead + name[len(begins) :], weight
                break
