"""A server whose model is shown pictures and clips: real tokenizers and templates, and rules instead of a tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ingot.media.image_processors import GemmaProcessor, QwenProcessor
from ingot.media.layout import MediaProcessor
from ingot.media.processor_parts import ProcessorFiles
from ingot.protocol.served import ServedModel
from tests.http.scripted import CARD, settings
from tests.templates.real import named

PATCH, MERGE = 16, 2
PIXELS = {"size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}, "patch_size": PATCH, "merge_size": MERGE}
TIMED = QwenProcessor.of(ProcessorFiles({"model_type": "qwen3_5"}, PIXELS, PIXELS))
UNTIMED = QwenProcessor.of(ProcessorFiles({"model_type": "qwen2_5_vl"}, PIXELS, PIXELS))


class StillsOnly(GemmaProcessor):
    """Every picture is 9 tokens of Qwen's, and clips are shown as pictures."""

    __slots__ = ()

    @property
    def placeholders(self) -> dict[Any, Any]:
        return {"image": TIMED.placeholders["image"]}

    def image_layout(self, size: Any, layout_options: Any) -> Any:
        return replace(
            super().image_layout(size, layout_options), token="<|image_pad|>", written="<|image_pad|>", runs=(9,)
        )


STILLS = StillsOnly(96, 16, 9)


def seeing(processor: MediaProcessor | None = TIMED, model: str = "qwen-3.5", **options: Any) -> ServedModel:
    card = replace(CARD, vocab=300_000, context=65_536)
    return ServedModel.of(card, named(model).tokenizer, settings(**options), processor=processor)
