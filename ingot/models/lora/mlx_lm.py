"""mlx-lm's `adapter_config.json`: which layers an adapter is for, and how strongly it counts. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.errors import AdapterError

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class MlxConfig:
    scale: float
    rank: int
    last: int  # so many layers, counted from the last one; 0: all of them
    keys: frozenset[str] | None  # what is adapted in each of them; None: all that can be

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> MlxConfig:
        """Raises AdapterError that names what cannot be honoured."""
        kind = stated.get("fine_tune_type", "lora")
        if kind != "lora":
            raise AdapterError(f"fine_tune_type is {str(kind)[:40]}: only lora can be served beside its base.")
        try:
            given = stated["lora_parameters"]
            keys = given.get("keys")
            last = max(int(stated.get("num_layers", 0)), 0)
            return cls(float(given["scale"]), int(given["rank"]), last, None if keys is None else frozenset(keys))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AdapterError(f"Its adapter_config.json makes no sense: {error}.") from None

    def is_for(self, path: str, layers: int) -> bool:
        """Whether mlx-lm adapts the module at `path` of a model with so many layers."""
        if self.keys is not None and path in self.keys:
            return True
        found = _LAYER.fullmatch(path)
        if found is None:
            return False
        within = not self.last or int(found[1]) >= layers - self.last
        return within and (self.keys is None or found[2] in self.keys)
