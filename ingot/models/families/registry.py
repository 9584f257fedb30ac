"""Finds what is known of a module, a class or a model type of mlx-lm's.

Every other file of this folder is a family's, or some relatives', and lists them in FAMILIES. It is found here by
being there.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType

from ingot.models import families
from ingot.models.families.description import Family, HeadWiring, MLPWiring, Norm, Recurrence, Wiring

UPSTREAM = "mlx_lm.models"
_OURS = ("description", "registry")


def found(package: ModuleType) -> Iterator[Family]:
    """The families that the files of a package describe."""
    for file in pkgutil.iter_modules(package.__path__):
        if file.name not in _OURS:
            yield from importlib.import_module(f"{package.__name__}.{file.name}").FAMILIES


def registered(described: Iterable[Family]) -> Mapping[str, Family]:
    """Families by name. Raises ValueError where two describe the same models."""
    known: dict[str, Family] = {}
    types: set[str] = set()
    for family in described:
        for model_type in (family.name, *family.text_only):
            if model_type in types:
                raise ValueError(f"the family {model_type} is described twice in {families.__name__}")
            types.add(model_type)
        known[family.name] = family
    return known


FAMILIES = registered(found(families))
_UNKNOWN = Family("unknown")
_WHOLE = {text_only: family.name for family in FAMILIES.values() for text_only in family.text_only}


def of_type(model_type: str) -> Family:
    """What is known of models of this type: of most, nothing that a whole model is told by."""
    return FAMILIES.get(model_type, _UNKNOWN)


def whole_type(model_type: str) -> str | None:
    """The type whose family also reads models of `model_type`, which were saved without their vision part."""
    return _WHOLE.get(model_type)


def head_of(model_type: str) -> HeadWiring | None:
    """The head that checkpoints of this type may hold."""
    return of_type(_WHOLE.get(model_type, model_type)).head


def wiring_of(module: object) -> Wiring | None:
    """How its attention is wired, if it is attention of a class that is known."""
    return _family_of(module).attention.get(type(module).__name__)


def gating_of(module: object) -> MLPWiring | None:
    """How it is gated, if it is an MLP of a class that is known."""
    return _family_of(module).mlps.get(type(module).__name__)


def recurrence_of(module: object) -> Recurrence | None:
    """What it computes, if it is a recurrent mixer of a class that is known."""
    return _family_of(module).recurrences.get(type(module).__name__)


def norm_of(module: object) -> Norm | None:
    """What it computes, if it is a norm of a family's own class that is known."""
    return _family_of(module).norms.get(type(module).__name__)


def is_fusible(layer: object) -> bool:
    """Whether it is a layer of a class whose arithmetic is Llama's."""
    return type(layer).__name__ in _family_of(layer).fused


def _family_of(module: object) -> Family:
    package, _, name = type(module).__module__.rpartition(".")
    return FAMILIES.get(name, _UNKNOWN) if package == UPSTREAM else _UNKNOWN
