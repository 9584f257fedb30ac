"""How the index makes records smaller instead of letting go of them, where there is a codec for that."""

from __future__ import annotations

from typing import Protocol

from ingot.cache.records import Record
from ingot.cache.tree import Node


class Condenser(Protocol):
    def may(self, node: Node) -> bool:
        """Whether a node's record may be made smaller, and is not as small as it can be."""

    def least(self, node: Node) -> int:
        """Bytes that its record takes when it is."""

    def saves(self, node: Node) -> int:
        """Bytes that would be free, if it can be done now."""

    def condensed(self, node: Node) -> Record:
        """Its record without them."""

    def seconds(self, node: Node) -> float:
        """How long getting it back as it is now would take."""


class NoCondenser:
    def may(self, node: Node) -> bool:
        return False

    def least(self, node: Node) -> int:
        assert node.record is not None
        return node.record.nbytes

    def saves(self, node: Node) -> int:
        return 0

    def condensed(self, node: Node) -> Record:
        raise NotImplementedError

    def seconds(self, node: Node) -> float:
        return 0.0
