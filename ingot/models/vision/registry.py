"""Which tower a checkpoint has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ingot.kernels.device import Device
from ingot.media.families.files import ProcessorFiles
from ingot.models.vision import qwen
from ingot.models.vision.language import LanguagePart
from ingot.models.vision.tower import Tower

MakeTower = Callable[[Any, dict[str, Any], ProcessorFiles, Device], Tower]
"""From mlx-vlm's model, of which only `parts` have weights, the config, the processors' files and the device."""


@dataclass(frozen=True, slots=True)
class TowerFamily:
    make: MakeTower
    parts: tuple[str, ...]  # what mlx-vlm's class of the whole model calls the modules that make the tower
    language: LanguagePart | None = None  # where mlx-lm has no class of this type that leaves the tower out


_QWEN = TowerFamily(qwen.QwenTower, qwen.PARTS)

FAMILIES: Final[Mapping[str, TowerFamily]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
}
"""By model_type."""
