"""Which family's rules a checkpoint goes by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ingot.media.families.files import ProcessorFiles
from ingot.media.families.gemma import Gemma
from ingot.media.families.idefics import Idefics
from ingot.media.families.internvl import InternVL
from ingot.media.families.llava import Llava
from ingot.media.families.phi import Phi3
from ingot.media.families.pixtral import Pixtral
from ingot.media.image_processors import Qwen
from ingot.media.processor import Processor

FAMILIES: Final[Mapping[str, Callable[[ProcessorFiles], Processor]]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), Qwen.of),
    "gemma3": Gemma.of,
    **dict.fromkeys(("pixtral", "mistral3"), Pixtral.of),
    **dict.fromkeys(("idefics3", "smolvlm"), Idefics.of),
    **dict.fromkeys(("internvl", "internvl_chat"), InternVL.of),
    **dict.fromkeys(("llava", "llava_next"), Llava.of),
    "phi3_v": Phi3.of,
}
"""By model_type."""


def processor_in(folder: Path) -> Processor | None:
    """As the checkpoint's own files say; None where nothing is known of its family. Raises ModelError."""
    files = ProcessorFiles.read(folder)
    found = FAMILIES.get(files.family)
    return None if found is None else found(files)
