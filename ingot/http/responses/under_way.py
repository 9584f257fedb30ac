"""The responses under way, of all models."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Owned(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...


R = TypeVar("R", bound=Owned)


class Runs(Generic[R]):
    """By their ids. Each tenant sees its own."""

    def __init__(self) -> None:
        self._runs: dict[str, R] = {}

    def add(self, run: R) -> None:
        self._runs[run.id] = run

    def remove(self, run: R) -> None:
        self._runs.pop(run.id, None)

    def find(self, tenant: str, response_id: str) -> R | None:
        run = self._runs.get(response_id)
        return run if run is not None and run.tenant == tenant else None
