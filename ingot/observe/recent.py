"""The newest few of something, by tenant and id: what ended lately, for whoever asks how it went."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

T = TypeVar("T")
REMEMBERED: Final = 512


class Recent(Generic[T]):
    """Each tenant has room of its own, so that a busy one makes nobody else's be forgotten. For one thread."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._kept: dict[str, OrderedDict[str, T]] = {}

    def add(self, tenant: str, id: str, value: T) -> None:
        own = self._kept.setdefault(tenant, OrderedDict())
        own[id] = value
        own.move_to_end(id)
        if len(own) > self._most:
            own.popitem(last=False)

    def get(self, tenant: str, id: str) -> T | None:
        return self._kept.get(tenant, OrderedDict()).get(id)
