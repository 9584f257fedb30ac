"""Questions about held-out pictures and clips, as clients put them over HTTP."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from foundry.vision.layouts import LAYOUTS, Layout, examples
from tests.media.pictures import data_url


@dataclass(frozen=True)
class Asked:
    """A request's messages, and the answer that is right."""

    messages: list[dict[str, Any]]
    answer: str
    clip: bool


def asked(name: str, seed: int, questions: int = 1) -> list[Asked]:
    """Questions about one sight of a layout."""
    layout = LAYOUTS[name]
    sight, put = examples(layout, seed, held_out=True)
    shown = parts_of(sight.frames, layout)
    return [
        Asked(
            [{"role": "user", "content": [*shown, {"type": "text", "text": question.asked}]}],
            question.answer,
            layout.clip,
        )
        for question, _ in put[:questions]
    ]


def parts_of(frames: np.ndarray, layout: Layout) -> list[dict[str, Any]]:
    files = [png(frame) for frame in frames]
    if layout.clip:
        return [{"type": "video", "video": [data_url(file) for file in files], "fps": 2.0}]
    return [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]


def png(frame: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "png")
    return out.getvalue()


def body_of(messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return {
        "messages": messages,
        "temperature": 0,
        "max_tokens": 24,
        "chat_template_kwargs": {"enable_thinking": False},
        **options,
    }
