"""What a model sees with, from its files and the settings to what the engine is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config import Settings
from ingot.engine.vision_encoder import Eyes, LookMemory
from ingot.errors import ConfigError, ModelError
from ingot.media import bounds
from ingot.media.families.registry import processor_in
from ingot.media.layout import MediaKind, PictureWish
from ingot.media.processor import Processor
from ingot.media.size import Size
from ingot.models.vision.loading import has_tower
from ingot.models.vision.rehearsal import rehearse
from ingot.models.vision.tower import Tower
from ingot.models.vision.upstream import require_vision

SHARE = 1 / 8
"""Of what the weights leave, the most that is set aside for looking."""
REFUSED = dict.fromkeys(
    ("phi4mm", "phi4_multimodal"),
    "Phi 4 multimodal is not served: it reads pictures and sound through adapters of its language model, for which "
    "mlx-lm has no class.",
)
"""By model_type, families that nothing can be done for."""
LEAST_UNPACKING = 320 << 20
"""Enough for a large photograph, a page or a film, where that is no more than a quarter of what is free."""
LARGEST = Size(16_384, 16_384)
"""Larger than any model is shown a picture."""


@dataclass(frozen=True, slots=True)
class Vision:
    """`sees`: whether the tower is to be loaded. `processor` is there also where it is not, but could be."""

    processor: Processor | None
    sees: bool
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any], settings: Settings) -> Vision:
        """As the model's files and the settings say. Raises ModelError."""
        if (refusal := REFUSED.get(str(config.get("model_type")))) is not None:
            raise ModelError(refusal)
        if has_tower(config):
            if settings.text_only:
                return cls(
                    processor_in(folder), sees=False, notes=("text alone, as asked: its vision tower is not loaded",)
                )
            require_vision()
            return cls(processor_in(folder), sees=True)
        notes = []
        if isinstance(config.get("vision_config"), dict):
            notes.append("text alone: its vision tower is of a family that ingot does not know")
        asked = [
            name for name, given in (("text-only", settings.text_only), ("media-hosts", settings.media_hosts)) if given
        ]
        notes += [f"--{name} changes nothing: there is no vision tower here" for name in asked]
        return cls(None, sees=False, notes=tuple(notes))

    @property
    def shown(self) -> tuple[MediaKind, ...]:
        """What it sees."""
        return tuple(self.processor.placeholders) if self.sees and self.processor is not None else ()

    def eyes(self, tower: Tower | None, free: int) -> Eyes | None:
        """`free` are the bytes that weights leave. The tower is run once, so that nothing is left to compile."""
        if tower is None or self.processor is None:
            return None
        rehearse(tower, self.processor)
        return Eyes(tower, look_memory(tower, self.processor, free))

    def refuse(self, eyes: Eyes | None, widest: int) -> None:
        """Raises ConfigError where a picture has more tokens than a pass may have, so many, and none of them can be
        computed without all others."""
        if eyes is None or self.processor is None or not eyes.tower.mutual:
            return
        needed = self.processor.picture(LARGEST, PictureWish()).features
        if needed > widest:
            raise ConfigError(
                f"a picture of this model is {needed} tokens, which are computed at once, but memory and prefill_chunk "
                f"allow {widest}. Raise them, or serve it with --text-only.",
                param="prefill_chunk",
            )


def unpacking_memory(free: int) -> int:
    """For the processes that unpack pictures, clips and PDFs."""
    return max(0, min(bounds.PIXEL_MEMORY, max(int(free * SHARE), min(LEAST_UNPACKING, free // 4))))


def look_memory(tower: Tower, processor: Processor, free: int) -> LookMemory:
    """Enough for the largest picture that the model is shown, if that is no more than a share of what is free; half of
    it for features, so that many pictures, or those of several requests, are held at once. Unpacking has a share of
    its own."""
    largest = tower.needs(processor.picture(LARGEST, PictureWish()))
    most = int(free * SHARE)
    work = min(2 * (largest.pixels + largest.work), most // 2)
    features = min(max(8 * largest.features, work), most // 2)
    return LookMemory(work, features, unpacking_memory(free))
