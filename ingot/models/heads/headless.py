"""The classes of a model whose checkpoint also holds a head, which is none of the model's business."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.models.draft_heads.checkpoint import head_tensors
from ingot.models.gguf.in_place import with_file
from ingot.models.gguf.weights import with_blocks
from ingot.models.vision.language import language_classes
from ingot.models.vision.registry import FAMILIES
from ingot.upstream import model_classes


def classes_in(folder: Path, config: Mapping[str, Any]) -> Callable[..., tuple[type, type]]:
    """What finds the classes of the model in `folder`, such as load it as it is stored there: with blocks of GGUF's,
    with what stayed in such a file, and without the tensors of a head, over which not all of mlx-lm's code gets by
    itself."""
    heads = head_tensors(folder, config)
    seeing = FAMILIES.get(str(config.get("model_type")))
    plain = model_classes if seeing is None or seeing.language is None else language_classes(seeing.language)
    classes = with_blocks(plain, heads)
    if not heads:
        return with_file(classes, folder)

    def found(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = classes(config=config)

        class Headless(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
                own = {name: weight for name, weight in weights.items() if name not in heads}
                return super().sanitize(own) if hasattr(model_class, "sanitize") else own

        return Headless, args_class

    return with_file(found, folder)
