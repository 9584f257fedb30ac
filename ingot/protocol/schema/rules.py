"""What the fields of one object must not say together. Like a kind, a rule both judges and gives its JSON Schema."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.errors import BadRequest
from ingot.protocol.schema.fields import Schema


class Condition(ABC):
    """Something that may be true of an object as it was sent."""

    @abstractmethod
    def holds(self, value: Mapping[str, Any]) -> bool: ...

    @abstractmethod
    def schema(self) -> Schema: ...


@dataclass(frozen=True, slots=True)
class Given(Condition):
    name: str

    def holds(self, value: Mapping[str, Any]) -> bool:
        return value.get(self.name) is not None

    def schema(self) -> Schema:
        return {"required": [self.name], "properties": {self.name: {"not": {"type": "null"}}}}


@dataclass(frozen=True, slots=True)
class Is(Condition):
    name: str
    value: bool | int | str

    def holds(self, value: Mapping[str, Any]) -> bool:
        held = value.get(self.name)
        return isinstance(held, bool) == isinstance(self.value, bool) and held == self.value

    def schema(self) -> Schema:
        return {"required": [self.name], "properties": {self.name: {"const": self.value}}}


@dataclass(frozen=True, slots=True)
class Not(Condition):
    condition: Condition

    def holds(self, value: Mapping[str, Any]) -> bool:
        return not self.condition.holds(value)

    def schema(self) -> Schema:
        return {"not": self.condition.schema()}


@dataclass(frozen=True, slots=True)
class Never:
    """Refuses an object of which all `conditions` hold, with the words `says`."""

    conditions: tuple[Condition, ...]
    says: str
    param: str

    def judge(self, value: Mapping[str, Any]) -> None:
        if all(condition.holds(value) for condition in self.conditions):
            raise BadRequest(self.says, param=self.param)

    def schema(self) -> Schema:
        return {"not": {"allOf": [condition.schema() for condition in self.conditions]}, "description": self.says}
