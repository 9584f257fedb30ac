"""Which models a key is for."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ingot.config import ApiKey
from ingot.errors import Forbidden
from ingot.http.audit import refused
from ingot.http.edge import Reply


def is_allowed(model: str, key: ApiKey) -> bool:
    return not key.models or any(fnmatchcase(model, pattern) for pattern in key.models)


def refuse_unless_allowed(model: str, key: ApiKey, answer: Reply) -> None:
    """Raises Forbidden where a key is for other models."""
    if not is_allowed(model, key):
        error = Forbidden(f"This key is not for {model}, but for {', '.join(key.models)}.", param="model")
        refused(answer, error, answer.tenant)
        raise error
