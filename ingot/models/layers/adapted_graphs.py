"""Graphs of steps in which tokens have adapters: which adapters they know, and whether they were found to be right."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ingot.kernels.decode_graph.capture import Stage
from ingot.kernels.lora.kernels import LoraMatrices
from ingot.kernels.paged_attention.inputs import room_of
from ingot.models.layers.covered import matrices_of
from ingot.models.layers.products import Product
from ingot.models.lora.layers import Blend


class AdaptedGraphs:
    """Of one model, whose layers multiply by these products."""

    def __init__(self, products: Sequence[Product], stage: Stage) -> None:
        self._products, self._stage = products, stage
        self.blend: Blend | None = None
        """Which adapters passes go through, where there are some."""
        self.refused: str | None = None
        """Why such steps are not graphs."""
        self._agreed = 0  # the version whose graph was compared with the layers' own modules
        self._known = 0  # the version that there are graphs of
        self._arrays: list[mx.array] = []  # which they read

    @property
    def version(self) -> int:
        """Which adapters the open pass has; 0: none."""
        return 0 if self.blend is None or self.blend.opened is None else self.blend.version

    @property
    def are_possible(self) -> bool:
        return self.refused is None and all(each.is_covered for each in self._matrices())

    def takes(self, dtype: mx.Dtype) -> bool:
        """Whether the open pass, in that number format, can be a graph."""
        if not self.version:
            return True
        return self.are_possible and all(each.into.dtype == dtype for each in self._matrices())

    def places(self, tokens: int) -> mx.array | None:
        """Where each token's adapter is, 0 for as many more as a graph has room for."""
        if self.blend is None or self.blend.opened is None:
            return None
        found = self.blend.opened.placed(self.blend.order).view(mx.int32)
        return mx.pad(found, (0, room_of(tokens) - tokens))

    def agrees(self, version: int) -> bool:
        """Whether these adapters' graphs were compared."""
        return version in (0, self._agreed)

    def agree(self, version: int) -> None:
        self._agreed = version or self._agreed

    def is_new(self, version: int) -> bool:
        return version not in (0, self._known)

    def meet(self, version: int) -> None:
        """Graphs of others are not replayed any more."""
        self._stage.forget(self._arrays)
        self._arrays = [array for each in self._matrices() for array in (each.into, each.out)]
        self._known = version

    def _matrices(self) -> list[LoraMatrices]:
        found = map(matrices_of, self._products)
        return [each for each in found if each is not None]
