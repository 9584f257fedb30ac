"""The models that ship, by name."""

from __future__ import annotations

from foundry.shapes import SHAPES

LANGUAGE_MODELS = tuple(SHAPES)
SHIPPED = (*LANGUAGE_MODELS, "vision", "rerank")
