"""The adapters that are served beside the model, by name.

Any thread may read `named`. Loading and unloading are the engine thread's, between two steps. An adapter whose name is
gone stays for those that run with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ingot.engine.jobs import Job
from ingot.engine.request import LoraRef, Request
from ingot.errors import AdapterError, ModelNotFound
from ingot.models.adapter import Adapter
from ingot.models.lora.loading import load_lora

log = logging.getLogger("ingot.engine")


class NamedLoras:
    def __init__(self, model: Adapter, *, most: int, most_rank: int, room: int | None = None) -> None:
        """At most so many adapters at once, each of at most that rank. `room`: bytes that they may take in all."""
        self._model, self._room = model, room
        self.most, self.most_rank = most, most_rank
        self.named: Mapping[str, LoraRef] = MappingProxyType({})
        self._leaving: set[str] = set()  # digests that nobody can ask for any more

    # For any thread

    def refuse(self, request: Request) -> None:
        """Raises ModelNotFound where a request is for an adapter that is gone."""
        lora = request.lora
        if lora is not None and self.named.get(lora.name) != lora:
            raise gone(lora)

    # The engine thread's

    @property
    def nbytes(self) -> int:
        return self._model.loras.nbytes

    def load(self, name: str, folder: Path) -> LoraRef:
        """Raises AdapterError."""
        if name in self.named:
            raise AdapterError(f"There is an adapter {name!r} already: unload it first.", param="lora_name")
        if len(self.named) >= self.most:
            raise AdapterError(f"There are {self.most} adapters already, which is the most (--max-loras).")
        known = set(self._digests)
        weights = load_lora(self._model, folder, most_rank=self.most_rank)
        if self._room is not None and self.nbytes > self._room:
            if weights.digest not in known:
                self._model.loras.drop(weights.digest)
            raise AdapterError("What is set aside for adapters does not hold it: raise --max-loras or --max-lora-rank.")
        self._leaving.discard(weights.digest)
        made = LoraRef(name, weights.digest, weights.rank)
        self.named = MappingProxyType({**self.named, name: made})
        log.info("adapter %s is loaded: rank %d, for %d layers", name, weights.rank, len(weights.pairs))
        return made

    def unload(self, name: str) -> None:
        """Nobody can ask for it any more; `drop_unused` lets it go. Raises ModelNotFound."""
        if name not in self.named:
            listed = ", ".join(f"'{each}'" for each in self.named) or "none"
            raise ModelNotFound(f"There is no adapter '{name[:200]}' here. Loaded: {listed}.", param="lora_name")
        digest = self.named[name].digest
        self.named = MappingProxyType({each: lora for each, lora in self.named.items() if each != name})
        if digest not in set(self._digests):
            self._leaving.add(digest)
        log.info("adapter %s is unloaded", name)

    def drop_unused(self, jobs: Iterable[Job]) -> None:
        if self._leaving:
            used = {job.request.lora.digest for job in jobs if job.request.lora is not None}
            for digest in self._leaving - used:
                self._model.loras.drop(digest)
            self._leaving &= used

    def holds(self, request: Request) -> bool:
        """Whether a request's adapter, if it has one, is in memory."""
        return request.lora is None or request.lora.digest in self._model.loras

    @property
    def _digests(self) -> Iterable[str]:
        return (lora.digest for lora in self.named.values())


def gone(lora: LoraRef) -> ModelNotFound:
    return ModelNotFound(f"The adapter '{lora.name}' is not loaded any more.", param="model")
