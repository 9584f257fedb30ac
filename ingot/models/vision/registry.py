"""Which tower a checkpoint has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ingot.kernels.device import Device
from ingot.media.families.files import ProcessorFiles
from ingot.models.vision import clip_towers, gemma, idefics, phi, pixtral, qwen, siglip_towers
from ingot.models.vision.language import LanguagePart
from ingot.models.vision.tower import Tower

MakeTower = Callable[[Any, dict[str, Any], ProcessorFiles, Device], Tower]
"""From mlx-vlm's model, of which only `parts` have weights, the config, the processors' files and the device."""


@dataclass(frozen=True, slots=True)
class TowerFamily:
    make: MakeTower
    parts: tuple[str, ...]  # what mlx-vlm's class of the whole model calls the modules that make the tower
    language: LanguagePart | None = None  # where mlx-lm has no class of this type that leaves the tower out
    arrays: tuple[str, ...] = ()  # further weights of the tower, which are no module's


_QWEN = TowerFamily(qwen.QwenTower, qwen.PARTS)
_IDEFICS = TowerFamily(idefics.idefics_tower, idefics.PARTS, idefics.LANGUAGE)
_PIXTRAL = TowerFamily(pixtral.pixtral_tower, pixtral.PARTS)

FAMILIES: Final[Mapping[str, TowerFamily]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "gemma3": TowerFamily(gemma.gemma_tower, gemma.PARTS),
    **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS),
    "internvl": TowerFamily(siglip_towers.internvl_tower, siglip_towers.PARTS, siglip_towers.LANGUAGE),
    "internvl_chat": TowerFamily(siglip_towers.internvl_chat_tower, siglip_towers.CHAT_PARTS, siglip_towers.LANGUAGE),
    "llava": TowerFamily(clip_towers.llava_tower, clip_towers.PARTS, clip_towers.LANGUAGE),
    "llava_next": TowerFamily(
        clip_towers.llava_next_tower, clip_towers.PARTS, clip_towers.LANGUAGE, arrays=(clip_towers.LINE_END,)
    ),
    "phi3_v": TowerFamily(phi.phi3_tower, phi.PARTS, phi.LANGUAGE),
    **dict.fromkeys(("pixtral", "mistral3"), _PIXTRAL),
}
"""By model_type."""
