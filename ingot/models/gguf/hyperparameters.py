"""The hyper-parameters in a GGUF file's metadata, read with a record of what was read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ingot.errors import ModelError
from ingot.models.gguf.parts import GGUFModel

# What a file may say that changes nothing here: how it was made, not what it computes.
HARMLESS = frozenset({"tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"})


class Hyperparameters:
    """The hyper-parameters of one file. Remembers what was read, so that the rest can be refused."""

    def __init__(self, file: GGUFModel, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a list of one for each layer is taken where all agree."""
        value = self.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, list):
            raise ModelError(f"{self.architecture}.{key} differs from layer to layer, which is not supported")
        if value is None:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self.architecture}.{key} is {value!r}, not a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, written as the decimal that its float32 stood for."""
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.architecture}.{key} is {value!r}, not a number")
        return float(str(np.float32(value)))

    def refuse_unless(self, key: str, *allowed: Any) -> None:
        """For what is supported in one value only; an absent key stands for that value."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise ModelError(f"{self.architecture}.{key} is {value!r}, which is not supported")

    def refuse_unread(self) -> None:
        prefix = f"{self.architecture}."
        for key in self.file.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._read | HARMLESS:
                raise ModelError(f"the file sets {key}, which is not supported for {self.architecture} models")
